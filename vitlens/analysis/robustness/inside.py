"""What an attack changes inside a model: attention statistics, and how far apart the outputs of each block are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.faithfulness.agreement import spearman, top_overlap
from vitlens.analysis.faithfulness.map_shares import usable
from vitlens.analysis.heads.measure import measure
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.outputs import watching_outputs
from vitlens.models.model import Model
from vitlens.shapes import Images

SHIFTED = ("normalised_entropy", "distance")  # statistics of attention whose change is told
APART = 0.5  # of the way from the same image to another: there they count as parted

ByDepth = Float[Tensor, "depth batch"]


def cosines(
    model: Model, images: Images, others: Mapping[str, Tensor], *, batch_size: int | None = None
) -> dict[str, ByDepth]:
    """The cosine between each block's output for an image and for its counterpart: (blocks, n) by name of others.

    images, others: (n, 3, height, width) in [0, 1], the counterparts in the same order. A block's whole output counts,
    all tokens or the whole map. Raises InputError for another number of counterparts, or a model without blocks.
    """
    for name, counterparts in others.items():
        if counterparts.shape != images.shape:
            raise InputError(f"expected {name} of shape {tuple(images.shape)}, found {tuple(counterparts.shape)}")
    size = batch_size or max(1, fitting_batch_size(model) // 4)
    parts: dict[str, list[Tensor]] = {name: [] for name in others}
    for start in range(0, len(images), size):
        clean = _outputs(model, images[start : start + size])
        for name, counterparts in others.items():
            changed = _outputs(model, counterparts[start : start + size])
            rows = [F.cosine_similarity(clean[block], changed[block], dim=1).cpu() for block in sorted(clean)]
            parts[name].append(torch.stack(rows))
    return {name: torch.cat(rows, 1) for name, rows in parts.items()}


def _outputs(model: Model, images: Images) -> dict[int, Tensor]:
    """Each block's output (batch, numbers) by the block's number."""
    outputs: dict[int, Tensor] = {}

    def take(block: int, output: Tensor) -> None:
        if len(output) == len(images):
            outputs[block] = output.float()

    with evaluating(model), torch.no_grad(), watching_outputs(model, take):
        model(images.to(model.device))
    if not outputs:
        raise InputError(f"expected blocks whose outputs can be compared, found none in {model.alias}")
    return outputs


def parting(changed: ByDepth, another: ByDepth) -> int | None:
    """The first block after which an image and its changed self have come halfway to being two different images.

    changed: cosines with the changed image, another: with a different one; means over images are compared. None where
    that happens nowhere, or nothing tells images apart.
    """
    one, two = changed.double().mean(1), another.double().mean(1)
    room = 1 - two
    gone = torch.where(room > 1e-6, (1 - one) / room.clamp_min(1e-6), torch.zeros_like(room))
    reached = (gone >= APART).nonzero().flatten()
    return int(reached[0]) if len(reached) else None


@dataclass(frozen=True)
class Shift:
    """A statistic of attention before and after, one number an image and layer: (layers, n), means over heads; NaN
    where a layer has none."""

    name: str
    before: Float[Tensor, "layers batch"]
    after: Float[Tensor, "layers batch"]


def shifts(
    model: Model,
    images: Images,
    changed: Images,
    *,
    statistics: Sequence[str] = SHIFTED,
    batch_size: int | None = None,
) -> tuple[Shift, ...]:
    """How every layer's attention looks before and after; nothing for a model without attention."""
    if model.anatomy.family not in ("vit", "windowed"):
        return ()
    size = batch_size or max(1, fitting_batch_size(model) // 2)
    tables = [_table(model, batch, statistics, size) for batch in (images, changed)]
    return tuple(Shift(name, tables[0][name], tables[1][name]) for name in statistics if name in tables[0])


def _table(model: Model, images: Images, statistics: Sequence[str], size: int) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for batch in images.split(size):
        measured = measure(model, batch.to(model.device))
        for name in statistics:
            rows = {layer: values.mean(1) for (known, layer), values in measured.values.items() if known == name}
            if rows:
                nothing = torch.full((len(batch),), torch.nan)
                layers = [
                    rows[layer].float().cpu() if layer in rows else nothing for layer in range(len(measured.sites))
                ]
                parts.setdefault(name, []).append(torch.stack(layers))
    return {name: torch.cat(rows, 1) for name, rows in parts.items()}


@dataclass(frozen=True)
class MapAgreement:
    """How alike maps before and after are, of the images of which both say something: usable (n,); spearman: rank
    correlation, -1 to 1; top: share of the top tenth of one among the top tenth of the other; 0 where unusable."""

    usable: Tensor
    spearman: Float[Tensor, " batch"]
    top: Float[Tensor, " batch"]


def map_agreement(before: Float[Tensor, "batch _ _"], after: Float[Tensor, "batch _ _"]) -> MapAgreement:
    """Agreement of the maps of n images with those of the same images after a change."""
    both = usable(before) & usable(after)
    one, two = (maps.detach().cpu().float().nan_to_num(0.0, 0.0, 0.0) for maps in (before, after))
    return MapAgreement(
        both,
        torch.where(both, spearman(one, two).nan_to_num(0.0), 0.0),
        torch.where(both, top_overlap(one, two), 0.0),
    )
