"""What excludes each other is refused before anything is loaded, and says what to type."""

from dataclasses import replace

import pytest

from vitlens.commands.run.options import RunOptions
from vitlens.commands.train.measure import measure
from vitlens.commands.train.options import (
    Shape,
    TeacherOptions,
    TrainOptions,
    Tuning,
)
from vitlens.commands.train.start import TrainPlan, require_trainable
from vitlens.errors import InputError


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"last": 0}, "--train-last at least 1, found 0; --freeze-backbone trains the head"),
        ({"views": 0, "freeze": True}, "--cached-views at least 1, found 0"),
        ({"freeze": True, "last": 2}, "found --freeze-backbone and --train-last"),
        ({"freeze": True, "compare": True}, "found --freeze-backbone and --compare-frozen"),
        ({"views": 2}, "--cached-views with --freeze-backbone, found it alone"),
    ],
)
def test_ways_of_tuning_exclude_each_other(fields, match):
    with pytest.raises(InputError, match=match):
        Tuning(**fields)


def test_a_preset_from_scratch_has_nothing_to_freeze():
    for tuning, option in (
        (Tuning(freeze=True), "--freeze-backbone"), (Tuning(last=1), "--train-last"),
        (Tuning(compare=True), "--compare-frozen"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"with {option}, found the preset 'vit-tiny': its weights are random"):
            tuning.require_learned("vit-tiny")
        tuning.require_learned("timm:vit_tiny_patch16_224")
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
    plan, teaching = TrainPlan("runs/mine"), TeacherOptions("cnn-digits")
    for tuning, option in ((Tuning(freeze=True), "--freeze-backbone"), (Tuning(compare=True), "--compare-frozen")):
        with pytest.raises(InputError, match=f"expected {option} without --distill-from, found both"):
            require_trainable(replace(plan, tuning=tuning, teaching=teaching))
    with pytest.raises(InputError, match="without --keep-every, found both"):
        require_trainable(replace(plan, tuning=Tuning(freeze=True), keep_every=3))
    require_trainable(replace(plan, tuning=Tuning(compare=True), keep_every=3))
    require_trainable(replace(plan, tuning=Tuning(last=1), teaching=teaching, keep_every=3, recompute=True))


@pytest.mark.parametrize(
    ("model", "shape", "match"),
    [
        ("resnet20", Shape(dropout=0.1), "expected no --dropout for resnet20, a CNN without that setting, found 0.1"),
        ("resnet20", Shape(pooling="mean"), "expected no --pooling for resnet20, a CNN"),
        ("swin-micro", Shape(pooling="cls"), "expected no --pooling for swin-micro, which classifies by the mean"),
        (
            "vit-micro",
            Shape(dropout=float("nan")),
            r"expected dropout in \[0, 1\), found nan",
        ),
        ("swin-micro", Shape(dropout=-0.1), r"expected dropout in \[0, 1\), found -0.1"),
        ("vit-digits", Shape(dropout=0.1), "expected a trained model as it is, found --dropout for vit-digits"),
    ],
)
def test_presets_without_a_setting_and_wrong_numbers_are_refused_in_one_line(model, shape, match, tmp_path):
    run = RunOptions(device="cpu", limit=40, quiet=True, out=tmp_path / "out")
    with pytest.raises(InputError, match=match) as caught:
        measure(TrainOptions(model, shape=shape, run=run))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
