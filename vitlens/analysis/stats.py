"""Numbers that say how a head looks: entropy, and what is streamed from it over many images."""

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.lens.call import AttentionCall


def entropy(weights: Float[Tensor, "*leading key"]) -> Float[Tensor, "*leading"]:
    """Entropy of each row of weights in nats: 0 for one key, ln(keys) for uniform attention."""
    # torch.special.entr does the same several times slower; the clamp keeps 0 log 0 at 0
    logarithms = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
    return -(weights * logarithms).sum(-1)


class MeanEntropy:
    """A reducer: the mean entropy of every head in nats, over queries and images; memory does not grow with either."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._images: dict[int, int] = {}

    def __call__(self, call: AttentionCall) -> None:
        """Take in one layer of one batch, a few images at a time."""
        for _, part in call.parts():
            rows = entropy(part.weights().float())  # (images x windows, heads, query)
            total = rows.mean((0, 2)).double() * part.images
            layer = call.site.layer
            self._sums[layer] = self._sums[layer] + total if layer in self._sums else total
            self._images[layer] = self._images.get(layer, 0) + part.images

    def result(self) -> tuple[Float[Tensor, " heads"], ...]:
        """The mean entropy of the heads of each layer, in nats."""
        return tuple(self._sums[layer] / self._images[layer] for layer in sorted(self._sums))
