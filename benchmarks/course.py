"""Make the answers of the course again: `python -m benchmarks.course [NAME ...]`; without a name,
all of them, about five minutes of one core.

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
    """A command without "vitlens", and the tables of its results that the course reads."""

    line: str
    tables: tuple[str, ...] = ()


ANSWERS: Final[Mapping[str, Answer]] = {
    "walkthrough": Answer(
        "walkthrough vit-digits --layer 3 --head 1",
        ("walk", "steps", "entropies", "permutations", "answers"),
    ),
    "profile-presets": Answer("profile vit-mini vit-micro vit-tiny --batch-sizes 1"),
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
}


def make(name: str, folder: Path = FOLDER) -> None:
    """Run the command of an answer and write what the course reads of its folder."""
    answer = ANSWERS[name]
    with TemporaryDirectory() as scratch:
        before = _processor_time()
        words = [sys.executable, "-m", "vitlens", *shlex.split(answer.line), "--quiet"]
        subprocess.run([*words, "--out", f"out/{name}"], cwd=scratch, check=True)
        seconds = _processor_time() - before
        output = Path(scratch) / "out" / name
        config = json.loads((output / "config.json").read_text(encoding="utf-8"))
        results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    _write(target / "config.json", {**config, "cpu_seconds": round(seconds, 1)})
    tables = {table: results["tables"][table] for table in answer.tables}
    _write(target / "results.json", {**results, "tables": tables})


def _processor_time() -> float:
    """Return the seconds of processor time of all commands so far, on a loaded machine as on an
    idle one.
    """
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for answer_name in sys.argv[1:] or ANSWERS:
        print(answer_name, flush=True)
        make(answer_name)
