"""One replayed forward: the model's own, with what comes before a layer skipped and that layer's inputs put in.

Where the classifier reads a few tokens alone, the last block computes no others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.lens.hooks import Arguments, Forward, arguments, as_call, overridden, projection_of
from vitlens.lens.intervene import head_columns, in_force, other_images, substitute
from vitlens.lens.interventions import HeadReplaced, KnockedOut, PreparedIntervention, StreamPatched
from vitlens.lens.layers import Layer, layers
from vitlens.lens.replay_plan import ReplayPlan, ReplayRecord
from vitlens.models.anatomy import heads_of
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model
from vitlens.models.vit import TransformerBlock
from vitlens.shapes import Tokens

FirstTokens = Float[Tensor, "batch rows dim"]
_TIMM_BLOCK = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
_TIMM_ATTENTION = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}


@dataclass(frozen=True)
class ReplayMethod:
    """How a model is replayed.

    rows: tokens computed in the last block (None: all); exact: whether it is replayed at all; note: why not, or why all
    tokens of the last block are computed where the classifier reads fewer.
    """

    plan: ReplayPlan
    rows: int | None
    exact: bool = True
    note: str = ""


@dataclass(frozen=True, order=True)
class PassKind:
    """What interventions that are run in one batch have in common.

    start: the first layer that is run; attention: whether its attention is run again; whole: whether all images must be
    in one forward, as one's result depends on another's.
    """

    start: int
    attention: bool
    whole: bool


@dataclass(frozen=True)
class Pass:
    """One replayed forward.

    copies: how often the images stand in the batch, each copy with its own changes; part: which of the images; images:
    how many there are.
    """

    kind: PassKind
    changes: tuple[PreparedIntervention, ...]
    copies: int
    part: slice
    images: int


def kind_of(method: ReplayMethod, changes: Sequence[PreparedIntervention]) -> PassKind:
    """The kind of pass that some simultaneous changes need."""
    start = min(change.what.layer for change in changes)
    first = [change.what for change in changes if change.what.layer == start]
    attention = any(isinstance(what, KnockedOut | StreamPatched) for what in first)
    attention = attention or not method.plan.starts[start].branch
    mixing = [change.what.layer for change in changes if getattr(change.what, "by", "") == "resample"]
    # the heads of the first layer are known for all images
    return PassKind(start, attention, whole=any(layer > start or attention for layer in mixing))


def replay_pass(
    model: Model, method: ReplayMethod, record: ReplayRecord, what: Pass
) -> Float[Tensor, "copies part classes"]:
    """The logits of each copy of the images under its changes."""
    known = layers(model)
    layer, last = known[what.kind.start], known[-1]
    count = what.part.stop - what.part.start
    changes = [change.of_images(what.part) for change in what.changes]
    rows = method.rows
    if rows is not None:
        changes = [change.of_rows(rows) if change.what.layer == last.index else change for change in changes]
    here = [each for each in changes if each.what.layer == layer.index and isinstance(each.what, HeadReplaced)]
    with ExitStack() as stack:
        if rows is not None:
            stack.enter_context(first_rows(model, rows))
        if not what.kind.attention:
            own_rows = rows if layer.index == last.index else None
            output = _branch(model, layer, record, here, what, own_rows)
            attention = model.module.get_submodule(layer.attention)
            stack.enter_context(overridden(attention, _returning(output)))
            changes = [each for each in changes if each not in here]
        stack.enter_context(in_force(model, changes, copies=what.copies))
        stack.enter_context(_started(model, method.plan, layer, record, what))
        height, width = model.input_size
        blank = model.mean.new_zeros(1, 3, 1, 1).expand(what.copies * count, 3, height, width)  # read by no layer
        logits: Tensor = model.module(blank)
    by_copy: Tensor = logits.unflatten(0, (what.copies, -1))
    return by_copy


def _returning(output: Any) -> Callable[[Forward], Forward]:
    return lambda _forward: lambda *_args, **_kwargs: output


def _branch(
    model: Model,
    layer: Layer,
    record: ReplayRecord,
    changes: Sequence[PreparedIntervention],
    what: Pass,
    rows: int | None,
) -> Any:
    """The output of the first layer's attention: that of the clean pass, plus what the replaced heads add to it."""
    projection = projection_of(model.module.get_submodule(layer.attention))
    assert record.branch is not None  # all three are there where the plan says that attention need not run
    assert record.heads is not None
    assert projection is not None
    calls = slice(what.part.start * layer.windows, what.part.stop * layer.windows)
    branch = record.branch[calls][:, :rows]
    every = record.heads.unflatten(0, (-1, layer.windows)).flatten(1, 2)[:, :rows]  # (batch, tokens, heads x head_dim)
    heads = every[what.part]
    made = []
    for copy in range(what.copies):
        own = [change for change in changes if change.copy == copy]
        if not own:
            made.append(branch)
            continue
        columns = [head_columns(layer, change.what) for change in own]
        instead = [
            every[..., at][other_images(change, what.images)[what.part].to(every.device)]  # also of another part
            if getattr(change.what, "by", "") == "resample"
            else substitute(change, heads[..., at])
            for change, at in zip(own, columns)
        ]
        difference = [new - heads[..., at] for new, at in zip(instead, columns)]
        weight = torch.cat([projection.weight[:, at] for at in columns], dim=1)
        added = F.linear(torch.cat(difference, dim=-1), weight)  # (part, tokens, dim)
        made.append(branch + added.view_as(branch))
    output = made[0] if len(made) == 1 else torch.cat(made)
    return output if record.rest is None else (output, *record.rest)


