"""Replay a forward pass: skip the modules before a layer, and give the layer its recorded inputs.

`recording` keeps the inputs of layers in a clean pass, and `replay_pass` runs from them on. If the
classifier reads only a few tokens, the last block computes only these. Both replace forwards by
wrappers: functions that take a module's forward and return the new one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.lens.attention import is_tapped, projection_of, tapped
from vitlens.lens.change import PlaceChange, Set, in_force
from vitlens.lens.tap import Tap
from vitlens.lens.trace import Layer, block_at, blocks
from vitlens.models.anatomy import heads_of
from vitlens.models.hooks import (
    Arguments,
    Forward,
    Key,
    arguments,
    as_call,
    is_changed,
    overridden,
)
from vitlens.models.model import Model
from vitlens.models.recording import Shape
from vitlens.shapes import Tokens

FirstTokens = Float[Tensor, "batch rows dim"]


@dataclass
class ReplayRecord:
    """The tensors of one layer that are stored in a clean pass.

    arguments: the arguments of the layer's unit (its block), by position or name.
    branch: the output of its attention, before LayerScale.
    further_values: what the attention returns after `branch`, or None if it returns one tensor.
    heads: the input of the output projection, (calls, tokens, heads x head_dim).
    """

    arguments: Arguments = field(default_factory=dict)
    branch: Tensor | None = None
    further_values: tuple[Any, ...] | None = None
    heads: Tensor | None = None

    def take_unit(self, values: Arguments, _output: Any) -> None:
        """Keep the arguments of the layer's unit."""
        self.arguments = values

    def take_attention(self, _values: Arguments, output: Any) -> None:
        """Keep the output of the layer's attention."""
        if isinstance(output, tuple):
            self.branch = output[0]
            self.further_values = output[1:]
        else:
            self.branch = output
            self.further_values = None

    def take_heads(self, heads: Tensor) -> Tensor:
        """Keep the heads' outputs, and return them unchanged."""
        self.heads = heads
        return heads


class StopForward(Exception):  # noqa: N818  not an error
    """Stops the forward pass after the layer that is recorded."""


def _stop(_values: Arguments, _output: Any) -> None:
    raise StopForward


