"""The command line answers at once: nothing heavy is imported until a command runs."""

import subprocess
import sys

import PIL.Image
import pytest

from vitlens.commands.registry import COMMANDS

HEAVY = ("torch", "numpy", "matplotlib", "timm", "torchvision", "PIL", "scipy", "sklearn", "accelerate", "jaxtyping")
PROGRAM = """
import sys
{first}
heavy = [name for name in {heavy} if name in sys.modules]
assert not heavy, heavy
"""


def runs_without(first: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first, heavy=HEAVY)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_vitlens_imports_nothing_heavy():
    runs_without("import vitlens; vitlens.__version__; dir(vitlens)")


def test_no_help_imports_anything_heavy():
    lines = [["--help"], *([word, "--help"] for word in COMMANDS)]
    runs_without(f"from vitlens.cli.main import run\nassert [run(line) for line in {lines}] == [0] * {len(lines)}")


def test_completion_imports_nothing_heavy():
    runs_without("from vitlens.cli.build import *; assert complete_model('vit') and complete_data('dig')")


@pytest.mark.slow
def test_a_map_of_one_photograph_imports_no_more_than_it_uses(tmp_path):
    """The compiler and scipy.stats together take as long as all the rest of such a run."""
    PIL.Image.new("RGB", (40, 40), "teal").save(tmp_path / "photo.png")
    line = ["rollout", "timm:vit_tiny_patch16_224", "--random-weights", "--images", str(tmp_path / "photo.png")]
    unused = (
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.fsdp",
        "sympy",
        "scipy",
        "sklearn",
        "accelerate",
        "pandas",
        "matplotlib.pyplot",
        "transformers",
        "open_clip",
        "captum",
    )
    program = PROGRAM.format(
        first=f"from vitlens.cli.main import run\nassert run({[*line, '--out', str(tmp_path / 'out')]}) == 0",
        heavy=unused,
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_wrong_call_imports_nothing_heavy():
    runs_without("from vitlens.cli.main import run; assert run(['rollout', 'm', '--fusion', 'sum']) == 2")


def test_python_dash_m_is_the_same():
    shown = [
        subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        for command in (
            [sys.executable, "-m", "vitlens"],
            [sys.executable, "-c", "from vitlens.cli.main import main; main()"],
        )
    ]
    assert shown[0] == shown[1] != ""
