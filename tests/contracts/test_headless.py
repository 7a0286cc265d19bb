"""A model without a classifier: what needs a class is refused, and the rest works.

test_common.py and test_support.py check its functions.
"""

from functools import partial

import numpy as np
import pytest
import torch

import vitlens
from tests.contracts.entries import HEADLESS, batch_of, headless
from tests.kit import families
from tests.kit.making import save
from tests.kit.select import values_of
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder
from vitlens.errors import UnsupportedError
from vitlens.models.sources.registry import SOURCES

QUIET = ("--device", "cpu", "--quiet")
DIGITS = ("--data", "digits", "--limit", "2")
NAMES = {  # the side of its input and what makes it small
    "vit_tiny_patch16_224": (32, families.VIT),
    "deit_tiny_distilled_patch16_224": (32, families.VIT),
    "swin_tiny_patch4_window7_224": (32, families.SWIN),
    "crossvit_tiny_240": (240, {}),
    "convnext_atto": (32, {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
    "resnet10t": (64, {}),
}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "made", families.MADE)


@pytest.mark.parametrize("name", NAMES)
def test_a_classifier_is_read_from_the_model_and_not_from_its_name(name, monkeypatch):
    side, shape = NAMES[name]
    for classes in (0, 7):
        build = partial(families.of_timm, name, classes=classes, **shape)
        monkeypatch.setitem(families.FAMILIES, name, (side, build))
        assert vitlens.load(f"made:{name}").has_classifier == bool(classes)


def test_its_features_are_no_classes(tmp_path):
    model = headless()
    assert not model.has_classifier
    assert model.classes == ()
    assert model(batch_of(model)).shape == (3, 192)
    save(model, tmp_path / "model.safetensors")
    again = vitlens.load(str(tmp_path / "model.safetensors"))
    assert again.classes == ()
    assert torch.equal(again(batch_of(again)), model(batch_of(model)))
    digits = vitlens.load("vit-digits")
    split = vitlens.load_data("digits", limit=2)
    for refused in (
        lambda: vitlens.compare(digits, model, split),
        lambda: vitlens.failures(digits, split, second=model),
        lambda: vitlens.load(HEADLESS, random_weights=True, classes=tuple(map(str, range(192)))),
    ):
        with pytest.raises(UnsupportedError, match=f"vitlens train {HEADLESS} --freeze-backbone"):
            refused()


def test_a_method_needs_a_class_where_its_maps_change_with_it():
    """The registry's field is what the functions do: maps of two classes differ, or are the same to
    the bit.
    """
    vit = vitlens.load("vit-digits")
    for name in (
        "relevance",
        "rollout",
        "gradient-rollout",
        "attention",
        "legrad",
        "gradcam",
        "eigencam",
        "saliency",
    ):
        one = vitlens.explain(vit, batch_of(vit), method=name, targets=torch.full((3,), 3))
        two = vitlens.explain(vit, batch_of(vit), method=name, targets=torch.full((3,), 8))
        assert torch.equal(one, two) != ATTRIBUTIONS[name].needs_class


@pytest.mark.parametrize(
    "line",
    [
        "look {picture} --model {name}",
        "predict {name} {digits}",
        "evaluate {name} {digits}",
        "ablate {name} {digits}",
        "attack {name} {digits} --predicted",
        "explain {name} {digits} --method gradcam",
        "explain {name} {digits} --target 3",
        "explain {name} {digits} --auto",
        "explain {name} {digits} --verify",
        "rollout {name} {digits} --method rollout,relevance",
        "rollout {name} {digits} --target 3",
        "study {name} --data digits",
        "audit {name} {digits}",
    ],
)
def test_a_command_that_needs_a_class_is_refused_before_anything_is_written(
    line, pictures, tmp_path, capsys
):
    picture = pictures / "0.png"
    words = line.format(name="made:headless", digits=" ".join(DIGITS), picture=picture).split()
    assert run([*words, *QUIET, "--out", str(tmp_path / "out")]) == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert "vitlens train made:headless --freeze-backbone" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "method"), [("rollout", ()), ("explain", ("--method", "all"))])
def test_maps_without_a_classifier_are_those_that_need_none(command, method, tmp_path):
    out = tmp_path / "out"
    assert run([command, "made:headless", *DIGITS, *QUIET, *method, "--out", str(out)]) == 0
    record = read_folder(out)
    free = {name for name, entry in ATTRIBUTIONS.items() if not entry.needs_class}
    assert set(values_of(record.methods, "method")) == (free if method else {"rollout"})
    assert values_of(record.shown, "prediction", "target") == [(None, None)] * 2
    assert "| prediction" not in (out / "report.md").read_text()


@pytest.mark.slow
def test_a_head_is_added_by_training_it(tmp_path):
    """As the message says, the trained model has a classifier and predicts."""
    save(headless(), tmp_path / "eva" / "model.safetensors")
    learn = [
        "--freeze-backbone",
        "--data",
        "digits",
        "--limit",
        "60",
        "--epochs",
        "1",
        "--image-size",
        "28",
    ]
    assert (
        run(["train", str(tmp_path / "eva"), *learn, *QUIET, "--out", str(tmp_path / "run")]) == 0
    )
    trained = vitlens.load(str(tmp_path / "run"))
    assert len(trained.classes) == 10
    assert np.isfinite(trained(batch_of(trained)).numpy()).all()
