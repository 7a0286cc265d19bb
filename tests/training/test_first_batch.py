"""The picture of the first batch shows what the model is trained on: caught where it enters the model."""

import pytest
import torch
from torch import Tensor, nn

from tests.training.tiny import tiny_model, tiny_recipe, tiny_split
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.training.loop import fit
from vitlens.training.recipe import Recipe
from vitlens.training.task import FirstBatch, first_batch


class CaughtError(Exception):
    """Stops the training once the first batch is there."""


def entered(model: Model, train: Split, recipe: Recipe, tmp_path, *, seed: int) -> tuple[Tensor, Tensor]:
    """The images and targets of the first step of a training."""

    class Objective:
        def module(self, model: Model) -> nn.Module:
            return model

        def loss(self, outputs: Tensor, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:
            found.extend((images, targets))
            raise CaughtError

        def logits(self, outputs: Tensor) -> Tensor:
            return outputs

        def identity(self) -> dict[str, object]:
            return {}

    found: list[Tensor] = []
    with pytest.raises(CaughtError):
        fit(model, train, tiny_split("test", 9), recipe=recipe, directory=tmp_path, seed=seed, objective=Objective())
    return found[0], found[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_size": 30},
        {"batch_size": 30, "mixup": 0.8},
        {"batch_size": 30, "cutmix": 1.0, "mixup": 0.8, "randaugment": 2, "erasing": 0.5},
        {"batch_size": 13, "cutmix": 1.0},
        {"batch_size": 14, "cutmix": 1.0},
        {"batch_size": 30, "mixup": 0.8, "mix_chance": 0.5},
        {"batch_size": 30, "views": 3, "mixup": 0.8},
    ],
)
@pytest.mark.parametrize("seed", [0, 3])
def test_it_is_what_enters_the_model(changes, seed, tmp_path):
    model, train, recipe = tiny_model(), tiny_split("train", 40), tiny_recipe(**changes)
    before = torch.random.get_rng_state()
    shown = first_batch(model, train, recipe, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    images, targets = entered(model, train, recipe, tmp_path, seed=seed)
    count = min(12, recipe.batch_size)
    assert shown.trained.shape == (count, 3, 8, 12)
    assert torch.equal(shown.trained, images[:count])
    if targets.ndim == 1:
        assert torch.equal(shown.targets.argmax(1), targets[:count])
        assert torch.equal(shown.labels, targets[:count])
    else:
        assert torch.equal(shown.targets, targets[:count])
    assert torch.equal(shown.targets.sum(1), torch.ones(count)) or torch.allclose(
        shown.targets.sum(1), torch.ones(count)
    )


def test_the_originals_are_those_of_the_images(tmp_path):
    train = tiny_split("train", 40)
    plain = tiny_recipe(crop_padding=0, flip=False, batch_size=30)
    shown = first_batch(tiny_model(), train, plain, seed=1)
    assert torch.equal(shown.given.float() / 255, shown.trained)
    mixed: FirstBatch = first_batch(tiny_model(), train, tiny_recipe(batch_size=30, mixup=0.8), seed=1)
    assert torch.equal(mixed.given, shown.given)
    own = mixed.targets[torch.arange(12), mixed.labels]
    other = mixed.targets[torch.arange(1, 12), mixed.labels[:-1]]  # the one before each in the batch
    same = mixed.labels[1:] == mixed.labels[:-1]
    assert torch.allclose(own[1:] + other, torch.where(same, 2.0, 1.0))


def test_of_several_processes_it_is_the_share_of_the_first():
    train = tiny_split("train", 40)
    whole, share = (
        first_batch(tiny_model(), train, tiny_recipe(batch_size=30), seed=1, processes=count) for count in (1, 2)
    )
    assert torch.equal(share.trained[:6], whole.trained[::2])
