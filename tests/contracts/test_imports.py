"""The command line answers at once: nothing heavy is imported until a command runs."""

import subprocess
import sys

import PIL.Image
import pytest

from vitlens.commands.registry import COMMANDS

HEAVY = (
    "torch",
    "numpy",
    "matplotlib",
    "timm",
    "torchvision",
    "PIL",
    "scipy",
    "sklearn",
    "accelerate",
    "jaxtyping",
)
# of a map of one photograph: the compiler and scipy.stats together take as long as all the rest of
# such a run
UNUSED = (
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


def runs_without(first: str, unused: tuple[str, ...] = HEAVY) -> None:
    program = (
        f"import sys\n{first}\nheavy = [each for each in {unused} if each in "
        "sys.modules]\nassert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_neither_import_nor_help_nor_completion_nor_a_wrong_call_imports_anything_heavy():
    helps = [["--help"], *([word, "--help"] for word in COMMANDS)]
    runs_without(
        "import vitlens; vitlens.__version__; dir(vitlens)\nfrom vitlens.cli.main import run\n"
        f"assert not any(run(line) for line in {helps})\n"
        "assert run(['rollout', 'm', '--fusion', 'sum']) == 2\n"
        "from vitlens.cli.build import *; assert complete_model('vit') and complete_data('dig')"
    )


@pytest.mark.slow
def test_a_map_of_one_photograph_imports_no_more_than_it_uses(tmp_path):
    PIL.Image.new("RGB", (40, 40), "teal").save(tmp_path / "photo.png")
    line = [
        "rollout",
        "timm:vit_tiny_patch16_224",
        "--random-weights",
        "--images",
        str(tmp_path / "photo.png"),
    ]
    line += ["--out", str(tmp_path / "out")]
    runs_without(f"from vitlens.cli.main import run\nassert run({line}) == 0", UNUSED)


def test_python_dash_m_is_the_same():
    ways = (["-m", "vitlens"], ["-c", "from vitlens.cli.main import main; main()"])
    outputs = [
        subprocess.check_output([sys.executable, *way, "--version"], text=True) for way in ways
    ]
    assert outputs[0] == outputs[1] != ""
