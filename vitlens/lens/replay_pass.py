"""One replayed forward: the model's own, with what comes before a layer skipped and that layer's inputs put in."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.lens.changes import Change, head_columns, other_images, substitute
from vitlens.lens.first_rows import first_rows
from vitlens.lens.inside import overridden, projection_of
from vitlens.lens.intervened import in_force
from vitlens.lens.intervention import HeadReplaced, KnockedOut, StreamPatched
from vitlens.lens.layers import Layer, arguments, called, layers
from vitlens.lens.recording import Record
from vitlens.lens.replay_plan import Plan
from vitlens.models.model import Model


@dataclass(frozen=True)
class Method:
    """How a model is replayed: its plan; rows: tokens computed in the last block (None: all); exact: whether it is
    replayed at all; note: why not, or why the last block is run whole where it looked as if it need not."""

    plan: Plan
    rows: int | None
    exact: bool = True
    note: str = ""


@dataclass(frozen=True, order=True)
class Kind:
    """What interventions that are run in one batch have in common: the layer they begin at; attention: whether its
    attention is run again; whole: whether all images must be in one forward, as one's result depends on another's."""

    start: int
    attention: bool
    whole: bool


@dataclass(frozen=True)
class Pass:
    """One forward: its kind, the changes, their copies of the images, which of the images, and how many there are."""

    kind: Kind
    changes: tuple[Change, ...]
    copies: int
    part: slice
    images: int


def kind_of(method: Method, changes: Sequence[Change]) -> Kind:
    """The kind of pass that some simultaneous changes need."""
    start = min(change.what.layer for change in changes)
    first = [change.what for change in changes if change.what.layer == start]
    attention = any(isinstance(what, KnockedOut | StreamPatched) for what in first)
    attention = attention or not method.plan.starts[start].branch
    mixing = [change.what.layer for change in changes if getattr(change.what, "by", "") == "resample"]
    # the heads of the first layer are known for all images
    return Kind(start, attention, whole=any(layer > start or attention for layer in mixing))


def replay_pass(model: Model, method: Method, record: Record, what: Pass) -> Float[Tensor, "copies part classes"]:
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
            stack.enter_context(overridden(attention, _puts_out(output)))
            changes = [each for each in changes if each not in here]
        stack.enter_context(in_force(model, changes, copies=what.copies))
        stack.enter_context(_started(model, method.plan, layer, record, what))
        height, width = model.input_size
        nothing = model.mean.new_zeros(1, 3, 1, 1).expand(what.copies * count, 3, height, width)
        logits: Tensor = model.module(nothing)
    by_copy: Tensor = logits.unflatten(0, (what.copies, -1))
    return by_copy


def _puts_out(output: Any) -> Callable[..., Any]:
    return lambda _forward: lambda *_args, **_kwargs: output


def _branch(model: Model, layer: Layer, record: Record, changes: Sequence[Change], what: Pass, rows: int | None) -> Any:
    """What attention of the first layer puts out: as it was, and what the replaced heads add to it."""
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
def _started(model: Model, plan: Plan, layer: Layer, record: Record, what: Pass) -> Iterator[None]:
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
            nothing = model.mean.new_zeros(()).expand(shape[0] * count, *shape[1:])
            stack.enter_context(overridden(model.module.get_submodule(name), _puts_out(nothing)))
        yield


def _given(values: dict[Any, Any]) -> Callable[..., Any]:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def put_in(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = called({**arguments(args, kwargs), **values})
            return forward(*args, **kwargs)

        return put_in

    return wrap


def _stacked(tensor: Tensor, what: Pass) -> Tensor:
    calls = len(tensor) // what.images
    part = tensor[what.part.start * calls : what.part.stop * calls]
    return part if what.copies == 1 else part.repeat(what.copies, *[1] * (part.dim() - 1))
