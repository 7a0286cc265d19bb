"""The check of a training: data, model and one small batch, in seconds."""

import math
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from vitlens.data.split import Split, takes_splits
from vitlens.models.model import Model
from vitlens.training.check.batch import (
    IMAGES,
    Trained,
    constant_loss,
    learning_rate_check,
    one_batch_check,
    trainings,
    without_dropout,
)
from vitlens.training.check.data import Sample, data_checks, sample
from vitlens.training.check.inside import Pass, forward_and_backward, layer_rows, restored
from vitlens.training.check.model import (
    activations_check,
    evaluation_check,
    frozen_check,
    gradient_norms_check,
    gradients_check,
    initial_loss_check,
    trained_parameters,
)
from vitlens.training.check.normalisation import normalisation_check
from vitlens.training.check.rows import NAMES, CheckRow, TrainingCheck
from vitlens.training.finetune import require_last, trained_names
from vitlens.training.recipe import Recipe
from vitlens.training.task import require_labelled

_READ: Final = ((64, 16), (128, 8))  # largest side in px, and images of a pass up to it
_FEWEST_IMAGES: Final = 4


@takes_splits
def check_training(
    model: Model,
    train: Split,
    test: Split | None = None,
    *,
    recipe: Recipe,
    seed: int = 0,
    train_last: int | None = None,
    fresh: bool = True,
) -> TrainingCheck:
    """Check data, model and recipe before a training; the model is as before afterwards.

    train, test: labelled images; train_last: as in `fit`; fresh: whether the model has random weights. A model
    that is frozen as a whole, as `load` gives it, is taken as one to be trained, as `fit` does. Raises DataError for
    images without labels.
    """
    require_last(model, train_last)
    require_labelled(train)
    read = sample(train, seed=seed)
    found = list(data_checks(train, test, read, seed=seed))
    devices = [model.device] if model.device.type == "cuda" else []
    with restored(model), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        expected = _made_trainable(model, train_last)
        checking = _Inside(model, read, expected, seed=seed, recipe=recipe, fresh=fresh)
        return checking.result(found)


def _made_trainable(model: Model, last: int | None) -> list[str]:
    """The names of the parameters to be trained; gradient flags change where all are frozen, or `last` is given."""
    named = dict(model.module.named_parameters())
    expected = list(named) if last is None else [name for name in named if name in trained_names(model, last=last)]
    model.train()
    if last is not None or not any(each.requires_grad for each in named.values()):
        for name, each in named.items():
            each.requires_grad_(name in expected)
    return expected


class _Inside:
    """The checks that need passes of the model, on one small batch."""

    def __init__(
        self, model: Model, read: Sample, expected: list[str], *, seed: int, recipe: Recipe, fresh: bool
    ) -> None:
        self.model, self.expected, self.recipe, self.fresh = model, expected, recipe, fresh
        self.images, self.labels = _batch(model, read, seed=seed)

    def result(self, found: list[CheckRow]) -> TrainingCheck:
        """All checks; what needs labels is left open where too few are valid."""
        model, images = self.model, self.images
        seen = Pass()
        found.append(evaluation_check(model, images))
        found.append(frozen_check(model, self.expected))
        if len(self.labels) < 2:
            return TrainingCheck(_ordered(found), (), (), len(images))
        seen = forward_and_backward(model, images, self.labels)
        layers = tuple(layer_rows(model, seen))
        missing = [name for name in trained_parameters(model) if model.module.get_parameter(name).grad is None]
        first = {name for name in trained_parameters(model) if _has_gradient(model.module.get_parameter(name).grad)}
        found += [
            normalisation_check(model, images, seen.entering),
            activations_check(layers),
            initial_loss_check(seen, len(model.classes), fresh=self.fresh),
            gradient_norms_check(layers),
        ]
        runs = self._trainings(seen)
        reached = first.union(*(run.gradients for run in runs))
        names = list(trained_parameters(model))
        zero = [name for name in names if name not in reached and name not in missing]
        missing = [name for name in missing if name not in reached]
        found.append(gradients_check(layers, missing, zero, len(names)))
        constant = constant_loss(self._few[1]) if runs else None
        if constant is not None:
            found += [one_batch_check(runs, constant, len(self._few[1])), learning_rate_check(runs, constant)]
        losses = tuple(row for run in runs for row in run.rows())
        return TrainingCheck(_ordered(found), layers, losses, len(images), constant)

    @property
    def _few(self) -> tuple[Tensor, Tensor]:
        """The images and labels of the one batch that is learned."""
        return self.images[:IMAGES], self.labels[:IMAGES]

    def _trainings(self, seen: Pass) -> tuple[Trained, ...]:
        """The trainings on the batch; none where the loss is not finite or nothing is trained."""
        if not math.isfinite(seen.loss) or not any(True for _ in trained_parameters(self.model)):
            return ()
        without_dropout(self.model)
        return trainings(self.model, *self._few, self.recipe)


def _has_gradient(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _batch(model: Model, read: Sample, *, seed: int) -> tuple[Tensor, Tensor]:
    """A few images with valid labels, balanced by class, on the model's device."""
    side = max(model.input_size)
    count = next((images for most, images in _READ if side <= most), _FEWEST_IMAGES)
    valid = ((read.labels >= 0) & (read.labels < len(model.classes))).nonzero().flatten()
    order = valid[torch.randperm(len(valid), generator=torch.Generator().manual_seed(seed))]
    turns: dict[int, int] = {}
    ranked = []
    for index in order.tolist():
        label = int(read.labels[index])
        ranked.append((turns.setdefault(label, 0), index))
        turns[label] += 1
    chosen = [index for _, index in sorted(ranked, key=lambda each: each[0])[:count]]
    images = read.images[chosen] if chosen else read.images[:count]
    return images.to(model.device), read.labels[chosen].to(model.device)


def _ordered(found: list[CheckRow]) -> tuple[CheckRow, ...]:
    """The checks in the order of their causes; those that could not be made are inconclusive."""
    by_name = {row.name: row for row in found}
    return tuple(by_name.get(name) or _not_made(name) for name in NAMES)


def _not_made(name: str) -> CheckRow:
    advice = "It could not be made, as an earlier check failed: correct that first."
    return replace(CheckRow(name, "inconclusive", "a measurement", "none"), advice=advice)
