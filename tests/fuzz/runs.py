"""Short runs of every command, finished or killed, for tests that damage their folders."""

import shutil
import time
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
BEGUN: dict[
    str, tuple[str, str, int]
] = {  # runs to be killed: words; the files, and their number, that show work done
    "train": (
        "train vit-mini --dim 32 --depth 2 --heads 2 --patch-size 8 --batch-size 50 --epochs 20 "
        "--limit 200",
        "checkpoint/*",
        1,
    ),
    "ablate": (
        "ablate {vit} --limit 60 --batch-size 10 --replace mean,resample",
        "progress/*.npz",
        2,
    ),
    "attack": (
        "attack {vit} --attack pgd,cw --no-corruptions --no-inside --limit 20 --batch-size 5 "
        "--steps 10",
        "progress/*.npz",
        1,
    ),
    "study": (
        "study --kind pooling --seeds 1 --epochs 1 --limit 40",
        "points/*/seed-*/results.json",
        2,
    ),
}


def words_of(line: str, box: Box) -> list[str]:
    """Return the words of a line, with the box's models and images filled in."""
    places = {name: str(box.inputs / name) for name in ("vit", "cnn", "photos", "masked")}
    return [word.format(**places) for word in line.split()]


def make_finished(box: Box, folder: Path) -> None:
    """Write one finished run of each command into the folder, named by the command."""
    for name, line in FINISHED.items():
        outcome = box.run([*words_of(line, box), "--quiet", "--out", str(folder / name)])
        assert outcome.code == 0, outcome.description()


def make_begun(box: Box, folder: Path) -> None:
    """Write one killed run of each command that can resume, named by the command."""
    for name, (line, pattern, count) in BEGUN.items():
        with start_command(
            [*words_of(line, box), "--out", str(folder / name)], box.working_folder
        ) as child:
            while len(list((folder / name).glob(pattern))) < count and child.poll() is None:
                time.sleep(0.02)
            child.kill()
            child.communicate()


def copy(folder: Path, to: Path) -> Path:
    """Copy the folder of a run."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, symlinks=True)
    return to