def _reporting(*readers: Callable[[Arguments, Any], None]) -> Callable[[Forward], Forward]:
    """Return a wrapper of a forward that calls the readers with its arguments and its output."""

    def wrap(forward: Forward) -> Forward:
        def reported(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            for read in readers:
                read(arguments(args, kwargs), output)
            return output

        return reported

    return wrap


@contextmanager
def recording(
    model: Model, indices: Sequence[int], *, stop: bool = False
) -> Iterator[dict[int, ReplayRecord]]:
    """Fill the records of some layers in a forward pass.

    stop: raise StopForward after the first of them.
    """
    records = {index: ReplayRecord() for index in indices}
    with ExitStack() as stack:
        for index, record in records.items():
            layer = block_at(model, index)
            unit = model.module.get_submodule(layer.unit)
            unit_readers: list[Callable[[Arguments, Any], None]] = [record.take_unit]
            if stop:
                unit_readers.append(_stop)
            if layer.attention:
                attention = model.module.get_submodule(layer.attention)
                stack.enter_context(
                    overridden(attention, _reporting(record.take_attention), equal=True)
                )
                stack.enter_context(
                    tapped(model, Tap((layer.attention,), joined=record.take_heads))
                )
            stack.enter_context(overridden(unit, _reporting(*unit_readers), equal=True))
        yield records


class CarriedArgument(NamedTuple):
    """An argument of the first unit that a later unit takes, too.

    key: the argument of the first unit.
    layer: the layer of the later unit.
    later_key: the argument of the later unit.
    """

    key: Key
    layer: int
    later_key: Key


@dataclass(frozen=True)
class ReplayStart:
    """The start of a forward pass at one layer.

    skipped: the modules with calls that end before the layer begins, and the shape of their output
        for one image.
    batched: the arguments of the layer's unit in which the first axis is the batch.
    carried: the arguments that are passed unchanged to a later unit.
    branch: whether the output of the attention is that of its projection, so that changes of heads
        can be added to it.
    bytes: the size of one image's record.
    """

    skipped: tuple[tuple[str, Shape], ...]
    batched: frozenset[Key]
    carried: tuple[CarriedArgument, ...]
    branch: bool
    bytes: int


@dataclass(frozen=True)
class ReplayMethod:
    """The method by which a model is replayed.

    starts: the starts by the number of the layer or block.
    largest: the bytes of the largest module output for one image.
    rows: the number of tokens computed in the last block; None means all.
    exact: whether replaying gives the logits of the model.
    note: why it does not, or why the last block computes all tokens although the classifier reads
        fewer.
    """

    starts: Mapping[int, ReplayStart]
    largest: int
    rows: int | None = None
    exact: bool = True
    note: str = ""

    def kind(self, changes: Set) -> "PassKind":
        """Return the kind of pass that some simultaneous changes need."""
        start = min(change.access.layer or 0 for change in changes)
        last_layer = max(self.starts)
        needs_attention = not self.starts[start].branch
        needs_all_images = False
        rows = self.rows
        for change in changes:
            is_before_output = change.access.part != "output"
            if change.access.layer == start and is_before_output and not change.is_linear:
                needs_attention = True
            if change.access.layer == last_layer and not _fits_first_rows(change):
                rows = None
            if change.function is not None:  # it may mix the images
                needs_all_images = True
        return PassKind(start, attention=needs_attention, whole=needs_all_images, rows=rows)


@dataclass(frozen=True)
class PassKind:
    """The settings that sets of changes in one batch share.

    start: the first layer that is run.
    attention: whether the attention of that layer is run again.
    whole: whether all images must be in one forward pass, because a function of a place may mix
        them.
    rows: the number of tokens computed in the last block; None means all.
    """

    start: int
    attention: bool
    whole: bool = False
    rows: int | None = None


def _fits_first_rows(change: PlaceChange) -> bool:
    """Return True if a change of the last block needs only the first tokens."""
    # the input still has all tokens; a removal and a knock-out act on those that are computed
    if change.removes or change.knocked is not None or change.access.part == "input":
        return True
    # a tensor for all tokens is cut to the first ones: see `PlaceChange.of_part`
    replaces_all_tokens = change.data is not None and change.access.tokens is None
    return replaces_all_tokens and change.access.place.kind in ("head", "heads", "mlp")


def replay_pass(
    model: Model,
    method: ReplayMethod,
    record: ReplayRecord,
    *,
    kind: PassKind,
    sets: Sequence[Set],
    part: slice,
    images: int,
) -> Float[Tensor, "sets part classes"]:
    """Return the logits of some of the images under each set of changes.

    The batch of the pass has a copy of these images for each set: (sets x images, ..).

    record: the clean pass's tensors of the first layer that runs.
    part: the slice of the images.
    images: the number of all images in the record.
    """
    first_layer = block_at(model, kind.start)
    last_layer = blocks(model)[-1]
    start = method.starts[first_layer.index]
    kind = _within_changes(model, kind)
    sets = _changes_of_part(sets, part, images, last_layer.index, kind.rows)
    batch_size = len(sets) * (part.stop - part.start)
    # The forward that is replaced last runs first. So a unit gets its recorded arguments, then
    # changes are made to them, and then its shortened forward runs: the reverse of the order below.
    with ExitStack() as stack:

        def replace_forward(name: str, wrap: Callable[[Forward], Forward]) -> None:
            stack.enter_context(overridden(model.module.get_submodule(name), wrap))

        if kind.rows is not None:
            block = model.module.get_submodule(last_layer.unit)
            attention = model.module.get_submodule(last_layer.attention)
            replace_forward(last_layer.unit, _first_of_block(block, kind.rows))
            replace_forward(last_layer.attention, _first_of_attention(attention, kind.rows))
        other_sets = sets  # the changes that are made in the pass
        if not kind.attention:  # replaced heads are added to the recorded output of attention
            head_sets, other_sets = _split_heads(sets, kind.start)
            rows = kind.rows if first_layer is last_layer else None
            output = _attention_output(model, first_layer, record, head_sets, part, rows)
            replace_forward(first_layer.attention, _returning(output))
        stack.enter_context(in_force(model, *other_sets))
        stored = _arguments_of_part(record, start, part, images, copies=len(sets))
        arguments_by_unit: dict[str, Arguments] = {first_layer.unit: stored}
        for carried in start.carried:
            later_unit = block_at(model, carried.layer).unit
            later_arguments = arguments_by_unit.setdefault(later_unit, {})
            later_arguments[carried.later_key] = stored[carried.key]
        for unit, values in arguments_by_unit.items():
            replace_forward(unit, _with_arguments(values))
        # modules before the layer return zeros, which nothing reads
        for name, (calls_per_image, *other_axes) in start.skipped:
            blank = model.mean.new_zeros(()).expand(calls_per_image * batch_size, *other_axes)
            replace_forward(name, _returning(blank))
        height, width = model.input_size
        blank_images = model.mean.new_zeros(1, 3, 1, 1).expand(batch_size, 3, height, width)
        logits = model.run(blank_images)
    by_set: Tensor = logits.unflatten(0, (len(sets), -1))
    return by_set


def _changes_of_part(
    sets: Sequence[Set], part: slice, images: int, last_layer: int, rows: int | None
) -> list[Set]:
    """Return the sets of changes on some of the images.

    rows: the number of tokens computed in the last layer; None means all.
    """
    sets_of_part: list[Set] = []
    for changes in sets:
        changes_of_part = []
        for change in changes:
            change_rows = rows if change.access.layer == last_layer else None
            changes_of_part.append(change.of_part(part, images, change_rows))
        sets_of_part.append(changes_of_part)
    return sets_of_part


def _split_heads(sets: Sequence[Set], start: int) -> tuple[list[Set], list[Set]]:
    """Split each set into the replaced heads of the first layer and all other changes."""
    head_sets: list[Set] = []
    other_sets: list[Set] = []
    for changes in sets:
        heads = [change for change in changes if change.is_linear and change.access.layer == start]
        head_sets.append(heads)
        other_sets.append([change for change in changes if change not in heads])
    return head_sets, other_sets


def _arguments_of_part(
    record: ReplayRecord, start: ReplayStart, part: slice, images: int, copies: int
) -> Arguments:
    """Return the recorded arguments of the first layer's unit for some of the images.

    copies: how often the images are repeated, once for each set.
    """
    stored = dict(record.arguments)
    for key in start.batched:
        calls_per_image = len(stored[key]) // images  # several in a layer with windows
        tensor = stored[key][part.start * calls_per_image : part.stop * calls_per_image]
        if copies > 1:
            other_axes = [1] * (tensor.dim() - 1)
            tensor = tensor.repeat(copies, *other_axes)
        stored[key] = tensor
    return stored


def _within_changes(model: Model, kind: PassKind) -> PassKind:
    """Return the kind of pass that enclosing changes and hooks need.

    A module that they change must run itself: it can neither be replaced by its recorded output nor
    compute only the first tokens.
    """
    last_layer = blocks(model)[-1]
    if kind.rows is not None:
        block = model.module.get_submodule(last_layer.unit)
        if is_changed(block) or is_tapped(model, last_layer.attention):
            kind = replace(kind, rows=None)
    if not kind.attention:
        first_attention = model.module.get_submodule(block_at(model, kind.start).attention)
        if is_changed(first_attention):
            kind = replace(kind, attention=True)
    return kind


def _returning(output: Any) -> Callable[[Forward], Forward]:
    """Return a wrapper of a forward that returns this output without running it."""

    def wrap(_forward: Forward) -> Forward:
        return lambda *_args, **_kwargs: output

    return wrap


def _with_arguments(values: Arguments) -> Callable[[Forward], Forward]:
    """Return a wrapper of a forward that runs it with some arguments replaced."""

    def wrap(forward: Forward) -> Forward:
        def with_values(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = as_call({**arguments(args, kwargs), **values})
            return forward(*args, **kwargs)

        return with_values

    return wrap


def _attention_output(
    model: Model,
    layer: Layer,
    record: ReplayRecord,
    sets: Sequence[Set],
    part: slice,
    rows: int | None,
) -> Any:
    """Return the output of the attention of the first layer under each set, one after the other.

    It is the clean output plus the contribution of the replaced heads.

    sets: the replaced heads of each set.
    rows: the number of first tokens that are computed; None means all.
    """
    projection = projection_of(model, layer.attention)
    assert record.branch is not None  # attention is run again unless all three are known
    assert record.heads is not None
    assert projection is not None
    calls = slice(part.start * layer.windows, part.stop * layer.windows)
    clean_output = record.branch[calls][:, :rows]  # (calls, tokens, dim)
    joined = record.heads[calls][:, :rows]  # (calls, tokens, heads x head_dim)
    outputs = []
    for changes in sets:
        replacements: dict[int, Tensor] = {}
        for change in changes:
            replacements.update(_by_head(change))
        if not replacements:
            outputs.append(clean_output)
            continue
        clean = changes[0].access.whole(joined)  # (images, .., heads, tokens, head_dim)
        differences = []
        columns = []
        for head, data in replacements.items():
            columns_of_head = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
            differences.append(data.to(clean) - clean[..., head, :, :])
            columns.append(projection.weight[:, columns_of_head])
        # one product for all replaced heads: (replacement - clean) W, with the heads' columns W
        added = F.linear(torch.cat(differences, dim=-1), torch.cat(columns, dim=1))
        outputs.append(clean_output + added.reshape(clean_output.shape))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if record.further_values is None:
        return output
    return (output, *record.further_values)


def _by_head(change: PlaceChange) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each replaced head, and the tensor that replaces it."""
    data = change.data
    heads = change.access.heads
    assert data is not None
    if change.access.head is not None:
        yield change.access.head, data
        return
    # a tensor of fewer axes is the same for all heads
    by_head = data.expand(torch.broadcast_shapes(data.shape, (heads, 1, 1)))
    for head in range(heads):
        yield head, by_head[..., head, :, :]


# The following forwards of the last block and its attention compute only the first tokens,
# (batch, rows, dim). Keys and values are those of all tokens.


def _first_of_block(block: Any, rows: int) -> Callable[[Forward], Forward]:
    """Return the forward of a known block, for its first tokens; see `is_known_block`."""
    # drop path does nothing in evaluation mode
    scale_attention = getattr(block, "ls1", nn.Identity())
    scale_mlp = getattr(block, "ls2", nn.Identity())

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        first_tokens = tokens[:, :rows] + scale_attention(block.attn(block.norm1(tokens)))
        result: Tensor = first_tokens + scale_mlp(block.mlp(block.norm2(first_tokens)))
        return result

    return lambda _forward: forward


def _first_of_attention(attention: Any, rows: int) -> Callable[[Forward], Forward]:
    """Return the forward of known attention, for its first tokens."""
    heads = heads_of(attention)
    width = attention.qkv.out_features // 3
    weight = attention.qkv.weight  # the rows of queries, then those of keys, then those of values
    bias = attention.qkv.bias
    query_bias = None if bias is None else bias[:width]
    key_value_bias = None if bias is None else bias[width:]
    query_norm = getattr(attention, "q_norm", nn.Identity())
    key_norm = getattr(attention, "k_norm", nn.Identity())

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        queries = F.linear(tokens[:, :rows], weight[:width], query_bias)
        query = queries.unflatten(-1, (heads, -1)).transpose(1, 2)  # (batch, heads, rows, head_dim)
        keys_and_values = F.linear(tokens, weight[width:], key_value_bias)
        # of shape (batch, tokens, 2, heads, head_dim)
        keys_and_values = keys_and_values.unflatten(-1, (2, heads, -1))
        # both of shape (batch, heads, tokens, head_dim)
        key, value = keys_and_values.permute(2, 0, 3, 1, 4).unbind(0)
        head_outputs = F.scaled_dot_product_attention(query_norm(query), key_norm(key), value)
        # of shape (batch, rows, dim)
        result: Tensor = attention.proj(head_outputs.transpose(1, 2).flatten(2))
        return result

    return lambda _forward: forward
