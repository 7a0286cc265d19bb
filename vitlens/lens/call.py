"""AttentionCall: the inputs and outputs of one attention layer, its weights computed on request,
and its windows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from vitlens.lens.site import Site, Windows
from vitlens.models.attention import softmax_or_zero as softmax_or_zero
from vitlens.renamed import RenamedAttribute
from vitlens.shapes import Weights

# timm and torchvision add -100 to the score of a masked key, not -inf
MASKED: Final = 1e-20  # weight up to which a key is masked
MASKED_SCORE: Final = -50.0  # added to a score up to which its key is masked
Stage = Literal["queries", "keys", "values", "scores", "weights"]
Rows = Sequence[int] | slice
Placed = Float[Tensor, "batch heads _ key"]
# weights: 2 MiB in fp32, which fits a core's cache; on a card 256 MiB, or it would wait for each
# part's launches
_AT_ONCE = {"cpu": 1 << 19, "other": 1 << 26}
INPUTS: Final[Mapping[Stage, str]] = {"queries": "query", "keys": "key", "values": "value"}


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of scaled dot-product attention, as the model computed them (norms and RoPE
    already applied).

    query, key: (batch, heads, tokens, head_dim).
    bias: additive or boolean (True = take part), or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    scale: float

    each = RenamedAttribute("map_tensors")

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "AttentionInputs":
        """Return the inputs with the function applied to each tensor."""
        bias = None if self.bias is None else function(self.bias)
        return AttentionInputs(
            function(self.query), function(self.key), function(self.value), bias, self.scale
        )

    def scores(self, rows: Rows) -> Tensor:
        """Return q kᵀ · scale + bias of these query rows, before the softmax.

        Returns -inf where a key takes no part.
        """
        query = self.query[..., rows, :]
        scores = (query * self.scale) @ self.key.transpose(-2, -1)
        if self.bias is None:
            return scores
        bias = self.bias
        if bias.shape[-2] != 1:
            bias = bias[..., rows, :]
        if bias.dtype == torch.bool:
            return scores.masked_fill(~bias, -torch.inf)
        return scores + bias

    def weights(self, rows: Rows) -> Tensor:
        """Return the softmax of the scores of these query rows; a fully masked row is zeros."""
        scores = self.scores(rows)
        if self.bias is None:
            return scores.softmax(-1)
        return softmax_or_zero(scores)


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a layer, as a reducer receives it.

    images: how many images the call holds (its batch is images x windows).
    inputs: queries, keys and values where the model used scaled dot-product attention.
    computed: the weights where the model computed them itself, or where gradients were asked for.
    output: per head, before the output projection, None where it was not observed.
    gradient: the gradient of some number with respect to output, or to computed where the model
        computed the weights itself.
    """

    site: Site
    images: int
    inputs: AttentionInputs | None = None
    computed: Tensor | None = None
    output: Tensor | None = None
    gradient: Tensor | None = None

    def at(
        self, stage: Stage, rows: Rows = slice(None), *, scored: Tensor | None = None
    ) -> Tensor | None:
        """Return the tensor of a stage, (batch, heads, ..); None where there is none.

        Scores and weights that fused attention does not compute are computed here.

        rows: the query rows of scores and weights.
        scored: the scores, where the model's call computed them.
        """
        stored = {"scores": scored, "weights": self.computed}.get(stage)
        if stored is not None:
            return stored[..., rows, :]
        if self.inputs is None:
            return None
        if stage in INPUTS:
            tensor: Tensor = getattr(self.inputs, INPUTS[stage])
            return tensor
        # an outer observation must not count this softmax as the model's
        with torch._C.DisableTorchFunction():
            if stage == "scores":
                return self.inputs.scores(rows)
            return self.inputs.weights(rows)

    def weights(self) -> Weights:
        """Return all weights (batch, heads, query, key); rows sum to 1."""
        if self.computed is None:
            return self.rows(slice(None))
        # not a slice of what was computed: gradients are taken with respect to this tensor
        return self.computed

    def placed(self) -> Placed:
        """Return all weights with the queries and keys of each window row by row (see
        `row_by_row`).
        """
        return row_by_row(self.weights(), self.site.windows)

    def rows(self, rows: Rows) -> Weights:
        """Return the weights of some query rows only.

        The cost is rows x keys instead of queries x keys.
        """
        weights = self.at("weights", rows)
        assert weights is not None  # a call has inputs or weights
        return weights

    def weight_gradient(self) -> Weights | None:
        """Return the gradient with respect to all weights (batch, heads, query, key), where the
        call has one.
        """
        if self.gradient is None or self.inputs is None:
            return self.gradient
        # the output is the product of weights and values
        return self.gradient.to(self.inputs.value) @ self.inputs.value.transpose(-2, -1)

    def parts(self) -> Iterator[tuple[slice, "AttentionCall"]]:
        """Yield the call in parts of a few images, each with its slice: a part's weights fit the
        processor's cache.
        """
        windows = len(self._held) // self.images
        weights_per_image = windows * self.site.heads * self.site.queries * self.site.keys
        device = "cpu" if self._held.device.type == "cpu" else "other"
        step = max(1, _AT_ONCE[device] // weights_per_image)
        for start in range(0, self.images, step):
            part = slice(start, min(start + step, self.images))
            yield part, self._part(part)

    def precise(self) -> "AttentionCall":
        """Return the call with queries, keys and values in fp32 at least."""
        if self.inputs is None or self.inputs.query.dtype in (torch.float32, torch.float64):
            return self
        return replace(self, inputs=self.inputs.map_tensors(precise))

    def detach(self) -> "AttentionCall":
        """Return the call with its tensors detached from the autograd graph."""
        return self._map_tensors(Tensor.detach, self.images)

    def pick(self, image: int) -> "AttentionCall":
        """Return the call of one image, its windows included."""
        return self._part(slice(image, image + 1))

    @property
    def _held(self) -> Tensor:
        """Return a tensor of the call whose first axis is images x windows."""
        if self.computed is not None:
            return self.computed
        assert self.inputs is not None  # a call has inputs or weights
        return self.inputs.query

    def _part(self, images: slice) -> "AttentionCall":
        calls = len(self._held)
        windows = calls // self.images
        chosen = slice(images.start * windows, images.stop * windows)

        def select(tensor: Tensor) -> Tensor:
            if tensor.dim() == 4 and len(tensor) == calls:
                return tensor[chosen]
            return tensor  # a bias that is broadcast

        return self._map_tensors(select, images.stop - images.start)

    def _map_tensors(self, function: Callable[[Tensor], Tensor], images: int) -> "AttentionCall":
        def apply(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return AttentionCall(
            self.site,
            images,
            inputs=None if self.inputs is None else self.inputs.map_tensors(function),
            computed=apply(self.computed),
            output=apply(self.output),
            gradient=apply(self.gradient),
        )


@dataclass(frozen=True)
class FusedArguments:
    """The arguments of F.scaled_dot_product_attention.

    mask: boolean or additive, or None; grouped: whether several query heads share a key head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    def attend(self) -> Tensor:
        """Return the output of torch's kernel."""
        options: dict[str, Any] = {"enable_gqa": True} if self.grouped else {}
        return F.scaled_dot_product_attention(
            self.query,
            self.key,
            self.value,
            self.mask,
            self.dropout,
            self.causal,
            scale=self.scale,
            **options,
        )

    def inputs(self, heads: int) -> AttentionInputs:
        """Return the inputs of attention with four axes each."""
        query = self.query
        key = self.key
        value = self.value
        mask = self.mask
        if self.causal:
            mask = torch.ones(
                query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
            ).tril()
        if self.grouped:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        # the axes of the mask are merged as those of the query
        if mask is not None and (query.dim() != 4 or mask.dim() > 4):
            mask = per_head(mask.expand(*query.shape[:-1], key.shape[-2]), heads)
        return AttentionInputs(
            per_head(query, heads), per_head(key, heads), per_head(value, heads), mask, scale
        )


def precise(tensor: Tensor) -> Tensor:
    """Return the tensor in fp32 at least, whatever the model runs in; a boolean one unchanged."""
    if tensor.dtype in (torch.bool, torch.float32, torch.float64):
        return tensor
    return tensor.float()


def per_head(tensor: Tensor, heads: int = 1) -> Shaped[Tensor, "batch heads query any"]:
    """Return any library's (.., heads, query, x) as four axes.

    More axes are merged; of three, (batch x heads) is split.
    """
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() != 3:
        return tensor.flatten(0, tensor.dim() - 4)
    if heads and len(tensor) % heads == 0:
        split: Tensor = tensor.unflatten(0, (-1, heads))
        return split
    return tensor.unsqueeze(1)


def row_by_row(weights: Weights, windows: Windows | None) -> Placed:
    """Return weights, or their gradient, with the queries and keys of each window row by row.

    A query that was pooled from several patches stands for each of them: its row is repeated.
    """
    if windows is None or not windows.keys:
        return weights
    queries = torch.tensor(windows.queries, device=weights.device)
    keys = torch.tensor(windows.keys, device=weights.device)
    return weights[..., queries, :][..., keys]


def window_index(windows: Windows) -> Int[Tensor, "count inside"]:
    """Return the index of the patch (row by row) at each position (row by row) of each window.

    Returns -1 for padding.
    """
    rows, columns = windows.resolution
    height, width = windows.window
    if windows.dilated:
        grid = torch.arange(rows * columns).view(height, rows // height, width, columns // width)
        return grid.permute(1, 3, 0, 2).reshape(-1, height * width)
    down = -rows % height
    across = -columns % width
    shift_down, shift_across = windows.shift
    # no shift where one window covers the whole map
    if height >= rows + down:
        shift_down = 0
    if width >= columns + across:
        shift_across = 0
    index = torch.arange(rows * columns).view(rows, columns)
    padding = (0, across, 0, down)
    shifts = (-shift_down, -shift_across)
    if windows.pad_first:
        index = F.pad(index, padding, value=-1).roll(shifts, (0, 1))
    else:
        index = F.pad(index.roll(shifts, (0, 1)), padding, value=-1)
    # of shape (down, across, height, width)
    blocks = index.unfold(0, height, height).unfold(1, width, width)
    return blocks.reshape(-1, height * width)


def received(
    weights: Float[Tensor, "calls heads inside inside"], windows: Windows
) -> Float[Tensor, "batch heads rows columns"]:
    """Return the attention that each patch receives, mean over the query patches of its window, in
    image coordinates.

    weights: row by row. All patches of the window count, masked or not: uniform attention then
    gives a uniform map, also where a shifted window is cut into parts.
    """
    index = window_index(windows).to(weights.device)
    count = len(index)
    patches = windows.resolution[0] * windows.resolution[1]
    queries = (index >= 0).to(weights.dtype)  # padding is not a query
    # of shape (batch, heads, count, inside, inside)
    split = weights.unflatten(0, (-1, count)).transpose(1, 2)
    mean = torch.einsum("bhcqk,cq->bhck", split, queries) / queries.sum(-1, keepdim=True)
    place = index.masked_fill(index < 0, patches).flatten()
    full = weights.new_zeros(*mean.shape[:2], patches + 1)
    full[:, :, place] = mean.flatten(2)
    maps: Tensor = full[:, :, :patches].unflatten(-1, windows.resolution)
    return maps
