"""24 kills: a run that was killed and resumed gives every number of one that was not, but for its seconds."""

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz.box import Box, Driver, seeds
from tests.fuzz.inputs import make_inputs
from tests.fuzz.runs import kill, words_of

pytestmark = pytest.mark.slow

# Runs of 5 to 20 s beside their imports; the words, and what goes on with a killed one ({out}: its folder).
LINES = {
    "train": (
        "train vit-mini --dim 32 --depth 2 --heads 2 --patch-size 8 --epochs 12 --limit 400 --batch-size 50",
        "train --resume {out}",
    ),
    "ablate": ("ablate {vit} --limit 200 --batch-size 20 --replace mean,resample", "{line} --resume {out}"),
    "attack": (
        "attack {vit} --limit 60 --batch-size 10 --attack pgd,cw --steps 20 --no-corruptions --no-inside",
        "{line} --resume {out}",
    ),
    "study": ("study --kind pooling --seeds 1 --epochs 2 --limit 100", "study --resume {out}"),
    "features": ("features {vit} --limit 200 --no-tsne", "{line} --overwrite --out {out}"),
}
OF_TIME = ("seconds", "throughput", "latency", "images_per_second", "duration", "rate")


class Whole:
    """Uninterrupted runs, each made once: their folders and how long they took."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self._made: dict[str, tuple[Path, float]] = {}

    def of(self, name: str) -> tuple[Path, float]:
        """The folder of a whole run and its seconds."""
        if name not in self._made:
            out = self.box.work / "out" / f"{name}-whole"
            outcome = self.box.command([*words_of(LINES[name][0], self.box), "--out", str(out)], patience=600)
            assert outcome.code == 0, outcome.description()
            self._made[name] = out, outcome.seconds
        return self._made[name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, driver: Driver) -> Iterator[Whole]:
    box = Box(tmp_path_factory.mktemp("kills") / "box", driver)
    make_inputs(box.inputs)
    return Whole(box)


@pytest.mark.parametrize("seed", seeds(24))
def test_resumed_equals_uninterrupted(whole: Whole, seed: int) -> None:
    draw = random.Random(seed)
    name = sorted(LINES)[seed % len(LINES)]
    folder, seconds = whole.of(name)
    line, again = LINES[name]
    out = whole.box.work / "out" / f"{name}-{seed}"
    words = [*words_of(line, whole.box), "--out", str(out)]
    for _ in range(draw.choice((1, 1, 2))):
        end = time.monotonic() + seconds * draw.uniform(0.25, 1.0)
        kill(
            words, whole.box, lambda end=end: time.monotonic() > end, how=draw.choice((signal.SIGKILL, signal.SIGTERM))
        )
        if (out / "results.json").is_file():
            words = words_of(again.format(line=line, out=out), whole.box)
    status = json.loads((out / "results.json").read_text())["status"] if (out / "results.json").is_file() else "none"
    if status == "none":
        words = [*words_of(line, whole.box), "--out", str(out), "--overwrite"]
    if status != "done" or name == "features":
        outcome = whole.box.command(words, patience=600)
        assert outcome.code == 0, outcome.description()
        assert not outcome.faults(), outcome.description()
    assert not list(out.rglob(".*")), "a temporary file stayed behind"
    require_equal(folder, out)


def require_equal(one: Path, two: Path) -> None:
    """Every number of the two runs' results and arrays is the same, seconds and rates left out."""
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (one, two))
    for part in ("metrics", "tables"):
        assert timeless(first[part]) == timeless(second[part])
    names = {path.relative_to(one) for path in one.rglob("*.npz") if "progress" not in path.parts}
    assert names == {path.relative_to(two) for path in two.rglob("*.npz") if "progress" not in path.parts}
    for name in names:
        with np.load(one / name) as left, np.load(two / name) as right:
            assert left.files == right.files
            for key in left.files:
                if not any(word in key for word in OF_TIME):
                    np.testing.assert_array_equal(left[key], right[key], err_msg=f"{name} {key}")


def timeless(value: Any) -> Any:
    """Without what a clock says, and without the folder's own name."""
    if isinstance(value, dict):
        return {key: timeless(child) for key, child in value.items() if not any(word in key for word in OF_TIME)}
    return [timeless(child) for child in value] if isinstance(value, list) else value
