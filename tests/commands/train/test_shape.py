"""Dropout and pooling as options: kept with the model, off in evaluation, refused for presets that have none."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vitlens
from vitlens.commands.run.options import RunOptions
from vitlens.commands.train.measure import measure
from vitlens.commands.train.options import RecipeChanges, Shape, TrainOptions
from vitlens.devices import evaluating
from vitlens.errors import InputError

TINY = {"patch_size": [8, 8], "dim": 8, "depth": 2, "heads": 2}
OPTIONS = RunOptions(device="cpu", limit=40, batch_size=10, quiet=True)


def train(model: str, out: Path, shape: Shape) -> Path | None:
    return measure(TrainOptions(model, recipe=RecipeChanges(epochs=1), shape=shape, run=replace(OPTIONS, out=out)))


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "dropped"
    train("vit-micro", folder, Shape(**TINY, dropout=0.5, pooling="mean"))
    return folder


def test_both_are_kept_with_the_model(dropped):
    model = vitlens.load(str(dropped))
    assert model.architecture["overrides"] == {**TINY, "dropout": 0.5, "pooling": "mean"}
    assert model.layout.prefix == ()
    rates = {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)}
    assert rates == {0.5}


def test_dropout_is_off_in_evaluation_and_on_in_training(dropped):
    model, images = vitlens.load(str(dropped)), torch.rand(2, 3, 32, 32)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))
    with evaluating(model):
        assert torch.equal(model(images), model(images))
    assert model.training


def test_analyses_of_a_model_left_in_training_mode_are_those_of_evaluation(dropped):
    model, images = vitlens.load(str(dropped)), torch.rand(2, 3, 32, 32)
    functions = (
        lambda: torch.stack(vitlens.attention(model, images)),
        lambda: vitlens.rollout(model, images),
        lambda: vitlens.relevance(model, images, targets=torch.tensor([1, 2])),
        lambda: vitlens.explain(model, images, targets=torch.tensor([1, 2]), method="gradcam"),
        lambda: vitlens.ablate(model, images.repeat(4, 1, 1, 1), torch.arange(8)).delta_loss,
    )
    expected = [function() for function in functions]
    model.train()
    for function, values in zip(functions, expected):
        assert torch.equal(torch.as_tensor(function()), torch.as_tensor(values))
        assert model.training


@pytest.mark.parametrize(
    ("model", "shape", "match"),
    [
        ("resnet20", Shape(dropout=0.1), "expected no --dropout for resnet20, a CNN without that setting, found 0.1"),
        ("resnet20", Shape(pooling="mean"), "expected no --pooling for resnet20, a CNN"),
        ("swin-micro", Shape(pooling="cls"), "expected no --pooling for swin-micro, which classifies by the mean"),
        ("vit-micro", Shape(dropout=1.0), r"expected dropout in \[0, 1\), found 1.0"),
        (
            "vit-micro",
            Shape(dropout=float("nan")),
            "expected a finite number at dropout in the shape of vit-micro, found nan",
        ),
        ("swin-micro", Shape(dropout=-0.1), r"expected dropout in \[0, 1\), found -0.1"),
        ("vit-digits", Shape(dropout=0.1), "expected a trained model as it is, found --dropout for vit-digits"),
    ],
)
def test_presets_without_them_and_wrong_numbers_are_refused_in_one_line(model, shape, match, tmp_path):
    with pytest.raises(InputError, match=match) as caught:
        train(model, tmp_path / "out", shape)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_swin_has_dropout(tmp_path):
    from vitlens.models.loading import untrained

    model = untrained("swin-micro", classes=("a", "b"), overrides={"dropout": 0.25})
    assert {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)} == {0.25}
