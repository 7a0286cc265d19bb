"""One replayed forward: the model's own, which skips the modules before a layer and gives that layer its kept inputs.

Where the classifier reads a few tokens alone, the last block computes only these.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.lens.attention import attention_module
from vitlens.lens.intervene import head_columns, in_force, other_images, substitute
from vitlens.lens.interventions import HeadReplaced, KnockedOut, PreparedIntervention, StreamPatched
from vitlens.lens.layers import Layer, layers
from vitlens.lens.replay_plan import ReplayPlan, ReplayRecord
from vitlens.models.anatomy import heads_of, is_known_block
from vitlens.models.hooks import Arguments, Forward, arguments, as_call, overridden
from vitlens.models.model import Model
from vitlens.shapes import Tokens

FirstTokens = Float[Tensor, "batch rows dim"]


@dataclass(frozen=True)
class ReplayMethod:
    """How a model is replayed.

    rows: tokens computed in the last block (None: all); exact: whether replaying gives the model's logits; note: why it
    does not, or why all tokens of the last block are computed where the classifier reads fewer.
    """

    plan: ReplayPlan
    rows: int | None
    exact: bool = True
    note: str = ""


@dataclass(frozen=True, order=True)
class PassKind:
    """The settings that interventions in one batch share.

    start: the first layer that is run; attention: whether its attention is run again; whole: whether all images must be
    in one forward, as their results depend on each other.
    """

    start: int
    attention: bool
    whole: bool


@dataclass(frozen=True)
class ReplayBatch:
    """One replayed forward.

    copies: how many copies of the images the batch holds, each with its own changes; part: the images of this forward;
    images: the number of all images.
    """

    kind: PassKind
    changes: tuple[PreparedIntervention, ...]
    copies: int
    part: slice
    images: int


def kind_of(method: ReplayMethod, changes: Sequence[PreparedIntervention]) -> PassKind:
    """The kind of pass that some simultaneous changes need."""
    start = min(change.intervention.layer for change in changes)
    first = [change.intervention for change in changes if change.intervention.layer == start]
    attention = any(isinstance(intervention, KnockedOut | StreamPatched) for intervention in first)
    attention = attention or not method.plan.starts[start].branch
    mixing = [change.intervention.layer for change in changes if getattr(change.intervention, "by", "") == "resample"]
    # outputs of the first layer's heads are kept for all images
    return PassKind(start, attention, whole=any(layer > start or attention for layer in mixing))


def replay_pass(
    model: Model, method: ReplayMethod, record: ReplayRecord, batch: ReplayBatch
) -> Float[Tensor, "copies part classes"]:
    """The logits of each copy of the images under its changes."""
    known = layers(model)
    layer, last = known[batch.kind.start], known[-1]
    count = batch.part.stop - batch.part.start
    changes = [change.of_images(batch.part) for change in batch.changes]
    rows = method.rows
    if rows is not None:
        changes = [change.of_rows(rows) if change.intervention.layer == last.index else change for change in changes]
    of_layer = [change for change in changes if change.intervention.layer == layer.index]
    replaced_heads = [change for change in of_layer if isinstance(change.intervention, HeadReplaced)]
    with ExitStack() as stack:
        if rows is not None:
            stack.enter_context(first_rows(model, rows))
        if not batch.kind.attention:
            own_rows = rows if layer.index == last.index else None
            output = _branch(model, layer, record, replaced_heads, batch, own_rows)
            attention = model.module.get_submodule(layer.attention)
            stack.enter_context(overridden(attention, _returning(output)))
            changes = [change for change in changes if change not in replaced_heads]
        stack.enter_context(in_force(model, changes, copies=batch.copies))
        stack.enter_context(_started(model, method.plan, layer, record, batch))
        height, width = model.input_size
        blank = model.mean.new_zeros(1, 3, 1, 1).expand(batch.copies * count, 3, height, width)  # not read by any layer
        logits = model.run(blank)
    by_copy: Tensor = logits.unflatten(0, (batch.copies, -1))
    return by_copy


def _returning(output: Any) -> Callable[[Forward], Forward]:
    return lambda _forward: lambda *_args, **_kwargs: output


def _branch(
    model: Model,
    layer: Layer,
    record: ReplayRecord,
    changes: Sequence[PreparedIntervention],
    batch: ReplayBatch,
    rows: int | None,
) -> Any:
    """The output of the first layer's attention: the clean one plus the contribution of the replaced heads."""
    projection = attention_module(model, layer.attention).projection
    assert record.branch is not None  # the plan skips attention only where these are known
    assert record.heads is not None
    assert projection is not None
    calls = slice(batch.part.start * layer.windows, batch.part.stop * layer.windows)
    branch = record.branch[calls][:, :rows]
    every = record.heads.unflatten(0, (-1, layer.windows)).flatten(1, 2)[:, :rows]  # (batch, tokens, heads x head_dim)
    heads = every[batch.part]
    branches = []
    for copy in range(batch.copies):
        of_copy = [change for change in changes if change.copy == copy]
        if not of_copy:
            branches.append(branch)
            continue
        columns = [head_columns(layer, change.intervention) for change in of_copy]
        instead = [
            every[..., at][other_images(change, batch.images)[batch.part].to(every.device)]  # also of another part
            if getattr(change.intervention, "by", "") == "resample"
            else substitute(change, heads[..., at])
            for change, at in zip(of_copy, columns)
        ]
        difference = [new - heads[..., at] for new, at in zip(instead, columns)]
        weight = torch.cat([projection.weight[:, at] for at in columns], dim=1)
        added = F.linear(torch.cat(difference, dim=-1), weight)  # (part, tokens, dim)
        branches.append(branch + added.view_as(branch))
    output = branches[0] if len(branches) == 1 else torch.cat(branches)
    return output if record.rest is None else (output, *record.rest)


