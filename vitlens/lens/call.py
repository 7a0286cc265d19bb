"""AttentionCall: what one attention layer was given and made, with its weights computed only as far as asked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
    were asked for; output: per head, before the output projection, where it was seen; gradient: of some number with
    respect to output, or to made where the model made the weights itself.
    """

    site: Site
    images: int
    scored: Scored | None = None
    made: Tensor | None = None
    output: Tensor | None = None
    gradient: Tensor | None = None

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

    def weight_gradient(self) -> Weights | None:
        """The gradient with respect to all weights (batch, heads, query, key), where the call has one."""
        if self.gradient is None or self.scored is None:
            return self.gradient
        return self.gradient.to(self.scored.value) @ self.scored.value.transpose(-2, -1)  # output = weights @ value

    def parts(self) -> Iterator[tuple[slice, "AttentionCall"]]:
        """The call a few images at a time (which, and theirs), so that the weights stay in the processor's cache."""
        windows = self._windows_each()
        each = windows * self.site.heads * self.site.queries * self.site.keys
        step = max(1, _AT_ONCE // each)
        for start in range(0, self.images, step):
            stop = min(start + step, self.images)
            yield slice(start, stop), self._part(slice(start * windows, stop * windows), stop - start)

    def precise(self) -> "AttentionCall":
        """The call with queries, keys and values in fp32 at least."""
        scored = self.scored
        if scored is None or scored.query.dtype in (torch.float32, torch.float64):
            return self
        bias = scored.bias if scored.bias is None or scored.bias.dtype == torch.bool else precise(scored.bias)
        exact = Scored(precise(scored.query), precise(scored.key), precise(scored.value), bias, scored.scale)
        return replace(self, scored=exact)

    def detach(self) -> "AttentionCall":
        """The call with tensors that autograd does not follow."""
        scored = self.scored
        if scored is not None:
            bias = None if scored.bias is None else scored.bias.detach()
            scored = Scored(scored.query.detach(), scored.key.detach(), scored.value.detach(), bias, scored.scale)
        made, output = (None if found is None else found.detach() for found in (self.made, self.output))
        return replace(self, scored=scored, made=made, output=output)

    def pick(self, image: int) -> "AttentionCall":
        """The call of one image, its windows included."""
        windows = self._windows_each()
        return self._part(slice(image * windows, (image + 1) * windows), 1)

    def _windows_each(self) -> int:
        batch = len(self.made) if self.made is not None else len(self.scored.query)  # type: ignore[union-attr]
        return batch // self.images

    def _part(self, part: slice, images: int) -> "AttentionCall":
        scored = self.scored
        if scored is not None:
            bias = scored.bias
            if bias is not None and bias.dim() == 4 and bias.shape[0] == len(scored.query):
                bias = bias[part]
            scored = Scored(scored.query[part], scored.key[part], scored.value[part], bias, scored.scale)
        own = (None if found is None else found[part] for found in (self.made, self.output, self.gradient))
        return AttentionCall(self.site, images, scored, *own)


def precise(tensor: Tensor) -> Tensor:
    """The numbers in fp32 at least: a model may run in bf16, what is made of its attention should not."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def per_head(tensor: Tensor, heads: int = 1) -> Shaped[Tensor, "batch heads query any"]:
    """Any library's (.., heads, query, x) as four axes: more are joined; of three, (batch x heads) is parted."""
    if tensor.dim() == 3:
        return tensor.unflatten(0, (-1, heads)) if len(tensor) % heads == 0 else tensor.unsqueeze(1)
    return tensor if tensor.dim() == 4 else tensor.flatten(0, tensor.dim() - 4)
