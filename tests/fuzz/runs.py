"""Short runs of every command, finished or killed on their way, whose folders are damaged, or resumed."""

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.box import Box, start_command

# Words of a short finished run of each command that leaves a report; {vit} and {cnn} are models.
FINISHED: dict[str, str] = {
    "predict": "predict {vit} --images {photos}",
    "evaluate": "evaluate {vit} {cnn} --limit 20",
    "attention": "attention {vit} --limit 2",
    "rollout": "rollout {vit} --limit 2 --fusion mean,max",
    "stats": "stats {vit} --limit 8",
    "ablate": "ablate {vit} --limit 10 --no-curves",
    "explain": "explain {vit} --limit 2 --method rollout,relevance",
    "compare": "compare {vit} {cnn} --limit 8 --panels 2 --no-harder",
    "attack": "attack {vit} --limit 6 --attack fgsm,noise --no-corruptions --no-inside",
    "features": "features {vit} --limit 20 --no-tsne --no-cache",
    "profile": "profile {vit} --batch-sizes 1",
    "audit": "audit {vit} --limit 8 --budget 0.001",
    "walkthrough": "walkthrough {vit}",
    "train": "train vit-mini --dim 16 --depth 2 --heads 2 --patch-size 8 --epochs 1 --limit 20",
}
_TRAIN = "train vit-mini --dim 32 --depth 2 --heads 2 --patch-size 8 --batch-size 50"
_ATTACK = "attack {vit} --attack pgd,cw --no-corruptions --no-inside"


@dataclass(frozen=True)
class Begun:
    """A run that can be resumed: its words and the longer ones of a run that is killed at any time; the words that go
    on with it; the pattern of files, and their number, that show that work is done and work is left."""

    words: str
    longer: str
    again: str
    pattern: str
    count: int


BEGUN: dict[str, Begun] = {
    "train": Begun(
        f"{_TRAIN} --epochs 20 --limit 200", f"{_TRAIN} --epochs 12 --limit 400", "train --resume {out}",
        "checkpoint/*", 1,
    ),
    "ablate": Begun(
        "ablate {vit} --limit 60 --batch-size 10 --replace mean,resample",
        "ablate {vit} --limit 200 --batch-size 20 --replace mean,resample", "{line} --resume {out}",
        "progress/*.npz", 2,
    ),
    "attack": Begun(
        f"{_ATTACK} --limit 20 --batch-size 5 --steps 10", f"{_ATTACK} --limit 60 --batch-size 10 --steps 20",
        "{line} --resume {out}", "progress/*.npz", 1,
    ),
    "study": Begun(
        "study --kind pooling --seeds 1 --epochs 1 --limit 40", "study --kind pooling --seeds 1 --epochs 2 --limit 100",
        "study --resume {out}", "points/*/seed-*/results.json", 2,
    ),
}  # fmt: skip


def words_of(line: str, box: Box, **more: object) -> list[str]:
    """The words of a line, with the box's models and images in their places."""
    places = {name: str(box.inputs / name) for name in ("vit", "cnn", "photos", "masked")}
    return [word.format(**places, **more) for word in line.split()]


def make_finished(box: Box, folder: Path) -> None:
    """One finished run of each command below the folder, named by the command."""
    for name, line in FINISHED.items():
        outcome = box.run([*words_of(line, box), "--quiet", "--out", str(folder / name)])
        assert outcome.code == 0, outcome.description()


def make_begun(box: Box, folder: Path) -> None:
    """One killed run of each command that can be resumed below the folder, named by the command."""
    for name, begun in BEGUN.items():
        words = [*words_of(begun.words, box), "--out", str(folder / name)]
        kill(words, box, lambda at=folder / name, begun=begun: len(list(at.glob(begun.pattern))) >= begun.count)


def kill(words: list[str], box: Box, sign: Callable[[], bool], *, how: signal.Signals = signal.SIGKILL) -> None:
    """Start a command and end it at a sign."""
    with start_command(words, box.work) as child:
        while not sign() and child.poll() is None:
            time.sleep(0.02)
        child.send_signal(how)
        child.communicate()


def copy(folder: Path, to: Path) -> Path:
    """A fresh copy of a run's folder."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, symlinks=True)
    return to
