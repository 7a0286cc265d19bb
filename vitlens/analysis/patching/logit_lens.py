"""The logit lens: the logits of the residual stream at each depth."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.patching.stream import (
    TOLERANCE,
    blocks_of,
    logits_from,
    require_batch_first,
    watching_residuals,
)
from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens.trace import blocks as numbered_blocks
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, as_parts
from vitlens.shapes import Images
from vitlens.summary import Summary


@dataclass(frozen=True, repr=False)
class LogitLens(Summary):
    """The logits that the final norm and the classifier give at each depth of the residual stream.

    logits: the logits at each depth. Those of the last depth are the model's.
    places: the name of the residual stream at each depth.
    """

    logits: Float[Tensor, "batch depths classes"]
    places: tuple[str, ...]

    @property
    def predictions(self) -> Int[Tensor, "batch depths"]:
        """Return the class with the highest logit at each depth."""
        return self.logits.argmax(-1)


@takes_images
def logit_lens(model: Model, images: AnyImages) -> LogitLens:
    """Return the logits of the residual stream before the first block and after every block.

    The final norm and the classifier are applied at each depth (nostalgebraist 2020). The last
    depth gives the logits of the model. Note that norm and classifier were trained for the last
    depth only.

    Raises UnsupportedError if the classifier reads more than one residual stream, or reads it
    through attention (SigLIP, CaiT, Swin, a CNN).

    >>> import torch, vitlens
    >>> lens = vitlens.logit_lens(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32))
    >>> lens.logits.shape, lens.places[0], lens.places[-1]
    (torch.Size([2, 7, 10]), 'blocks.0.input', 'blocks.5.residual')
    """
    batches = as_parts(images).split(fitting_batch_size(model))
    logits = torch.cat([logits_by_depth(model, batch.to(model.device)) for batch in batches])
    index_of_block = {block.unit: block.index for block in numbered_blocks(model)}
    names = blocks_of(model)
    first_index = index_of_block.get(names[0], 0)  # 0 if the first block is pruned
    places = [f"blocks.{first_index}.input"]
    for name in names:
        if name in index_of_block:
            places.append(f"blocks.{index_of_block[name]}.residual")
        else:  # a pruned block has no number
            places.append(name)
    return LogitLens(logits, tuple(places))


def logits_by_depth(
    model: Model, images: Images, blocks: Sequence[str] | None = None
) -> Float[Tensor, "batch depths classes"]:
    """Return the logits of `logit_lens` for one batch, at blocks + 1 depths.

    blocks: the names of the blocks (None: all).

    Raises UnsupportedError if the last depth does not give the logits of the model.
    """
    blocks = blocks_of(model) if blocks is None else blocks
    if model.anatomy.attention:
        require_batch_first(model)
    with evaluating(model), torch.no_grad():
        with watching_residuals(model, blocks) as streams:
            logits = model(images)
        lens = torch.stack([logits_from(model, stream, blocks=blocks) for stream in streams], dim=1)
    difference = (lens[:, -1] - logits).abs().max().item()
    scale = logits.abs().max().item()
    # Both are the same norm and classifier on the same stream. In 16 bits they may differ by a few
    # roundings of the logits.
    tolerance = max(TOLERANCE, 4 * torch.finfo(model.mean.dtype).eps)
    if not difference <= tolerance * scale:  # also for NaN
        raise UnsupportedError(
            f"expected a classifier that reads the output of the last block, {blocks[-1]}, found "
            f"logits of {model.alias} that differ by {difference:.1e}; try vitlens ablate, which "
            "needs none"
        )
    return lens