@contextmanager
def _started(model: Model, plan: ReplayPlan, layer: Layer, record: ReplayRecord, batch: ReplayBatch) -> Iterator[None]:
    start = plan.starts[layer.index]
    own_arguments = {key: _stacked(record.arguments[key], batch) for key in start.batched}
    later: dict[str, dict[Any, Tensor]] = {layer.unit: own_arguments}
    for index, there, here in start.carried:
        later.setdefault(layers(model)[index].unit, {})[there] = own_arguments[here]
    count = batch.copies * (batch.part.stop - batch.part.start)
    with ExitStack() as stack:
        for unit, values in later.items():
            fixed = record.arguments if unit == layer.unit else {}
            stack.enter_context(overridden(model.module.get_submodule(unit), _given({**fixed, **values})))
        for name, shape in start.skipped:
            blank = model.mean.new_zeros(()).expand(shape[0] * count, *shape[1:])
            stack.enter_context(overridden(model.module.get_submodule(name), _returning(blank)))
        yield


def _given(values: Arguments) -> Callable[[Forward], Forward]:
    def wrap(forward: Forward) -> Forward:
        def with_values(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = as_call({**arguments(args, kwargs), **values})
            return forward(*args, **kwargs)

        return with_values

    return wrap


def _stacked(tensor: Tensor, batch: ReplayBatch) -> Tensor:
    calls = len(tensor) // batch.images
    part = tensor[batch.part.start * calls : batch.part.stop * calls]
    return part if batch.copies == 1 else part.repeat(batch.copies, *[1] * (part.dim() - 1))


def rows_read(model: Model) -> int | None:
    """How many of the first tokens the classifier reads from the last block; None: all, or a block of unknown form."""
    layout, last = model.anatomy.layout, layers(model)[-1]
    if layout is None or not is_known_block(model.module.get_submodule(last.unit)):
        return None
    if model.anatomy.readout == "cls" and layout.positions("cls") == (0,):
        return 1
    read_positions = layout.positions("cls") + layout.positions("distillation")
    return 2 if model.anatomy.readout == "cls+distillation" and read_positions == (0, 1) else None


@contextmanager
def first_rows(model: Model, rows: int) -> Iterator[None]:
    """Inside, the last block computes its first tokens alone, (batch, rows, dim), from the keys and values of all."""
    last = layers(model)[-1]
    block, attention = (model.module.get_submodule(name) for name in (last.unit, last.attention))
    with ExitStack() as stack:
        stack.enter_context(overridden(block, lambda _forward: _block(block, rows)))
        stack.enter_context(overridden(attention, lambda _forward: _attention(attention, rows)))
        yield


def _block(block: nn.Module, rows: int) -> Callable[..., FirstTokens]:
    first, second = (getattr(block, name, nn.Identity()) for name in ("ls1", "ls2"))  # no drop path in evaluation

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        kept_tokens = tokens[:, :rows]
        kept_tokens = kept_tokens + first(block.attn(block.norm1(tokens)))  # type: ignore[operator]
        result: Tensor = kept_tokens + second(block.mlp(block.norm2(kept_tokens)))  # type: ignore[operator]
        return result

    return forward


def _attention(attention: Any, rows: int) -> Callable[..., FirstTokens]:
    heads, width = heads_of(attention), attention.qkv.out_features // 3
    weight, bias = attention.qkv.weight, attention.qkv.bias
    biases = (None, None) if bias is None else (bias[:width], bias[width:])
    norms = [getattr(attention, name, nn.Identity()) for name in ("q_norm", "k_norm")]

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        query = F.linear(tokens[:, :rows], weight[:width], biases[0]).unflatten(-1, (heads, -1)).transpose(1, 2)
        keys_and_values = F.linear(tokens, weight[width:], biases[1]).unflatten(-1, (2, heads, -1))
        key, value = keys_and_values.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, head_dim)
        read = F.scaled_dot_product_attention(norms[0](query), norms[1](key), value)
        result: Tensor = attention.proj(read.transpose(1, 2).flatten(2))  # (batch, rows, dim)
        return result

    return forward
