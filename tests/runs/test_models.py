import pytest

from vitlens.errors import UnknownNameError
from vitlens.models.zoo import untrained
from vitlens.names import BUNDLED, PRESETS
from vitlens.runs.models import model_table


def names(pattern: str) -> list[str]:
    return [line.split()[0] for line in model_table(pattern)]


def test_without_a_pattern_every_own_name_and_both_hubs_are_listed():
    assert names("") == [*BUNDLED, *PRESETS, "timm:NAME", "torchvision:NAME", "open-clip:ARCH/TAG"]


def test_a_part_of_a_name_and_a_pattern_both_find():
    assert "timm:deit_tiny_patch16_224" in names("deit_tiny")
    assert names("torchvision:vit_b_1?") == ["torchvision:vit_b_16"]
    assert names("vit-mic") == ["vit-micro"]


@pytest.mark.parametrize(
    ("name", "supports", "lacks"),
    [
        ("timm:deit_tiny_patch16_224", "train", "windowed,"),
        ("timm:swin_tiny_patch4_window7_224", "attention", "rollout"),
        ("torchvision:resnet18", "evaluate", "attention"),
        ("vit-digits", "rollout", "untrained"),
        ("cnn-digits", "evaluate", "rollout"),
        ("vit-micro", "train", "rollout"),
    ],
)
def test_the_commands_that_each_supports(name, supports, lacks):
    [line] = model_table(name)
    assert supports in line.split()
    assert lacks not in line.split()


def test_families_of_presets_are_those_of_the_models():
    for line in model_table("vit-m"):
        name, family = line.split()[:2]
        assert untrained(name, classes=("a", "b")).anatomy.family == family.rstrip(",")


def test_a_broad_pattern_lists_names_and_says_how_to_learn_more():
    lines = list(model_table("timm:*"))
    assert len(lines) > 500
    assert lines[-1].startswith("more than 40 models: a narrower pattern")


def test_nothing_found_names_the_nearest():
    with pytest.raises(UnknownNameError, match=r"did you mean .*'vit-tiny'"):
        list(model_table("vit-tny"))
