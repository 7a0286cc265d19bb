"""Models that were trained differently are not compared as if they were trained alike."""

from dataclasses import replace
from pathlib import Path

import pytest

import vitlens
from tests.kit.training_runs import train
from vitlens.commands.evaluate.measure import measure
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.evaluate.report import REPORT
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.trainings import Budget, budget_of, differences

OPTIONS = RunOptions(device="cpu", quiet=True, limit=20)
LONG = Budget("vit", "random weights", "digits", 40, 10, 50, 8, "none", 0, "none")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"epochs": 5, "steps": 25}, {"epochs": (10, 5), "steps": (50, 25)}),
        ({"data": "cifar10"}, {"data": ("digits", "cifar10")}),
        ({"augmentation": "flip"}, {"augmentation": ("none", "flip")}),
        ({"seed": 3}, {"seed": (0, 3)}),
        ({"epochs": None}, {}),  # what is not known of one is no difference
    ],
)
def test_what_differs_is_named_with_its_values(changes, expected):
    assert differences([LONG, replace(LONG, model="cnn", **changes)]) == expected


def test_the_bundled_pair_is_known():
    vit, cnn = (budget_of(vitlens.load(name)) for name in ("vit-digits", "cnn-digits"))
    assert (vit.epochs, vit.steps, vit.model, cnn.model) == (110, 4070, "vit-digits", "cnn-digits")
    assert differences([vit, cnn]) == {}


def test_what_nobody_knows_is_not_made_up(tiny_vit):
    assert budget_of(vitlens.load(str(tiny_vit))) == Budget(tiny_vit.stem)
    assert budget_of(vitlens.load("timm:resnet10t@random", image_size=(32, 32))).epochs == 0


def test_runs_of_unequal_budgets_say_so_first(tmp_path: Path):
    shape = {"dim": 8, "depth": 1, "heads": 2, "patch_size": [8, 8]}
    for name, epochs, recipe in (("long", 3, {"crop_padding": 0}), ("short", 1, {"crop_padding": 0, "flip": True})):
        train(
            "vit-micro", shape=shape, recipe={"epochs": epochs, **recipe}, options=replace(OPTIONS, out=tmp_path / name)
        )
    models = (str(tmp_path / "long"), str(tmp_path / "short"))
    written = measure(EvaluateOptions(models, run=replace(OPTIONS, out=tmp_path / "both")))
    record = read_folder(tmp_path / "both")
    rows = record.training
    assert [(row.model, row.epochs, row.steps) for row in rows] == [("long", 3, 6), ("short", 1, 2)]
    assert [row.augmentation for row in rows] == ["none", "flip"]
    assert [row.images for row in rows] == [20, 20]
    said = next(each.text for each in REPORT(record).first.unknown if "epochs" in each.text)
    assert "3 (long)" in said
    assert said in written.read_text().partition("\n## ")[0]
