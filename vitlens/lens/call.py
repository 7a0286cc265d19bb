"""AttentionCall: what one attention layer was given and made, with its weights computed only as far as asked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from vitlens.lens.site import Site
from vitlens.shapes import Weights

_AT_ONCE = 1 << 19  # weights: 2 MiB in fp32, what a core keeps near


@dataclass(frozen=True)
class Scored:
    """The ingredients of scaled dot-product attention, as the model made them (norms and RoPE already applied).

    query, key: (batch, heads, tokens, head_dim); bias: additive or boolean (True = take part), or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    scale: float

    def weights(self, rows: Sequence[int] | slice) -> Tensor:
        """softmax(q kᵀ · scale + bias) of these query rows; a fully masked row is zeros."""
        query = self.query[..., rows, :]
        scores = (query * self.scale) @ self.key.transpose(-2, -1)
        if self.bias is None:
            return scores.softmax(-1)
        bias = self.bias if self.bias.shape[-2] == 1 else self.bias[..., rows, :]
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


@dataclass(frozen=True)
class AttentionCall:
    """One attention layer at work, as a reducer receives it.

    images: how many images the call holds (its batch is images x windows); scored: queries, keys and values where the
    model used scaled dot-product attention; made: the weights where the model made them itself, or where gradients
    were asked for; output: per head, before the output projection, where it was seen.
    """

    site: Site
    images: int
    scored: Scored | None = None
    made: Tensor | None = None
    output: Tensor | None = None

    def weights(self) -> Weights:
        """All weights (batch, heads, query, key); rows sum to 1."""
        if self.made is not None:
            return self.made  # itself, not a slice: gradients are asked for with respect to this tensor
        return self.rows(slice(None))

    def rows(self, rows: Sequence[int] | slice) -> Weights:
        """The weights of some query rows alone, which cost rows x keys and not queries x keys."""
        if self.made is not None:
            return self.made[..., rows, :]
        assert self.scored is not None  # a call holds one or the other
        with torch._C.DisableTorchFunction():  # our softmax is none of the model's: another observation must not see it
            return self.scored.weights(rows)

    def parts(self) -> Iterator[tuple[slice, "AttentionCall"]]:
        """The call a few images at a time (which, and theirs), so that the weights stay in the processor's cache."""
        windows = self._windows_each()
        each = windows * self.site.heads * self.site.queries * self.site.keys
        step = max(1, _AT_ONCE // each)
        for start in range(0, self.images, step):
            stop = min(start + step, self.images)
            yield slice(start, stop), self._part(slice(start * windows, stop * windows), stop - start)

    def pick(self, image: int) -> "AttentionCall":
        """The call of one image, its windows included."""
        windows = self._windows_each()
        return self._part(slice(image * windows, (image + 1) * windows), 1)

    def _windows_each(self) -> int:
        batch = len(self.made) if self.made is not None else len(self.scored.query)  # type: ignore[union-attr]
        return batch // self.images

    def _part(self, part: slice, images: int) -> "AttentionCall":
        scored, made, output = self.scored, self.made, self.output
        if scored is not None:
            bias = scored.bias
            if bias is not None and bias.dim() == 4 and bias.shape[0] == len(scored.query):
                bias = bias[part]
            scored = Scored(scored.query[part], scored.key[part], scored.value[part], bias, scored.scale)
        return AttentionCall(
            self.site, images, scored, None if made is None else made[part], None if output is None else output[part]
        )


def per_head(tensor: Tensor, heads: int = 1) -> Shaped[Tensor, "batch heads query any"]:
    """Any library's (.., heads, query, x) as four axes: more are joined; of three, (batch x heads) is parted."""
    if tensor.dim() == 3:
        return tensor.unflatten(0, (-1, heads)) if len(tensor) % heads == 0 else tensor.unsqueeze(1)
    return tensor if tensor.dim() == 4 else tensor.flatten(0, tensor.dim() - 4)
