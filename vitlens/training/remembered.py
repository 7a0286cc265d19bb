"""A teacher that looks at each training image once and remembers its answer, where the same pixels come again."""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.data.split import Split
from vitlens.shapes import Images, Logits
from vitlens.training.feed import portions
from vitlens.training.recipe import Recipe
from vitlens.training.teacher import Teacher

MOST: Final = 100_000_000  # numbers to remember: 400 MB
_CHANGES = ("crop_padding", "randaugment", "erasing", "mixup", "cutmix")  # of these no view is the same twice


def forms_of(recipe: Recipe, split: Split) -> int:
    """How many forms of each image are worth remembering: 1, 2 where it may be mirrored, 0 where it does not pay.

    It pays when the recipe changes no pixels, the data is not drawn anew, and each form comes more than once.
    """
    forms = 1 + recipe.flip
    changes = any(getattr(recipe, name) for name in _CHANGES) or split.epoch(1).source is not split.source
    fits = forms * len(split) * len(split.classes) <= MOST
    return forms if not changes and recipe.epochs > forms and fits else 0


class Remembered:
    """Answers as the teacher does, from memory where it knows the image.

    An image is known by a 64-bit hash of all its bits: a single changed pixel makes it a new one, which the teacher
    itself is asked about.
    """

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.asked = 0  # images that the teacher was asked about since the last look at the training images
        self._weights: Tensor | None = None
        self._hashes = torch.zeros(0, dtype=torch.int64)  # sorted
        self._answers = torch.zeros(0, 0)

    def look(
        self, split: Split, *, mirrored: bool, device: torch.device, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        """Look at every image, and its mirror image where asked, in an order that is always the same."""
        hashes, answers = [], []
        batches = torch.arange(len(split)).split(fitting_batch_size(self.teacher.model))
        for portion in portions(split.source, batches, pin=device.type == "cuda"):
            images = portion.pixels.to(device, non_blocking=True).float().div_(255)
            for form in (images, images.flip(-1))[: 1 + mirrored]:
                hashes.append(self._hash(form))
                answers.append(self.teacher(form))
                advance(len(form))
        order = torch.cat(hashes).argsort()
        self._hashes, self._answers, self.asked = torch.cat(hashes)[order], torch.cat(answers)[order], 0

    def __call__(self, images: Images) -> Logits:
        """Logits (batch, classes) in fp32."""
        if not len(self._hashes):
            return self.teacher(images)
        found = self._hash(images)
        place = torch.searchsorted(self._hashes, found).clamp_max(len(self._hashes) - 1)
        logits, new = self._answers[place], self._hashes[place] != found
        if new.any():
            logits[new] = self.teacher(images[new])
            self.asked += int(new.sum())
        return logits

    def _hash(self, images: Images) -> Int[Tensor, " batch"]:
        """The bits of each image times fixed random numbers, summed modulo 2^64 (multilinear hashing)."""
        bits = images.contiguous().view(torch.int32).flatten(1)
        if self._weights is None or self._weights.shape[0] != bits.shape[1] or self._weights.device != bits.device:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(-(2**63), 2**63 - 1, (bits.shape[1],), generator=generator)
            self._weights = drawn.to(bits.device)
        return (bits.long() * self._weights).sum(1)
