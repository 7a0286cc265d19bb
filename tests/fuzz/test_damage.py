"""1,000 damaged files of every format: one line and exit code 2, or a run without that part."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fuzz import damage
from tests.fuzz.box import Box, require_sound, seeds
from tests.fuzz.inputs import make_inputs
from tests.fuzz.runs import BEGUN, FINISHED, copy, make_begun, make_finished, words_of

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Target:
    """A file to damage, below a folder of valid files, and the line that reads it.

    The line's {place} is the copy in which it was damaged; damages: the ways to damage its format.
    """

    file: str
    line: str
    damages: tuple[damage.Damage, ...] = ()


PREDICT = "predict {vit} --images"
DATA = {
    "png": Target("photos/0.png", f"{PREDICT} {{place}}/photos"),
    "jpg": Target("photos/3.jpg", f"{PREDICT} {{place}}/photos/3.jpg"),
    "class-folder": Target(
        "classed/cat/0.png",
        "features {vit} --data {place}/classed --no-tsne --no-cache --no-probe --k 1",
    ),
    "npz": Target("data.npz", "evaluate {vit} --data {place}/data.npz", (damage.arrays,)),
    "maps": Target(
        "maps.npz",
        "explain {vit} --data {place}/masked --method attention --maps {place}/maps.npz",
        (damage.arrays,),
    ),
    "mask": Target("masked/masks/0.png", "rollout {vit} --data {place}/masked"),
    "masks-index": Target(
        "masked/index.json", "rollout {vit} --data {place}/masked", (damage.json_file,)
    ),
    "boxes": Target(
        "boxed/annotations.json", "rollout {vit} --data {place}/boxed", (damage.json_file,)
    ),
    "classes": Target(
        "classes.txt",
        "predict {place}/cnn.pth --arch resnet20 --classes {place}/classes.txt --limit 1",
    ),
    "safetensors": Target(
        "vit/model.safetensors", "predict {place}/vit --limit 1", (damage.safetensors_header,)
    ),
    "cnn-safetensors": Target(
        "cnn/model.safetensors", "predict {place}/cnn --limit 1", (damage.safetensors_header,)
    ),
    "pth": Target(
        "cnn.pth", "predict {place}/cnn.pth --arch resnet20 --limit 1", (damage.state_dict,)
    ),
}
SETTINGS = ("results.json", "config.json")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Box:
    """Return a box with runs of every command in out/finished and out/begun."""
    sandbox = Box(tmp_path_factory.mktemp("damage") / "box")
    make_inputs(sandbox.inputs)
    make_finished(sandbox, sandbox.working_folder / "out" / "finished")
    make_begun(sandbox, sandbox.working_folder / "out" / "begun")
    sandbox.seal()
    return sandbox


def damaged(file: Path, damages: tuple[damage.Damage, ...], seed: int) -> str:
    """Damage one file in a seeded way; the way's name."""
    draw = random.Random(seed)
    way = draw.choice(damages) if damages and draw.random() < 0.7 else draw.choice(damage.BYTES)
    try:
        way(file, draw)
    except (EOFError, IndexError, TypeError, ValueError):
        # the file has nothing that this damage could change
        way = damage.cut if file.stat().st_size else damage.replace
        way(file, draw)
    return way.__name__


def check(
    ground: Box, file: Path, damages: tuple[damage.Damage, ...], words: list[str], seed: int
) -> None:
    way = damaged(file, damages, seed)
    outcome = ground.run(words)
    faults = outcome.faults()
    assert not faults, f"{way} of {file.name}: {outcome.description()}"
    require_sound([], ground)
    assert not Path("/tmp/pwned").exists()


@pytest.mark.parametrize("seed", seeds(46))
@pytest.mark.parametrize("name", DATA)
def test_damaged_inputs(ground: Box, tmp_path: Path, name: str, seed: int) -> None:
    target = DATA[name]
    place = copy(ground.inputs, tmp_path / "inputs")
    words = words_of(target.line.replace("{place}", str(place)), ground)
    out = ground.working_folder / "out" / "case"
    shutil.rmtree(out, ignore_errors=True)
    check(ground, place / target.file, target.damages, [*words, "--out", str(out)], seed)


@pytest.mark.parametrize("seed", seeds(33))
@pytest.mark.parametrize("name", FINISHED)
def test_damaged_reports(ground: Box, name: str, seed: int) -> None:
    folder = copy(
        ground.working_folder / "out" / "finished" / name, ground.working_folder / "out" / "case"
    )
    files = [*(folder / name for name in SETTINGS), *sorted(folder.glob("arrays/*.npz"))]
    file = files[seed % len(files)]
    damages = (damage.json_file,) if file.suffix == ".json" else (damage.arrays,)
    check(ground, file, damages, ["report", str(folder)], seed)


@pytest.mark.parametrize("seed", seeds(25))
@pytest.mark.parametrize("name", BEGUN)
def test_damaged_runs_to_resume(ground: Box, name: str, seed: int) -> None:
    folder = copy(
        ground.working_folder / "out" / "begun" / name, ground.working_folder / "out" / "case"
    )
    files = sorted(
        path for path in folder.rglob("[!.]*") if path.is_file() and path.suffix != ".png"
    )
    file = files[seed % len(files)]
    damages = {
        ".json": (damage.json_file,),
        ".npz": (damage.arrays,),
        ".safetensors": (damage.safetensors_header,),
    }
    words = [name] if name in ("train", "study") else words_of(BEGUN[name][0], ground)
    check(ground, file, damages.get(file.suffix, ()), [*words, "--resume", str(folder)], seed)
