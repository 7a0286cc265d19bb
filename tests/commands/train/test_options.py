"""What excludes each other is refused before anything is loaded, and says what to type."""

import subprocess
import sys

import pytest

from vitlens.commands.train.options import TeacherOptions, Tuning, require_together
from vitlens.errors import InputError


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"last": 0}, "--train-last at least 1, found 0; --freeze-backbone trains the head"),
        ({"views": 0, "freeze": True}, "--cached-views at least 1, found 0"),
        ({"freeze": True, "last": 2}, "found --freeze-backbone and --train-last"),
        ({"freeze": True, "compare": True}, "found --freeze-backbone and --compare-frozen"),
        ({"views": 3}, "expected --cached-views with --freeze-backbone, found it alone"),
    ],
)
def test_ways_of_tuning_exclude_each_other(fields, match):
    with pytest.raises(InputError, match=match):
        Tuning(**fields)


def test_what_is_trained():
    assert Tuning().trained is None
    assert Tuning(freeze=True, views=4).trained == 0
    assert Tuning(last=3).trained == 3
    assert Tuning(compare=True).trained is None


@pytest.mark.parametrize(
    ("tuning", "option"),
    [
        (Tuning(freeze=True), "--freeze-backbone"),
        (Tuning(last=1), "--train-last"),
        (Tuning(compare=True), "--compare-frozen"),
    ],
)
def test_a_preset_from_scratch_has_nothing_to_freeze(tuning, option):
    with pytest.raises(InputError, match=f"with {option}, found the preset 'vit-tiny': its weights are random"):
        tuning.require_learned("vit-tiny")
    tuning.require_learned("timm:vit_tiny_patch16_224")
    tuning.require_learned("runs/mine")
    Tuning().require_learned("vit-tiny")
    Tuning("vit.safetensors", freeze=True).require_learned("vit-tiny-224")


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"kind": "soft"}, "--distill"),
        ({"weight": 0.3}, "--distill-weight"),
        ({"kind": "soft", "temperature": 2.0}, "--distill"),
        ({"token": True}, "--distill-token"),
        ({"token": False}, "--no-distill-token"),
        ({"beside": "runs/plain"}, "--beside"),
    ],
)
def test_settings_without_a_teacher_are_refused(fields, option):
    with pytest.raises(InputError, match=f"--distill-from MODEL with {option}, found {option} alone; name the teacher"):
        TeacherOptions(**fields)
    TeacherOptions("cnn-digits", **fields)


def test_the_hard_form_has_no_temperature():
    with pytest.raises(InputError, match="--temperature with --distill soft, found the hard form"):
        TeacherOptions("cnn-digits", temperature=2.0)


def test_a_head_on_features_has_no_teacher_and_nothing_else_to_keep():
    teaching = TeacherOptions("cnn-digits")
    for tuning, option in ((Tuning(freeze=True), "--freeze-backbone"), (Tuning(compare=True), "--compare-frozen")):
        with pytest.raises(InputError, match=f"expected {option} without --distill-from, found both"):
            require_together(tuning, teaching, {})
    with pytest.raises(InputError, match="without --keep-every, found both"):
        require_together(Tuning(freeze=True), TeacherOptions(), {"--keep-every": 3, "--recompute": False})
    require_together(Tuning(compare=True), TeacherOptions(), {"--keep-every": 3})
    require_together(Tuning(last=1), teaching, {"--keep-every": 3, "--recompute": True})


def test_the_options_are_free_of_torch():
    program = (
        "import sys, vitlens.commands.train.options, vitlens.commands.train.plan; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
