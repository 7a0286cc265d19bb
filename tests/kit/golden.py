"""One run of each command on tiny models, made at first use and shared by all processes."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pytest
from filelock import FileLock

from tests.kit.commands import few_passes, impatient, quick_attacks
from tests.kit.saving import no_figures, saved_figures
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder
from vitlens.report.document import Document

# the study with all its chapters is tests/golden/study/test_whole.py's
LINES: Final = {
    "evaluate": "evaluate vit-digits cnn-digits --data digits --limit 40 --batch-size 10",
    "predict": "predict {vit} --images {pictures}",
    "look": "look {pictures} --model {vit}",
    "look with a CNN": "look {pictures} --model {cnn}",
    "attention": "attention {vit} --images {pictures}",
    "attention of digits": "attention {vit} --data digits --limit 6",
    "attention of a patch": "attention {vit} --images {pictures} --query 1,2 --key 0,3 --layer 0",
    "rollout": "rollout {vit} --data digits --limit 12 --batch-size 5 --fusion max,min --method "
    "rollout",
    "rollout of pictures": "rollout {vit} --images {pictures} --fusion mean --discard 0.5",
    "every method": "rollout {vit} --data digits --limit 5 --target true --alpha 0.4 --layer 0 "
    "--method rollout,relevance,gradient-rollout,attention,flow",
    "stats": "stats {vit} --data digits --limit 12 --batch-size 5",
    "stats of pictures": "stats {vit} --images {pictures} --predicted --no-renormalise",
    "head": "head {vit} L1.H0 --data digits --limit 60 --batch-size 30",
    "sae": "sae {vit} --data digits --limit 60 --bank 60 --expansion 1 --k 4 --tokens 6000 "
    "--tested 4 --layer 0 --no-cache",
    "ablate": "ablate tiny={vit} --data digits --limit 12 --batch-size 6 --replace "
    "mean,zero,resample --greedy "
    "--prune 0.25 --save {beside}/pruned",
    "ablate of heads alone": "ablate {vit} --data digits --limit 6 --units head --no-curves "
    "--pairs 0 --no-patch",
    "compare": "compare {vit} {cnn} --data digits --limit 12 --batch-size 5 --panels 6 --checked 2",
    "compare of one family": "compare {vit} {vit}@random --data digits --limit 8 --panels 2 "
    "--no-harder "
    "--method attention,saliency --target true",
    "explain": "explain {vit} {cnn} --data digits --limit 3 --batch-size 2 "
    "--method relevance,gradcam,integrated-gradients,occlusion",
    "explain by every method": "explain {vit} --images {pictures} --method all --target 3",
    "explain by a chosen method": "explain {sharp} --data digits --auto --limit 20 --method "
    "relevance,gradcam,saliency",
    "explain verified": "explain {vit} --data digits --limit 6 --method relevance,attention "
    "--target true --verify",
    "attack": "attack vit={sharp} cnn-digits --data digits --limit 4 --batch-size 2 --predicted "
    "--attack fgsm,pgd,cw "
    "--steps 3 --epsilon 0,4,32 --epsilon-l2 0.5,2 --no-corruptions",
    "attack of predictions": "attack {vit} --images {pictures} --predicted --attack "
    "pgd-l2,noise,patch --steps 2",
    "features": "features a={vit} b={cnn} --data digits --limit 24 --batch-size 12 --k 1,3 --bank "
    "40 --no-cache "
    "--perplexity 4 --thumbnails --query {pictures}/1.png",
    "features of pictures": "features {vit} --images {pictures} --thumbnails --no-cache",
    "profile": "profile {vit} {cnn} --batch-sizes 1,2 --sizes 16,32",
    "audit": "audit mine={vit} --data digits --limit 4 --batch-size 4 --budget 60 --at-least "
    "accuracy=0.999 "
    "--junit {beside}/junit.xml",
    "profile by patch size": "profile vit-mini --patch-size 8,16 --batch-sizes 1",
    "train": "train vit-micro --data digits --epochs 3 --limit 40 --batch-size 10 --dim 8 --depth "
    "1 --heads 2 "
    "--patch-size 8 --dropout 0.1 --pooling mean",
    "train a head alone": "train {vit} --data digits --epochs 1 --limit 20 --batch-size 10 "
    "--freeze-backbone",
    "train from a teacher": "train vit-mini --data digits --epochs 2 --limit 60 --batch-size 20 "
    "--dim 16 --depth 1 "
    "--heads 2 --patch-size 8 --distill-from {vit} --beside cnn-digits",
    "study of points": "study --kind pooling --data digits --seeds 2 --epochs 2 --limit 20 "
    "--batch-size 10",
    "study along an axis": "study --kind patch-size --data digits --seeds 1 --epochs 1 --limit 20 "
    "--batch-size 10",
    "study of pretraining": "study --kind pretraining --seeds 2 --epochs 1 --limit 32 --batch-size "
    "16",
    "walkthrough": "walkthrough {vit} --images {pictures}/1.png --layer 1 --head 1",
    "reversal": "reversal --length 5 --heads 2 --steps 200",
    "reversal without positions": "reversal --task sort --length 4 --positions none --steps 20",
}
UNMET: Final = ("audit",)  # under a requirement that does not hold: exit code 3
# whose figures are saved by the command and again by `report`, and are the same byte by byte; the
# others' once
SAVED_TWICE: Final = (
    "look with a CNN",
    "attention",
    "rollout of pictures",
    "stats",
    "ablate of heads alone",
    "evaluate",
)


@dataclass(frozen=True)
class Golden:
    """A finished run: do not write into its folder, which other processes read."""

    name: str
    folder: Path

    @cached_property
    def record(self) -> Any:
        """Return its typed rows and arrays."""
        return read_folder(self.folder)

    @property
    def said(self) -> list[str]:
        """Return the lines that it showed while it ran."""
        return self.folder.parent.with_suffix(".said").read_text().splitlines()

    @property
    def document(self) -> Document:
        """Return its report."""
        document: Document = COMMANDS[self.record.command].report(self.record)
        return document


def of_all_processes(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder of this session that the processes of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def places(tiny_vit: Path, tiny_cnn: Path, sharp_vit: Path, pictures: Path) -> dict[str, Path]:
    """Return the paths that the lines name."""
    return {"vit": tiny_vit, "cnn": tiny_cnn, "sharp": sharp_vit, "pictures": pictures}


@pytest.fixture(scope="session")
def golden(
    places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Golden]:
    """Return a function: `golden("attack")` is the run of that name, or of an added command."""
    goldens: dict[str, Golden] = {}
    shared = of_all_processes(tmp_path_factory, "golden")

    def find(name: str) -> Golden:
        if name not in goldens:
            folder = shared / name.replace(" ", "-")
            # of another process that makes it at this moment
            with FileLock(folder.with_suffix(".lock")):
                if not folder.with_suffix(".made").is_file():
                    shutil.rmtree(folder, ignore_errors=True)  # of one that failed
                    folder.mkdir()
                    make(name, places, folder)
                    folder.with_suffix(".made").touch()
            goldens[name] = Golden(name, folder / "run")
        return goldens[name]

    return find


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Make no figures in a test: those of such a record are drawn by another."""
    with no_figures():
        yield


def make(
    name: str,
    places: Mapping[str, Path],
    folder: Path,
    *,
    device: Sequence[str] = ("--device", "cpu"),
) -> Path:
    line = LINES.get(name, f"{name} {{vit}} --data digits --limit 4").format(
        **places, beside=folder
    )
    saving = saved_figures() if name in SAVED_TWICE else no_figures()
    with (
        folder.with_suffix(".said").open("w") as said,
        redirect_stderr(said),
        redirect_stdout(said),
        saving,
        quick_attacks(()),
        few_passes(),
        impatient(),
    ):
        code = run([*line.split(), *device, "--out", str(folder / "run")])
    assert code == (3 if name in UNMET else 0), line
    return folder / "run"
