"""The first batch of a training: its images as given, as they enter the model, and their targets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images, Pixels
from vitlens.training.feed import epoch_batches, portions, process_share
from vitlens.training.recipe import Recipe
from vitlens.training.task import Task

SHOWN: Final = 12  # images


@dataclass(frozen=True)
class FirstBatch:
    """The first images of the first batch. given: their pixels; trained: in [0, 1], after augmentation and mixing;
    labels: of the images as given; targets: shares of the classes, before label smoothing."""

    given: Pixels
    trained: Images
    labels: Int[Tensor, " batch"]
    targets: Float[Tensor, "batch classes"]


def first_batch(
    model: Model, train: Split, recipe: Recipe, *, seed: int, processes: int = 1, most: int = SHOWN
) -> FirstBatch:
    """The first images of the first batch of `fit` with this recipe and seed, in the first of several processes.

    Torch's random state is left as it was. Mixing pairs each image with the one before it, so that only one more has to
    be read: the batch's last.
    """
    task = Task(model, train, train, recipe, Path(), seed, torch.device("cpu"), "fp32", None)
    batch = epoch_batches(len(train), recipe.batch_size, seed=seed, epoch=0, views=recipe.views)[0]
    share = process_share(batch, 0, processes)
    whole = len(share) <= most + 1
    keys = share if whole else torch.cat((share[-1:], share[:most]))
    (portion,) = portions(train.source, [keys], pin=False)
    labels = task.labels(portion.indices)
    with torch.random.fork_rng(devices=[]):
        trained, targets = task.mixed(task.augmented(portion, 0), labels, step=0, process=0)
    shares = F.one_hot(targets.long(), len(model.classes)).float() if targets.ndim == 1 else targets
    shown = slice(0, most) if whole else slice(1, None)
    return FirstBatch(portion.pixels[shown].cpu(), trained[shown], labels[shown], shares[shown])