@contextmanager
def _started(model: Model, plan: ReplayPlan, layer: Layer, record: ReplayRecord, what: Pass) -> Iterator[None]:
    start = plan.starts[layer.index]
    own = {key: _stacked(record.arguments[key], what) for key in start.batched}
    later: dict[str, dict[Any, Tensor]] = {layer.unit: own}
    for index, there, here in start.carried:
        later.setdefault(layers(model)[index].unit, {})[there] = own[here]
    count = what.copies * (what.part.stop - what.part.start)
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


def _stacked(tensor: Tensor, what: Pass) -> Tensor:
    calls = len(tensor) // what.images
    part = tensor[what.part.start * calls : what.part.stop * calls]
    return part if what.copies == 1 else part.repeat(what.copies, *[1] * (part.dim() - 1))


def rows_read(model: Model) -> int | None:
    """How many tokens, from the first, the classifier reads of the last block; None: all, or an unknown block."""
    layout, last = model.anatomy.layout, layers(model)[-1]
    if layout is None or not _known(model.module.get_submodule(last.unit)):
        return None
    if model.anatomy.readout == "cls" and layout.positions("cls") == (0,):
        return 1
    both = layout.positions("cls") + layout.positions("distillation")
    return 2 if model.anatomy.readout == "cls+distillation" and both == (0, 1) else None


def _known(block: nn.Module) -> bool:
    """Our block, or one made like timm's: x + ls1(attn(norm1(x))), then x + ls2(mlp(norm2(x)))."""
    if isinstance(block, TransformerBlock):
        return block.residual and isinstance(block.attn, MultiHeadSelfAttention) and block.mlp is not None
    names = {name for name, _ in block.named_children()}
    attention = getattr(block, "attn", None)
    if names != _TIMM_BLOCK or not isinstance(attention, nn.Module):
        return False
    inner = {name for name, _ in attention.named_children()}
    plain = isinstance(getattr(attention, "norm", None), nn.Identity | None)
    return inner <= _TIMM_ATTENTION and {"qkv", "proj"} <= inner and plain


@contextmanager
def first_rows(model: Model, rows: int) -> Iterator[None]:
    """The last block computes its first tokens alone, (batch, rows, dim): keys and values of all, the rest of these."""
    last = layers(model)[-1]
    block, attention = (model.module.get_submodule(name) for name in (last.unit, last.attention))
    with ExitStack() as stack:
        stack.enter_context(overridden(block, lambda _forward: _block(block, rows)))
        stack.enter_context(overridden(attention, lambda _forward: _attention(attention, rows)))
        yield


def _block(block: nn.Module, rows: int) -> Callable[..., FirstTokens]:
    first, second = (getattr(block, name, nn.Identity()) for name in ("ls1", "ls2"))  # no drop path in evaluation

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        few = tokens[:, :rows]
        few = few + first(block.attn(block.norm1(tokens)))  # type: ignore[operator]
        result: Tensor = few + second(block.mlp(block.norm2(few)))  # type: ignore[operator]
        return result

    return forward


def _attention(attention: Any, rows: int) -> Callable[..., FirstTokens]:
    heads, width = heads_of(attention), attention.qkv.out_features // 3
    weight, bias = attention.qkv.weight, attention.qkv.bias
    biases = (None, None) if bias is None else (bias[:width], bias[width:])
    norms = [getattr(attention, name, nn.Identity()) for name in ("q_norm", "k_norm")]

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        query = F.linear(tokens[:, :rows], weight[:width], biases[0]).unflatten(-1, (heads, -1)).transpose(1, 2)
        both = F.linear(tokens, weight[width:], biases[1]).unflatten(-1, (2, heads, -1))
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, head_dim)
        read = F.scaled_dot_product_attention(norms[0](query), norms[1](key), value)
        result: Tensor = attention.proj(read.transpose(1, 2).flatten(2))  # (batch, rows, dim)
        return result

    return forward
