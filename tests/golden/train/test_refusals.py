"""What excludes each other is refused by the names of the options, before anything is loaded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from vitlens.commands.train.options import TeacherOptions, TrainOptions, Tuning, require_compatible
from vitlens.errors import InputError

TEACHER = TeacherOptions("cnn-digits")
PLAN = TrainOptions("runs/mine")
FROZEN = Tuning(freeze=True)
ALONE = (  # settings that need a teacher
    ({"kind": "soft"}, "--distill"),
    ({"weight": 0.3}, "--distill-weight"),
    ({"kind": "soft", "temperature": 2.0}, "--distill"),
    ({"token": True}, "--distill-token"),
    ({"token": False}, "--no-distill-token"),
    ({"beside": "runs/plain"}, "--beside"),
)
USELESS = (  # in a check
    ({"resume": Path("runs/a")}, "--resume"),
    ({"teaching": TEACHER}, "--distill-from"),
    ({"keep_every": 1}, "--keep-every"),
    ({"track": ("tensorboard",)}, "--track"),
    ({"recompute": True}, "--recompute"),
    ({"compiling": "on"}, "--compile on"),
)


def plan(**changes: object) -> Callable[[], None]:
    return partial(require_compatible, replace(PLAN, **changes))


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (partial(Tuning, last=0), "--train-last 0"),
        (partial(Tuning, views=0, freeze=True), "--cached-views 0"),
        (partial(Tuning, freeze=True, last=2), "--freeze-backbone --train-last"),
        (partial(Tuning, views=2), "--cached-views --freeze-backbone"),
        (partial(FROZEN.require_learned, "vit-tiny"), "--freeze-backbone 'vit-tiny'"),
        (partial(Tuning(last=1).require_learned, "vit-tiny"), "--train-last 'vit-tiny'"),
        (partial(TeacherOptions, "m", temperature=2.0), "--temperature --distill soft"),
        (plan(tuning=FROZEN, teaching=TEACHER), "--freeze-backbone --distill-from"),
        (plan(tuning=FROZEN, keep_every=3), "--keep-every"),
        *((plan(check=True, **own), f"--check {option}") for own, option in USELESS),
        *((partial(TeacherOptions, **own), f"--distill-from {option}") for own, option in ALONE),
    ],
)
def test_what_excludes_each_other_is_refused_by_its_names(call, names):
    with pytest.raises(InputError) as caught:
        call()
    assert all(name in str(caught.value) for name in names.split())


def test_what_goes_together_is_taken():
    for fields, _ in ALONE:
        TeacherOptions("cnn-digits", **fields)
    Tuning().require_learned("vit-tiny")
    for tuning in (FROZEN, Tuning(last=1)):
        tuning.require_learned("timm:vit_tiny_patch16_224")
    Tuning("vit.safetensors", freeze=True).require_learned("vit-tiny-224")
    require_compatible(replace(PLAN, tuning=Tuning(last=1), teaching=TEACHER, keep_every=3, recompute=True))
