"""Runs of a kept clean pass under changes of places: by replay's own interventions, or from the layer that changes.

A set of changes that replay's interventions express (heads, MLPs, residual stream, knock-outs, removed blocks) is run
as one, with all that they save. Another set starts at the first layer that it changes, several sets in one batch: each
place's tensor is split into copies of the batch, and each copy has its own change.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.lens.attention import TensorFunction
from vitlens.lens.interventions import (
    BlockRemoved,
    HeadReplaced,
    Intervention,
    KnockedOut,
    MLPReplaced,
    StreamPatched,
)
from vitlens.lens.places.changes import PreparedChange
from vitlens.lens.places.intervene import in_force

if TYPE_CHECKING:
    from vitlens.lens.replay import Replay

Set = tuple[PreparedChange, ...]


def as_interventions(changes: Set, label: str) -> dict[Intervention, Tensor] | None:
    """The changes as replay's interventions with their tensors, or None where one of them is none of these.

    label: distinguishes the interventions of several sets.
    """
    found: dict[Intervention, Tensor] = {}
    for number, change in enumerate(changes):
        each = _as_interventions(change, f"{label}.{number}")
        if each is None:
            return None
        found.update(each)
    return found


def _as_interventions(change: PreparedChange, source: str) -> dict[Intervention, Tensor] | None:
    access, data = change.access, change.data
    if access.windows > 1 or access.tokens_first or access.layer is None:
        return None
    layer, kind = access.layer, access.place.kind
    if change.knocked is not None:
        heads, queries, keys = change.knocked
        return {KnockedOut(layer, queries, keys, heads): torch.zeros(())}
    if change.function is None:
        return {BlockRemoved(layer): torch.zeros(())}
    if data is None or len(access.place.axes) > (3 if kind == "heads" else 2):
        return None
    if data.dim() > len(access.place.axes) and len(data) == 1:
        data = data[0]  # of every image
    if kind == "input":
        return {StreamPatched(layer, access.tokens, source): data}
    if access.tokens is not None:
        return {StreamPatched(layer, access.tokens, source): data} if kind == "patches" else None
    if kind == "mlp":
        return {MLPReplaced(layer, "given", source): data}
    if kind == "head" and access.head is not None:
        return {HeadReplaced(layer, access.head, "given", source): data}
    if kind == "heads":
        each = data.expand(torch.broadcast_shapes(data.shape, (access.heads, 1, 1)))
        return {HeadReplaced(layer, head, "given", source): each[..., head, :, :] for head in range(access.heads)}
    return None


def run_sets(replay: "Replay", sets: Sequence[Set]) -> Float[Tensor, "sets batch classes"]:
    """The logits under each set of changes, from the first layer that it changes on, several sets in one batch."""
    logits = replay.logits.unsqueeze(0).repeat(len(sets), 1, 1)
    grouped: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for number, changes in enumerate(sets):
        if changes:
            start = min(change.access.layer or 0 for change in changes)
            grouped.setdefault((start, _key(changes, number)), []).append(number)
    for (start, _), members in grouped.items():
        copies = replay.copies
        for first in range(0, len(members), copies):
            numbers = members[first : first + copies]
            merged = _merged([sets[number] for number in numbers])
            with in_force(replay.model, merged):
                logits[numbers] = replay.again(start, copies=len(numbers))
    return logits


def _key(changes: Set, number: int) -> tuple[str, ...]:
    """Equal for sets that may run in one batch: single changes, or changes of the same places in the same order."""
    if any(change.function is None for change in changes):
        return ("alone", str(number))
    return () if len(changes) == 1 else tuple(change.access.name for change in changes)


def _merged(sets: Sequence[Set]) -> Set:
    """The changes of several sets as changes of a batch of copies, one copy a set."""
    if len(sets) == 1:
        return sets[0]
    places = {change.access.name: change for changes in sets for change in changes}
    functions = [{change.access.name: change.function for change in changes} for changes in sets]
    return tuple(
        replace(change, function=_by_copy([each.get(name) for each in functions])) for name, change in places.items()
    )


def _by_copy(functions: Sequence[TensorFunction | None]) -> TensorFunction:
    def change(tensor: Tensor) -> Tensor:
        parts = tensor.unflatten(0, (len(functions), -1))
        return torch.cat([part if each is None else each(part) for each, part in zip(functions, parts)])

    return change
