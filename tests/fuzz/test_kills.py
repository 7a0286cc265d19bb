"""24 kills: a run that was killed and resumed gives every number of one that was not, but for its seconds."""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz.box import Box, seeds
from tests.fuzz.inputs import make_inputs
from tests.fuzz.runs import BEGUN, kill, words_of

pytestmark = pytest.mark.slow
FEATURES = "features {vit} --limit 200 --no-tsne"  # of its own cache
LINES = {name: (begun.longer, begun.again) for name, begun in BEGUN.items()} | {
    "features": (FEATURES, "{line} --overwrite --out {out}")
}
OF_TIME = ("seconds", "throughput", "latency", "images_per_second", "duration", "rate")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    made = Box(tmp_path_factory.mktemp("kills") / "box")
    make_inputs(made.inputs)
    return made


@pytest.fixture(scope="module")
def whole(box: Box) -> Callable[[str], tuple[Path, float]]:
    """The folder of a run that is not interrupted, made once, and its seconds."""
    made: dict[str, tuple[Path, float]] = {}

    def of(name: str) -> tuple[Path, float]:
        if name not in made:
            out = box.work / "out" / f"{name}-whole"
            outcome = box.command([*words_of(LINES[name][0], box), "--out", str(out)], patience=600)
            assert outcome.code == 0, outcome.description()
            made[name] = out, outcome.seconds
        return made[name]

    return of


@pytest.mark.parametrize("seed", seeds(24))
def test_resumed_equals_uninterrupted(box: Box, whole: Callable[[str], tuple[Path, float]], seed: int) -> None:
    draw = random.Random(seed)
    name = sorted(LINES)[seed % len(LINES)]
    folder, seconds = whole(name)
    line, again = LINES[name]
    out = box.work / "out" / f"{name}-{seed}"
    first = words = [*words_of(line, box), "--out", str(out)]
    for _ in range(draw.choice((1, 1, 2))):
        end = time.monotonic() + seconds * draw.uniform(0.25, 1.0)
        kill(words, box, lambda end=end: time.monotonic() > end, how=draw.choice((signal.SIGKILL, signal.SIGTERM)))
        if (out / "results.json").is_file():
            words = words_of(again.replace("{line}", line), box, out=out)
    status = json.loads((out / "results.json").read_text())["status"] if (out / "results.json").is_file() else "none"
    if status != "done" or name == "features":
        outcome = box.command([*first, "--overwrite"] if status == "none" else words, patience=600)
        assert outcome.code == 0, outcome.description()
        assert not outcome.faults(), outcome.description()
    assert not list(out.rglob(".*")), "a temporary file stayed behind"
    require_equal(folder, out)


def require_equal(one: Path, two: Path) -> None:
    """Every number of the two runs' results and arrays is the same, seconds and rates left out."""
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (one, two))
    for part in ("metrics", "tables"):
        assert timeless(first[part]) == timeless(second[part])
    names, others = (
        {path.relative_to(folder) for path in folder.rglob("*.npz") if "progress" not in path.parts}
        for folder in (one, two)
    )
    assert names == others
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
