"""Libraries are imported without torch's compiler; ImageNet's constants are torchvision's."""

import subprocess
import sys

import pytest

from vitlens.names import are_imagenet, imagenet_classes, imagenet_indices
from vitlens.references import import_without_compiler

PROGRAM = """
import sys, vitlens
from vitlens.references import import_without_compiler
sys.path.insert(0, sys.argv[1])
for name in ("torchvision:resnet18", "timm:vit_tiny_patch16_224"):
    vitlens.load(name, random_weights=True)
marks = import_without_compiler("marks")
assert not [name for name in sys.modules if name.startswith(("torch._dynamo", "sympy"))]
assert marks.compiling() is False and marks.compiling.__doc__
import torch, torchvision
calls = torch.compile(lambda: (marks.compiling(), torch.compiler.is_compiling()), backend="eager")
assert calls() == (False, True)
box = torchvision.ops.roi_align(torch.ones(1, 1, 4, 4), [torch.tensor([[0.0, 0.0, 4.0, 4.0]])], 2)
assert box.shape == (1, 1, 2, 2)
"""
MARKS = """
import torch
@torch.compiler.disable
def compiling():
    "Whether it runs inside the compiler."
    return torch.compiler.is_compiling()
"""


@pytest.mark.slow  # imports torch, and its compiler, in a process of its own: 4 s
def test_the_compiler_stays_out_and_a_marked_function_is_not_compiled_once_there_is_one(tmp_path):
    (tmp_path / "marks.py").write_text(MARKS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_library_that_is_not_there_is_said_and_no_placeholder_left(monkeypatch):
    for name in ("torch._dynamo", "torch._dynamo.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_without_compiler("no_such_library")
    assert not {"torch._dynamo", "torch._dynamo.utils"} & set(sys.modules)


def test_the_thousand_classes_are_different_in_order_of_wnid_and_as_torchvision_ships_them():
    from torchvision.models import ResNet50_Weights

    wnids = list(imagenet_indices())
    names = imagenet_classes()
    assert wnids == sorted(wnids)
    assert list(imagenet_indices().values()) == list(range(1000))
    assert len(set(names)) == 1000
    theirs = ResNet50_Weights.IMAGENET1K_V2.meta["categories"]
    # a shift by one would leave next to none
    assert sum(ours == name for ours, name in zip(names, theirs)) > 950
    assert are_imagenet(wnids[:2])
    assert not are_imagenet(["n01440764", "cat"])
    assert not are_imagenet([])
