"""Units that can be removed from a model: heads, MLPs, blocks and latents of a dictionary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.lens.places import accesses
from vitlens.lens.trace import blocks, layers
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.names import UNIT_KINDS, UnitKind


@dataclass(frozen=True)
class Unit:
    """A head, an MLP, a block or a latent of a dictionary, which can be removed from a model.

    kind: "head", "mlp", "block" or "latent".
    layer: the index of its layer, from 0.
    head: the index of the head in its layer, from 0; None for other units.
    latent: the index of the latent, from 0; None for other units.
    stream: the tensor of the layer that a latent's dictionary reconstructs, such as "residual".
    """

    kind: UnitKind
    layer: int
    head: int | None = None
    latent: int | None = None
    stream: str = ""

    @property
    def name(self) -> str:
        """Return its name in metrics, e.g. "head/3/7", "mlp/3", "block/3" or "latent/3/70"."""
        name = f"{self.kind}/{self.layer}"
        number = self.latent if self.head is None else self.head
        return name if number is None else f"{name}/{number}"

    @property
    def place(self) -> str:
        """Return its place: "blocks.3.head.7", "blocks.3.mlp", "blocks.3",
        "blocks.3.residual.latent.70".
        """
        suffixes = {
            "head": f".head.{self.head}",
            "mlp": ".mlp",
            "block": "",
            "latent": f".{self.stream}.latent.{self.latent}",
        }
        return f"blocks.{self.layer}{suffixes[self.kind]}"

    @property
    def output(self) -> str:
        """Return the place with its output: that of all heads or latents of a layer together.

        A block has no output that could be replaced.
        """
        names = {"head": "heads", "mlp": "mlp", "latent": f"{self.stream}.latents"}
        return f"blocks.{self.layer}.{names[self.kind]}"

    def of_output(self, output: Tensor) -> Tensor:
        """Return the part of the tensor at `output` that is this unit's."""
        if self.head is not None:
            return output.select(-3, self.head)  # (.., heads, tokens, head_dim)
        if self.latent is not None:
            return output.select(-1, self.latent)
        return output


Removal: TypeAlias = tuple[Unit, ...]  # units that are removed at once; () is the unchanged model


def units_of(model: Model, *, kinds: Sequence[UnitKind] = UNIT_KINDS) -> Removal:
    """Return all heads, MLPs, blocks and latents that can be removed, by kind, then by layer.

    Heads can be removed if an output projection reads their concatenated outputs. Latents are those
    that are places of the model: see `Dictionary.places`. Raises UnsupportedError for a model
    without attention (a CNN) or without such units.
    """
    for kind in kinds:
        if kind not in (*UNIT_KINDS, "latent"):
            raise UnknownNameError("kind of unit", kind, (*UNIT_KINDS, "latent"))
    all_layers = blocks(model)
    # a block with two attentions has two layers: it counts once, at the first of them, which is the
    # last one that is entered here
    first_layers = {layer.unit: layer.index for layer in reversed(all_layers)}
    by_kind: dict[UnitKind, list[Unit]] = {kind: [] for kind in UNIT_KINDS}
    by_kind["latent"] = list(_latents(model))
    for layer in all_layers:
        by_kind["head"] += [Unit("head", layer.index, head) for head in range(layer.heads)]
        if first_layers[layer.unit] != layer.index:
            continue
        by_kind["mlp"].append(Unit("mlp", layer.index))
        if layer.removable and layer.unit != layer.attention:
            by_kind["block"].append(Unit("block", layer.index))
    places = accesses(model)
    units = []
    for kind in kinds:
        for unit in by_kind[kind]:
            # a block is no place itself, but its output is
            if unit.place in places or f"{unit.place}.residual" in places:
                units.append(unit)
    if "latent" in kinds and not by_kind["latent"]:
        raise UnsupportedError(
            f"expected latents among the places of {model.alias}, found none; load a "
            "dictionary and ablate inside `with dictionary.places():`"
        )
    if not units:
        raise UnsupportedError(
            f"expected {' or '.join(kinds)} to remove from {model.alias}, found none that can be "
            "replaced separately"
        )
    return tuple(units)


def _latents(model: Model) -> Iterator[Unit]:
    """Yield the latents that are places of a model."""
    for access in accesses(model).values():
        if access.place.kind == "latent":
            # a name such as "blocks.8.residual.latent.5"
            _, layer, place_in_layer = access.name.split(".", 2)
            stream, latent = place_in_layer.split(".latent.")
            yield Unit("latent", int(layer), latent=int(latent), stream=stream)


@requirement("heads")
def require_heads(model: Model) -> None:
    """Raise UnsupportedError for a model without a head that can be replaced."""
    if not any(layer.head_dim for layer in layers(model)):
        reasons = [part.unread for part in model.anatomy.attention or () if part.unread]
        reason = reasons[0] if reasons else "no head can be replaced separately"
        raise UnsupportedError(
            "expected heads whose outputs are concatenated before an output projection in "
            f"{model.alias}, found none: {reason}"
        )
