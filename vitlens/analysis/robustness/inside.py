"""What an attack changes inside a model: its maps, and the outputs of each block."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.faithfulness.maps import spearman, top_overlap, usable
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.capture import watching_outputs
from vitlens.models.model import Model
from vitlens.shapes import Images

HALFWAY = 0.5  # of the distance (1 - cosine) between different images

ByDepth = Float[Tensor, "depth batch"]


def cosines(
    model: Model, images: Images, others: Mapping[str, Tensor], *, batch_size: int | None = None
) -> dict[str, ByDepth]:
    """The cosine between each block's output for an image and for its counterpart: (blocks, n) by name of others.

    images, others: (n, 3, height, width) in [0, 1], the counterparts in the same order. A block's whole output counts,
    all tokens or the whole map. Raises InputError for a model without blocks.
    """
    size = batch_size or max(1, fitting_batch_size(model) // 4)
    parts: dict[str, list[Tensor]] = {name: [] for name in others}

    def outputs_of(images: Images) -> list[Tensor]:
        """Each block's output (batch, numbers) in order."""
        outputs: dict[int, Tensor] = {}

        def take(block: int, output: Tensor) -> None:
            if len(output) == len(images):
                outputs[block] = output.float()

        with evaluating(model), torch.no_grad(), watching_outputs(model, take):
            model(images.to(model.device))
        return [outputs[block] for block in sorted(outputs)]

    for start in range(0, len(images), size):
        clean = outputs_of(images[start : start + size])
        if not clean:
            raise InputError(f"expected blocks whose outputs can be compared, found none in {model.alias}")
        for name, counterparts in others.items():
            changed = outputs_of(counterparts[start : start + size])
            parts[name].append(torch.stack([F.cosine_similarity(*pair, dim=1).cpu() for pair in zip(clean, changed)]))
    return {name: torch.cat(rows, 1) for name, rows in parts.items()}


def halfway_block(changed: ByDepth, another: ByDepth) -> int | None:
    """The first block whose outputs for an image and its changed version are half as far apart as for two images.

    changed: cosines with the changed image, another: with a different one; means over images are compared. None where
    there is no such block, or where different images have equal outputs.
    """
    distance, between_images = 1 - changed.double().mean(1), 1 - another.double().mean(1)
    share = torch.where(between_images > 1e-6, distance / between_images.clamp_min(1e-6), torch.zeros_like(distance))
    blocks = (share >= HALFWAY).nonzero().flatten()
    return int(blocks[0]) if len(blocks) else None


@dataclass(frozen=True)
class MapAgreement:
    """The similarity of the maps before and after. usable: (n,), whether both are (see `usable`); spearman: rank
    correlation, -1 to 1; top: share of the top tenth of one among the top tenth of the other; 0 where unusable."""

    usable: Tensor
    spearman: Float[Tensor, " batch"]
    top: Float[Tensor, " batch"]


def map_agreement(before: Float[Tensor, "batch _ _"], after: Float[Tensor, "batch _ _"]) -> MapAgreement:
    """Agreement of the maps of n images with those of the same images after a change."""
    both = usable(before) & usable(after)
    finite = [maps.detach().cpu().float().nan_to_num(0.0, 0.0, 0.0) for maps in (before, after)]
    return MapAgreement(
        both, torch.where(both, spearman(*finite).nan_to_num(0.0), 0.0), torch.where(both, top_overlap(*finite), 0.0)
    )
