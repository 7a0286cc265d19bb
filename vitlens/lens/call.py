"""The inputs and outputs of one attention layer, its weights on request, and its windows.

An `AttentionCall` is what readers of attention receive. `FusedArguments` are the arguments of
torch's kernel, from which its inputs are read. The functions at the end put windows and their
weights in the order of the image.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from vitlens.lens.site import Site, Windows
from vitlens.models.attention import softmax_or_zero as softmax_or_zero  # re-exported
from vitlens.renamed import RenamedAttribute
from vitlens.shapes import Weights

# timm and torchvision add -100 to the score of a masked key, not -inf
MASKED: Final = 1e-20  # weight up to which a key is masked
MASKED_SCORE: Final = -50.0  # added to a score up to which its key is masked
Stage = Literal["queries", "keys", "values", "scores", "weights"]
Rows = Sequence[int] | slice
Placed = Float[Tensor, "batch heads _ key"]
# most weights of one part: 2 MiB in fp32 fit the cache of a CPU core; a GPU takes 256 MiB, because
# it would wait for the kernel launches of many small parts
_MOST_WEIGHTS = {"cpu": 1 << 19, "other": 1 << 26}
# stages of attention -> fields of `AttentionInputs`
INPUTS: Final[Mapping[Stage, str]] = {"queries": "query", "keys": "key", "values": "value"}


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of scaled dot-product attention, as the model computed them.

    Norms of queries and keys and rotary embeddings are already applied.

    query, key, value: tensors of shape (batch, heads, tokens, head_dim).
    bias: a mask that broadcasts to (batch, heads, query, key), or None. It is additive, or boolean
        with True for keys that take part.
    scale: the factor of the products of queries and keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    scale: float

    each = RenamedAttribute("map_tensors")

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "AttentionInputs":
        """Return the inputs with the function applied to each tensor."""
        return AttentionInputs(
            query=function(self.query),
            key=function(self.key),
            value=function(self.value),
            bias=None if self.bias is None else function(self.bias),
            scale=self.scale,
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

    A batch of the call has images x windows elements.

    site: the place of the call in the model.
    images: the number of images in the call.
    inputs: queries, keys and values, or None if the model did not use scaled dot-product attention.
    computed: the weights, if the model computed them itself or gradients were requested; else None.
    output: the output of each head before the output projection, or None if it was not observed.
    gradient: the gradient of some number with respect to `output`, or to `computed` if the model
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
        """Return the tensor of a stage, (batch, heads, ..), or None if the call does not have it.

        Scores and weights that fused attention does not compute are computed here.

        rows: the query rows to return, of scores and weights.
        scored: the scores, if the model's call computed them.
        """
        model_tensors = {"scores": scored, "weights": self.computed}
        stored = model_tensors.get(stage)
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
        """Return all weights, with the queries and keys of each window sorted row by row."""
        return row_by_row(self.weights(), self.site.windows)

    def rows(self, rows: Rows) -> Weights:
        """Return the weights of some query rows only.

        The cost is rows x keys instead of queries x keys.
        """
        weights = self.at("weights", rows)
        assert weights is not None  # a call has inputs or weights
        return weights

    def weight_gradient(self) -> Weights | None:
        """Return the gradient with respect to all weights (batch, heads, query, key), or None."""
        if self.gradient is None or self.inputs is None:
            return self.gradient
        # output = weights @ value, so that the gradient of the weights is gradient @ valueᵀ
        return self.gradient.to(self.inputs.value) @ self.inputs.value.transpose(-2, -1)

    def parts(self) -> Iterator[tuple[slice, "AttentionCall"]]:
        """Yield the call in parts of a few images, with the slice of the images in each part.

        The weights of a part fit the processor's cache.
        """
        held = self._held
        windows = len(held) // self.images
        weights_per_image = windows * self.site.heads * self.site.queries * self.site.keys
        device = "cpu" if held.device.type == "cpu" else "other"
        step = max(1, _MOST_WEIGHTS[device] // weights_per_image)
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
        """Return the call of some of the images; a tensor's first axis is images x windows."""
        calls = len(self._held)  # the windows of an image follow each other
        windows = calls // self.images
        calls_of_images = slice(images.start * windows, images.stop * windows)

        def select(tensor: Tensor) -> Tensor:
            if tensor.dim() == 4 and len(tensor) == calls:
                return tensor[calls_of_images]
            return tensor  # a bias that is broadcast

        return self._map_tensors(select, images.stop - images.start)

    def _map_tensors(self, function: Callable[[Tensor], Tensor], images: int) -> "AttentionCall":
        def apply(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        inputs = None
        if self.inputs is not None:
            inputs = self.inputs.map_tensors(function)
        return AttentionCall(
            self.site,
            images,
            inputs=inputs,
            computed=apply(self.computed),
            output=apply(self.output),
            gradient=apply(self.gradient),
        )


@dataclass(frozen=True)
class FusedArguments:
    """The arguments of F.scaled_dot_product_attention.

    query, key, value: tensors of shape (.., tokens, head_dim).
    mask: a boolean or additive mask, or None.
    dropout: the share of the weights that are set to zero.
    causal: whether a query attends only to keys up to its position.
    scale: the factor of the scores; None means 1/√head_dim.
    grouped: whether several query heads share a key head.
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
        """Return the inputs of attention with four axes each.

        heads: the number of heads of the module.
        """
        query = self.query
        key = self.key
        value = self.value
        mask = self.mask
        if self.causal:
            mask = torch.ones(
                query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
            ).tril()
        if self.grouped:  # repeat each key head for its query heads
            query_heads = query.shape[-3]
            key = key.repeat_interleave(query_heads // key.shape[-3], -3)
            value = value.repeat_interleave(query_heads // value.shape[-3], -3)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        # the mask may keep its shape if it broadcasts to the query's four axes; else its axes are
        # merged like those of the query
        if mask is not None and (query.dim() != 4 or mask.dim() > 4):
            mask = per_head(mask.expand(*query.shape[:-1], key.shape[-2]), heads)
        return AttentionInputs(
            query=per_head(query, heads),
            key=per_head(key, heads),
            value=per_head(value, heads),
            bias=mask,
            scale=scale,
        )


def precise(tensor: Tensor) -> Tensor:
    """Return the tensor in fp32 at least, whatever the model runs in; a boolean one unchanged."""
    if tensor.dtype in (torch.bool, torch.float32, torch.float64):
        return tensor
    return tensor.float()


def per_head(tensor: Tensor, heads: int = 1) -> Shaped[Tensor, "batch heads query any"]:
    """Return any library's (.., heads, query, any) as four axes.

    If there are more than four axes, the leading ones are merged. If there are three, the first
    is batch x heads and is split. If `heads` does not divide it, it is the batch of a single head.
    """
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() != 3:
        return tensor.flatten(0, tensor.dim() - 4)
    if heads and len(tensor) % heads == 0:
        split: Tensor = tensor.unflatten(0, (-1, heads))
        return split
    return tensor.unsqueeze(1)  # a single head without an axis


def row_by_row(weights: Weights, windows: Windows | None) -> Placed:
    """Return weights, or their gradient, with the queries and keys of each window row by row.

    A query that was pooled from several patches stands for each of them: its row is repeated.
    """
    if windows is None or not windows.keys:
        return weights
    query_at_place = torch.tensor(windows.queries, device=weights.device)
    key_at_place = torch.tensor(windows.keys, device=weights.device)
    return weights[..., query_at_place, :][..., key_at_place]


def window_index(windows: Windows) -> Int[Tensor, "count inside"]:
    """Return the index of the patch (row by row) at each position (row by row) of each window.

    Positions of padding have the index -1.
    """
    rows, columns = windows.resolution
    height, width = windows.window
    if windows.dilated:
        # window (i, j) has every (rows // height)-th row from i on, and every
        # (columns // width)-th column from j on
        grid = torch.arange(rows * columns).view(height, rows // height, width, columns // width)
        by_window = grid.permute(1, 3, 0, 2)  # (windows down, windows across, height, width)
        return by_window.reshape(-1, height * width)
    rows_of_padding = -rows % height
    columns_of_padding = -columns % width
    shift_down, shift_across = windows.shift
    # Swin does not shift an axis on which one window covers the whole map
    if height >= rows + rows_of_padding:
        shift_down = 0
    if width >= columns + columns_of_padding:
        shift_across = 0
    index = torch.arange(rows * columns).view(rows, columns)
    padding = (0, columns_of_padding, 0, rows_of_padding)  # left, right, top, bottom
    shifts = (-shift_down, -shift_across)
    if windows.pad_first:  # torchvision shifts the padded map; timm pads the shifted map
        index = F.pad(index, padding, value=-1).roll(shifts, (0, 1))
    else:
        index = F.pad(index.roll(shifts, (0, 1)), padding, value=-1)
    # (windows down, windows across, height, width)
    by_window = index.unfold(0, height, height).unfold(1, width, width)
    return by_window.reshape(-1, height * width)


def received(
    weights: Float[Tensor, "calls heads inside inside"], windows: Windows
) -> Float[Tensor, "batch heads rows columns"]:
    """Return the attention that each patch receives, in image coordinates.

    It is the mean over the query patches of the patch's window.

    weights: with the queries and keys of each window row by row. All patches of the window count,
    masked or not: uniform attention then gives a uniform map, even if a shifted window is cut into
    parts.
    """
    index = window_index(windows).to(weights.device)  # (windows, inside)
    count = len(index)
    patches = windows.resolution[0] * windows.resolution[1]
    is_query = (index >= 0).to(weights.dtype)  # padding is not a query
    # of shape (batch, heads, windows, query, key)
    by_window = weights.unflatten(0, (-1, count)).transpose(1, 2)
    # b: batch, h: heads, c: windows, q: queries, k: keys
    sums = torch.einsum("bhcqk,cq->bhck", by_window, is_query)
    means = sums / is_query.sum(-1, keepdim=True)  # (batch, heads, windows, key)
    # each key of a window is one patch of the map; padding goes to an additional, last place
    place = index.masked_fill(index < 0, patches).flatten()
    batch, heads = means.shape[:2]
    with_padding = weights.new_zeros(batch, heads, patches + 1)
    with_padding[:, :, place] = means.flatten(2)
    maps: Tensor = with_padding[:, :, :patches].unflatten(-1, windows.resolution)
    return maps
