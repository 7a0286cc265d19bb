"""What the callbacks of all trainers measure, and when.

A callback calls `AttentionWatch.begin` once before the training. At the end of an epoch it asks
`is_due`, and calls `log` with its function that writes to the trainer's loggers.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitlens.analysis.attention.weights import require_maps
from vitlens.analysis.evaluation.evaluate import images_of
from vitlens.analysis.heads.statistics import require_statistics
from vitlens.data.catalogue import read_split
from vitlens.errors import InputError, first_line
from vitlens.models.model import Model
from vitlens.models.wrap import wrap
from vitlens.shapes import Images, Labels
from vitlens.snapshots import Pixels, attention_sheet, attention_snapshot, neighbour_accuracy

EVERY: Final = 5  # epochs, so that measuring takes a small share of the training
MEASURED: Final = 16  # images for the statistics of attention
DRAWN: Final = 4  # images on the sheet

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Measured:
    """The measurements of one epoch.

    numbers: the numbers by name.
    pictures: the pictures (height, width, 3) by name.
    """

    numbers: Mapping[str, float]
    pictures: Mapping[str, Pixels]


class AttentionWatch:
    """The images of a callback, its settings, and the model that is trained.

    images: in any form that `vitlens.images` takes.
    labels: (n,), None for those of a Split or of class folders, if it has some.
    every: epochs between measurements.

    Raises InputError for an interval below 1.
    """

    def __init__(self, images: Any, labels: Tensor | None, every: int) -> None:
        if every < 1:
            raise InputError(f"expected every of at least 1 epoch, found {every}")
        self.every = every
        self._source = images
        self._labels = labels
        self._model: Model | None = None
        self._images: Images | None = None
        self._failed = False

    def begin(
        self, module: nn.Module, size: int | tuple[int, int], mean: Triple, std: Triple
    ) -> None:
        """Read the structure of the module from forward passes, and the images for it.

        Raises what `vitlens.wrap` raises, DataError for images that cannot be read, InputError for
        labels of another number, UnsupportedError for a module without attention.
        """
        model = wrap(module, image_size=size, mean=mean, std=std)
        require_statistics(model)
        split = read_split(self._source, model.preprocessing)
        self._images = images_of(split)
        labels: Labels | None = split.labels
        if self._labels is not None:
            labels = torch.as_tensor(self._labels)
        if labels is not None and labels.shape != (len(split),):
            raise InputError(
                f"expected labels of shape ({len(split)},), found {tuple(labels.shape)}"
            )
        self._labels = labels
        self._model = model
        self._failed = False

    def is_due(self, epoch: int, *, last: bool) -> bool:
        """Return True at the end of every n-th epoch from the first one on, and of the last one.

        epoch: counted from 1.
        """
        if self._model is None or self._failed:
            return False
        is_nth = (epoch - 1) % self.every == 0
        return last or is_nth

    def log(self, epoch: int, write: Callable[[Measured], None]) -> None:
        """Measure and write; after a failure, which gives a warning, nothing more is measured."""
        try:
            write(self._measure(epoch))
        except Exception as error:
            self._failed = True
            warnings.warn(
                f"vitlens: attention is left out from here on ({first_line(error)}); the training "
                "goes on",
                stacklevel=2,
            )

    def _measure(self, epoch: int) -> Measured:
        assert self._model is not None
        assert self._images is not None
        model = self._model
        images = self._images.to(model.device)
        model.training = model.module.training  # whatever the trainer has set
        numbers = dict(attention_snapshot(model, images[:MEASURED]).scalars)
        if self._labels is not None and len(images) > 1:
            numbers["knn_accuracy"] = neighbour_accuracy(model, images, self._labels)
        pictures = {}
        if require_maps.is_met(model):
            title = f"Attention after epoch {epoch}, share of each patch"
            pictures["attention"] = attention_sheet(model, images[:DRAWN], title)
        return Measured(numbers, pictures)
