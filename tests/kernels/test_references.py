"""Libraries are imported without torch's compiler, and work with it once it is there."""

import subprocess
import sys

import pytest


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_compiler_stays_out_and_works_afterwards():
    run("""
import sys, vitlens
vitlens.load("timm:vit_tiny_patch16_224@random")
vitlens.load("torchvision:resnet18@random")
assert not [name for name in sys.modules if name.startswith(("torch._dynamo", "sympy"))]
import torch, torchvision, torch._dynamo.utils
assert torch._dynamo.utils.counters is not None and torch._dynamo.__file__
box = torchvision.ops.roi_align(torch.ones(1, 1, 4, 4), [torch.tensor([[0.0, 0.0, 4.0, 4.0]])], 2)
assert box.shape == (1, 1, 2, 2)
""")


@pytest.mark.slow  # imports torch, and its compiler, in a process of its own: 4 s
def test_a_marked_function_is_not_compiled_once_there_is_a_compiler(tmp_path):
    (tmp_path / "marks.py").write_text("""
import torch
@torch.compiler.disable
def compiling():
    "Whether it runs inside the compiler."
    return torch.compiler.is_compiling()
""")
    run(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from vitlens.references import import_without_compiler
try:
    import_without_compiler("no_such_library")
except ModuleNotFoundError as error:
    assert error.name == "no_such_library"
marks = import_without_compiler("marks")
assert "torch._dynamo" not in sys.modules
assert marks.compiling() is False and marks.compiling.__doc__
import torch
def calls():
    return marks.compiling(), torch.compiler.is_compiling()
assert torch.compile(calls, backend="eager")() == (False, True)
""")
