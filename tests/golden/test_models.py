"""`vitlens models` and `vitlens data`: what is listed, what each model supports, what nothing is found for."""

import numpy as np
import pytest
from PIL import Image

from tests.kit.commands import refusal
from tests.kit.making import untrained
from vitlens import load_data
from vitlens.cli.main import run
from vitlens.commands.models.options import ModelsOptions
from vitlens.commands.registry import COMMANDS
from vitlens.data.registry import LAYOUTS, SETS
from vitlens.names import BUNDLED, PRESETS

CNN = ["look", "audit", "predict", "train", "evaluate", "compare", "explain", "attack", "features", "profile", "demo"]
ALL = ["look", "study", *CNN[1:5], "attention", "rollout", "stats", "ablate", *CNN[5:], "walkthrough"]
WINDOWED = ALL[:-1]
HEADLESS = ["train", "attention", "rollout", "stats", "explain", "features", "profile", "walkthrough"]
WITHOUT_CHAIN = [word for word in WINDOWED if word not in ("study", "rollout")]
WITHOUT_MAPS = [word for word in WITHOUT_CHAIN if word != "attention"]
LISTED = {
    "timm:deit_tiny_patch16_224": ("vit,", ALL),
    "timm:swin_tiny_patch4_window7_224": ("windowed,", WINDOWED),
    "timm:maxvit_rmlp_pico_rw_256": ("windowed,", WITHOUT_CHAIN),
    "timm:mobilevit_xxs": ("other,", WITHOUT_MAPS),
    "timm:xcit_nano_12_p16_224": ("vit,", WITHOUT_CHAIN),
    "timm:eva02_tiny_patch14_224": ("vit,", HEADLESS),  # timm has it without a classifier
    "torchvision:resnet18": ("cnn,", CNN),
    "torchvision:vit_b_16": ("vit,", ALL),
    "vit-digits": ("vit,", ALL),
    "cnn-digits": ("cnn,", CNN),
    "vit-micro": ("vit,", ["study", "train", "profile"]),  # others need weights
    "resnet50": ("cnn,", ["train", "profile"]),
}
LARGE = {"timm:maxvit_rmlp_pico_rw_256", "timm:eva02_tiny_patch14_224", "torchvision:vit_b_16"}  # slow to build


def listed(capsys, line: str) -> list[str]:
    assert run(line.split()) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow  # every preset is built
def test_without_a_pattern_every_own_name_and_the_hubs_are_listed(capsys):
    names = [line.split()[0] for line in listed(capsys, "models")]
    assert names == [*BUNDLED, *PRESETS, "timm:NAME", "torchvision:NAME", "open-clip:ARCH/TAG", "hf:REPO|FOLDER"]


def test_a_part_of_a_name_and_a_pattern_both_find(capsys):
    assert [line.split()[0] for line in listed(capsys, "models vit-mic")] == ["vit-micro"]
    assert [line.split()[0] for line in listed(capsys, "models torchvision:resnet1?")] == ["torchvision:resnet18"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in LISTED]
)
def test_the_commands_that_each_supports(name):
    family, commands = LISTED[name]
    lines = COMMANDS["models"].measure(ModelsOptions(name))  # each is made when it is asked for
    words = next(line.split() for line in lines if line.split()[0] == name)
    assert words[1] == family
    assert words[-len(commands) :] == commands
    assert not {*words[: -len(commands)]} & {*ALL}


def test_families_of_presets_are_those_of_the_models(capsys):
    for line in listed(capsys, "models vit-m"):
        name, family = line.split()[:2]
        assert untrained(name, classes=("a", "b")).anatomy.family == family.rstrip(",")


def test_a_broad_pattern_lists_names_and_says_how_to_learn_more(capsys):
    assert {"resnet20", "timm:resnet18", "torchvision:resnet18"} <= {
        line.split()[0] for line in listed(capsys, "models resnet")
    }
    lines = listed(capsys, "models timm:*")
    assert len(lines) > 500
    assert "narrower pattern" in lines[-1]


def test_every_name_of_data_is_listed(capsys):
    names = [line.split()[0] for line in listed(capsys, "data")]
    assert names == [*SETS, *(layout.usage for layout in LAYOUTS if layout.usage)]


def test_digits_are_counted_as_they_are_loaded(capsys):
    title, train, test = listed(capsys, "data digits")
    assert "10 classes (0, 1, 2" in title
    assert train.startswith(f"train: {len(load_data('digits', part='train')):,} images of 32x32 px, with labels")
    assert test.startswith(f"test: {len(load_data('digits', part='test')):,} images")
    assert test.endswith("masks")


def test_a_folder_of_images_names_what_was_skipped(tmp_path, capsys):
    for name in ("a.png", "b.png"):
        Image.fromarray(np.zeros((8, 12, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    title, counts, skipped = listed(capsys, f"data {tmp_path}")
    assert title.endswith("no labels")
    assert counts.startswith("all: 2 images of 8x12 px")
    assert "broken.jpg" in skipped


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("models vit-tny", "'vit-tiny'"),
        ("models zzz", "known: cnn-digits, "),
        ("data cifar1", "did you mean 'cifar10'"),
        ("data {empty}", "{empty}"),
    ],
)
def test_nothing_found_names_the_nearest(line, says, tmp_path, capsys):
    assert says.format(empty=tmp_path.name) in refusal(capsys, line.format(empty=tmp_path))
