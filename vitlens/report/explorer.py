"""What the attention explorer of a page shows: images, the attention weights of every head, and the tokens' places.

Plain arrays, without torch: a command's report makes it from its record, a notebook from a model; the HTML renderer
packs it into the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vitlens.errors import InputError


@dataclass(frozen=True)
class ExplorerImage:
    """One image as the model saw it, and what looks where in it.

    picture: (height, width, 3) uint8; weights: (layers, heads, queries, keys), each row a distribution over the keys,
    or None where only layer means are kept; layer_weights: (layers, queries, keys), the mean over heads; rollout:
    (layers, keys), from CLS (or the mean of all tokens) through the layers so far; maps: (rows, columns) by name, e.g.
    the relevance for a class, raw; name, facts: what is said under it (file, prediction, label).
    """

    name: str
    picture: NDArray[np.uint8]
    weights: NDArray[np.floating] | None
    layer_weights: NDArray[np.floating] | None = None
    rollout: NDArray[np.floating] | None = None
    maps: "dict[str, NDArray[np.floating]]" = field(default_factory=dict)
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explorer:
    """Images of one model for the explorer.

    model: its alias; keys: the grid (rows, columns) of the patches that are looked at, after `special` tokens that come
    first and are no patches (their names, e.g. ("CLS",)); queries: the grid of the rows of the weights, `keys` itself
    unless queries were pooled; labels: what each head attends to, (layers, heads); importance: the rise of the loss
    without each head in nats, (layers, heads), NaN where it is not known; notes: sentences shown above it. Raises
    InputError where the shapes do not fit.
    """

    model: str
    images: tuple[ExplorerImage, ...]
    keys: tuple[int, int]
    special: tuple[str, ...]
    queries: tuple[int, int]
    labels: Sequence[Sequence[str]] = ()
    importance: NDArray[np.floating] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wanted = len(self.special) + self.queries[0] * self.queries[1], len(self.special) + self.keys[0] * self.keys[1]
        for image in self.images:
            for weights in (image.weights, image.layer_weights):
                if weights is not None and weights.shape[-2:] != wanted:
                    raise InputError(f"expected weights of {wanted} queries and keys, found {weights.shape[-2:]}")
