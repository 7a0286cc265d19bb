"""AttentionCall: what one attention layer was given and computed, its weights only as far as asked, and its windows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from vitlens.lens.site import Site, Windows
from vitlens.shapes import Weights

_AT_ONCE = 1 << 19  # weights: 2 MiB in fp32, which fits a core's cache


@dataclass(frozen=True)
class Scored:
    """The inputs of scaled dot-product attention, as the model computed them (norms and RoPE already applied).

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
    """One attention call of a layer, as a reducer receives it.

    images: how many images the call holds (its batch is images x windows); scored: queries, keys and values where the
    model used scaled dot-product attention; made: the weights where the model computed them itself, or where gradients
    were asked for; output: per head, before the output projection, where it was seen; gradient: of some number with
    respect to output, or to made where the model computed the weights itself.
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
        with torch._C.DisableTorchFunction():  # an outer observation must not take this softmax for one of the model's
            return self.scored.weights(rows)

    def weight_gradient(self) -> Weights | None:
        """The gradient with respect to all weights (batch, heads, query, key), where the call has one."""
        if self.gradient is None or self.scored is None:
            return self.gradient
        return self.gradient.to(self.scored.value) @ self.scored.value.transpose(-2, -1)  # output = weights @ value

    def parts(self) -> Iterator[tuple[slice, "AttentionCall"]]:
        """The call a few images at a time (which, and their part), so that the weights fit the processor's cache."""
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
        made, output = (None if tensor is None else tensor.detach() for tensor in (self.made, self.output))
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
        own = (None if each is None else each[part] for each in (self.made, self.output, self.gradient))
        return AttentionCall(self.site, images, scored, *own)


def score_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    heads: int,
) -> Scored:
    """What F.scaled_dot_product_attention was given, with four axes each; mask: boolean or additive, or None."""
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if grouped:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None and (query.dim() != 4 or mask.dim() > 4):  # its axes are joined as the query's are
        mask = per_head(mask.expand(*query.shape[:-1], key.shape[-2]), heads)
    return Scored(per_head(query, heads), per_head(key, heads), per_head(value, heads), mask, factor)


def precise(tensor: Tensor) -> Tensor:
    """The tensor in fp32 at least: a model may run in bf16, what is computed from its attention should not."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def per_head(tensor: Tensor, heads: int = 1) -> Shaped[Tensor, "batch heads query any"]:
    """Any library's (.., heads, query, x) as four axes: more are joined; of three, (batch x heads) is split."""
    if tensor.dim() == 3:
        return tensor.unflatten(0, (-1, heads)) if len(tensor) % heads == 0 else tensor.unsqueeze(1)
    return tensor if tensor.dim() == 4 else tensor.flatten(0, tensor.dim() - 4)


def window_index(windows: Windows) -> Int[Tensor, "count inside"]:
    """Which patch of the map (row by row) stands at each place of each window; -1 where there is only padding."""
    (rows, columns), (height, width) = windows.resolution, windows.window
    down, across = -rows % height, -columns % width
    shift = tuple(
        0 if window >= size else step  # one window covers all: nothing is shifted
        for window, size, step in zip(windows.window, (rows + down, columns + across), windows.shift)
    )
    index = torch.arange(rows * columns).view(rows, columns)
    if windows.pad_first:
        index = torch.nn.functional.pad(index, (0, across, 0, down), value=-1)
        index = index.roll((-shift[0], -shift[1]), (0, 1))
    else:
        index = torch.nn.functional.pad(index.roll((-shift[0], -shift[1]), (0, 1)), (0, across, 0, down), value=-1)
    blocks = index.unfold(0, height, height).unfold(1, width, width)  # (down, across, height, width)
    return blocks.reshape(-1, height * width)


def unwindow(
    weights: Float[Tensor, "calls heads inside inside"], windows: Windows
) -> Float[Tensor, "batch heads patches patches"]:
    """The weights between all patches of the map, zero where two patches share no window.

    Rows sum to 1 as before, less the mass that lies on padding.

    Windows of an image stand one after another in `calls`. The result has patches², so ask it for few images.
    """
    index = window_index(windows).to(weights.device)
    count, patches = len(index), windows.resolution[0] * windows.resolution[1]
    split = weights.unflatten(0, (-1, count)).transpose(1, 2)  # (batch, heads, count, inside, inside)
    # padding goes to a row and column of its own, which is cut off at the end
    place = index.masked_fill(index < 0, patches)
    full = weights.new_zeros(*split.shape[:2], patches + 1, patches + 1)
    full[:, :, place[:, :, None], place[:, None, :]] = split
    return full[:, :, :patches, :patches]


def received(
    weights: Float[Tensor, "calls heads inside inside"], windows: Windows
) -> Float[Tensor, "batch heads rows columns"]:
    """The attention that each patch receives, mean over the query patches of its window, in image coordinates.

    All patches of the window count, masked or not: uniform attention then gives a uniform map, also where a shifted
    window is cut into parts.
    """
    index = window_index(windows).to(weights.device)
    count, patches = len(index), windows.resolution[0] * windows.resolution[1]
    queries = (index >= 0).to(weights.dtype)  # padding is no query
    split = weights.unflatten(0, (-1, count)).transpose(1, 2)  # (batch, heads, count, inside, inside)
    mean = torch.einsum("bhcqk,cq->bhck", split, queries) / queries.sum(-1, keepdim=True)
    place = index.masked_fill(index < 0, patches).flatten()
    full = weights.new_zeros(*mean.shape[:2], patches + 1)
    full[:, :, place] = mean.flatten(2)
    maps: Tensor = full[:, :, :patches].unflatten(-1, windows.resolution)
    return maps
