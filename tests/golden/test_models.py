import pytest

from tests.kit.making import untrained
from vitlens.commands.models import measure
from vitlens.commands.models.measure import measure as listed_lines
from vitlens.commands.models.options import ModelsOptions
from vitlens.errors import UnknownNameError
from vitlens.names import BUNDLED, PRESETS


def names(pattern: str) -> list[str]:
    return [line.split()[0] for line in listed_lines(ModelsOptions(pattern))]


def test_without_a_pattern_every_own_name_and_both_hubs_are_listed(monkeypatch):
    monkeypatch.setattr(measure, "_described", lambda *_: ("", ""))  # what is said of each is tested below
    assert names("") == [*BUNDLED, *PRESETS, "timm:NAME", "torchvision:NAME", "open-clip:ARCH/TAG", "hf:REPO|FOLDER"]


def test_a_part_of_a_name_and_a_pattern_both_find(monkeypatch):
    monkeypatch.setattr(measure, "_described", lambda *_: ("", ""))
    assert "timm:deit_tiny_patch16_224" in names("deit_tiny")
    assert names("torchvision:vit_b_1?") == ["torchvision:vit_b_16"]
    assert names("vit-mic") == ["vit-micro"]


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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in LISTED]
)
def test_the_commands_that_each_supports(name):
    family, commands = LISTED[name]
    line = next(line for line in listed_lines(ModelsOptions(name)) if line.split()[0] == name)
    assert line.split()[1] == family
    assert line.split()[-len(commands) :] == commands
    assert not {*line.split()[: -len(commands)]} & {*ALL}


def test_families_of_presets_are_those_of_the_models():
    for line in listed_lines(ModelsOptions("vit-m")):
        name, family = line.split()[:2]
        assert untrained(name, classes=("a", "b")).anatomy.family == family.rstrip(",")


def test_a_broad_pattern_lists_names_and_says_how_to_learn_more():
    lines = list(listed_lines(ModelsOptions("timm:*")))
    assert len(lines) > 500
    assert lines[-1].startswith("more than 40 models: a narrower pattern")


def test_nothing_found_names_the_nearest():
    with pytest.raises(UnknownNameError, match=r"did you mean .*'vit-tiny'"):
        list(listed_lines(ModelsOptions("vit-tny")))
    with pytest.raises(UnknownNameError, match=r"known: cnn-digits, .*timm:NAME, .*vit-tiny"):
        list(listed_lines(ModelsOptions("zzz")))
