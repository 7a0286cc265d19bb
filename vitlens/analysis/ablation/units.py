"""Units: the heads, MLPs and blocks that can be removed from a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.places import accesses
from vitlens.lens.trace import layers
from vitlens.models.model import Model
from vitlens.names import UNIT_KINDS, UnitKind


@dataclass(frozen=True)
class Unit:
    """A head, an MLP or a whole block. layer, head: from 0; head: None unless it is one."""

    kind: UnitKind
    layer: int
    head: int | None = None

    def __post_init__(self) -> None:
        if (self.head is None) == (self.kind == "head"):
            raise InputError(f"expected a number for a head and none for others, found {self.kind} {self.head}")

    @property
    def name(self) -> str:
        """Its name in metrics: "head/3/7", "mlp/3", "block/3"; from 0."""
        return "/".join(str(part) for part in (self.kind, self.layer, self.head) if part is not None)

    @property
    def place(self) -> str:
        """Its place: "blocks.3.head.7", "blocks.3.mlp", "blocks.3"."""
        return f"blocks.{self.layer}" + {"head": f".head.{self.head}", "mlp": ".mlp", "block": ""}[self.kind]


Removal = tuple[Unit, ...]  # units that are removed at once; () is the unchanged model


def units_of(model: Model, *, kinds: Sequence[UnitKind] = UNIT_KINDS) -> Removal:
    """All heads, MLPs and blocks that can be removed, by kind, then by layer.

    Heads of a layer without an output projection that reads their concatenation are left out. Raises UnsupportedError
    for a model without attention (a CNN) or without such units.
    """
    for kind in kinds:
        if kind not in UNIT_KINDS:
            raise UnknownNameError("kind of unit", kind, UNIT_KINDS)
    known, places = layers(model), accesses(model)
    own = {layer.unit: layer.index for layer in reversed(known)}  # a block with two attentions is one block
    whole = [layer for layer in known if own[layer.unit] == layer.index]
    every = [
        *(Unit("head", layer.index, head) for layer in known for head in range(layer.heads)),
        *(Unit("mlp", layer.index) for layer in whole),
        *(Unit("block", layer.index) for layer in whole if layer.removable and layer.unit != layer.attention),
    ]
    listed = [unit for unit in every if unit.place in places or f"{unit.place}.residual" in places]
    units = tuple(unit for kind in kinds for unit in listed if unit.kind == kind)
    if not units:
        raise UnsupportedError(
            f"expected {' or '.join(kinds)} to remove from {model.alias}, found none that can be replaced separately"
        )
    return units


def require_heads(model: Model) -> None:
    """Raise UnsupportedError for a model without a head whose output can be replaced separately."""
    if not any(layer.head_dim for layer in layers(model)):
        reasons = (part.unread for part in model.anatomy.attention or () if part.unread)
        raise UnsupportedError(
            f"expected heads whose outputs are concatenated before an output projection in {model.alias}, found "
            f"none: {next(reasons, 'no head can be replaced separately')}"
        )
