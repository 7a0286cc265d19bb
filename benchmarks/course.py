"""Make the answers of the course again: `python -m benchmarks.course [NAME ...]`; without a name,
all of them, about fifteen minutes of one core.

Each answer is what one command of docs/course.md writes: docs/answers/NAME holds its config.json
with the processor time, and its results.json with the tables that the page reads. The page takes
the commands, the times and the numbers from there.
"""

import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "docs" / "answers"


@dataclass(frozen=True)
class Answer:
    """A command without "vitlens", and the tables of its results that the course reads.

    after: answers of which the command reads the run folders, out/NAME.
    """

    line: str
    tables: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


ANSWERS: Final[Mapping[str, Answer]] = {
    "walkthrough": Answer(
        "walkthrough vit-digits --layer 3 --head 1",
        ("walk", "steps", "entropies", "permutations", "answers"),
    ),
    "profile-presets": Answer("profile vit-mini vit-micro vit-tiny --batch-sizes 1"),
    "profile-large": Answer(
        "profile timm:vit_base_patch16_224 timm:vit_large_patch16_224 timm:vit_huge_patch14_224 "
        "--random-weights --sizes 224 --batch-sizes 1"
    ),
    "profile-patches": Answer("profile vit-mini --patch-size 2,4,8,16 --batch-sizes 1"),
    "profile-growth": Answer(
        "profile vit-micro swin-micro --sizes 32,64,96,128 --batch-sizes 1", ("exponents",)
    ),
    "positions": Answer("attention vit-digits --limit 2"),
    "windows": Answer("attention swin-micro@random --limit 2", ("windows",)),
    "windows-stats": Answer("stats swin-micro@random --limit 20", ("heads",)),
    "evaluate": Answer("evaluate vit-digits cnn-digits"),
    "features-random": Answer(
        "features vit-digits random=vit-digits@random --limit 100 --no-cache --no-tsne",
        ("features", "sets"),
    ),
    "rollout": Answer("rollout vit-digits --limit 100 --method rollout,relevance --target 3"),
    "rollout-predicted": Answer("rollout vit-digits --limit 100 --method rollout,relevance"),
    "stats": Answer("stats vit-digits --limit 100", ("heads",)),
    "ablate": Answer("ablate vit-digits --limit 100", ("units",)),
    "own-frozen-vit": Answer(
        "train vit-digits --data shapes --limit 500 --freeze-backbone --epochs 20"
    ),
    "own-frozen-cnn": Answer(
        "train cnn-digits --data shapes --limit 500 --freeze-backbone --epochs 20"
    ),
    "own-conflict": Answer(
        "compare vit=out/own-frozen-vit cnn=out/own-frozen-cnn --data shapes-conflict --maps 20 "
        "--panels 6 --checked 0 --no-harder",
        after=("own-frozen-vit", "own-frozen-cnn"),
    ),
    "own-clip": Answer(
        "train vit-mini --objective clip --data shapes --patch-size 8 --dim 64 --heads 4 "
        "--batch-size 32 --epochs 5",
    ),
    "own-features": Answer(
        "features clip=out/own-clip --data shapes --limit 100 --no-tsne "
        "--clip-templates 'a photo of a {}'",
        after=("own-clip",),
    ),
    "own-vit": Answer("train vit-mini --data shapes --patch-size 8 --batch-size 32 --epochs 4"),
    "own-unstable": Answer(
        "train vit-mini --data shapes --patch-size 8 --batch-size 32 --epochs 4 "
        "--learning-rate 0.02 --warmup 0 --clip 0"
    ),
    "own-cnn": Answer("train resnet20 --data shapes --batch-size 32 --epochs 1"),
}


def make(name: str, folder: Path = FOLDER, scratch: Path | None = None) -> None:
    """Run the command of an answer and write what the course reads of its folder.

    scratch: where the commands run, and where those of earlier answers have left out/NAME.
    """
    if scratch is None:
        with TemporaryDirectory() as temporary:
            make(name, folder, Path(temporary))
        return
    answer = ANSWERS[name]
    for earlier in answer.after:
        if not (scratch / "out" / earlier).exists():
            _run(earlier, scratch)
    before = _processor_time()
    _run(name, scratch)
    seconds = _processor_time() - before
    output = scratch / "out" / name
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    _write(target / "config.json", {**config, "cpu_seconds": round(seconds, 1)})
    tables = {table: results["tables"][table] for table in answer.tables}
    _write(target / "results.json", {**results, "tables": tables})


def _run(name: str, scratch: Path) -> None:
    """Run the command of an answer, which writes out/NAME."""
    words = [sys.executable, "-m", "vitlens", *shlex.split(ANSWERS[name].line), "--quiet"]
    subprocess.run([*words, "--out", f"out/{name}"], cwd=scratch, check=True)


def _processor_time() -> float:
    """Return the seconds of processor time of all commands so far, on a loaded machine as on an
    idle one.
    """
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with TemporaryDirectory() as shared:
        for answer_name in sys.argv[1:] or ANSWERS:
            print(answer_name, flush=True)
            make(answer_name, scratch=Path(shared))
