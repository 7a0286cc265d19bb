"""The logit lens and direct logit attribution as vitlens.logit_lens and vitlens.direct_logit_attribution."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.patching.contribution import Contributions, contributions, logits_by_depth
from vitlens.analysis.patching.stream_to_logits import blocks_of
from vitlens.lens.layers import layers
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Parts, Targets, as_parts, as_targets, takes_images
from vitlens.shapes import Images
from vitlens.summary import Summary


@dataclass(frozen=True, repr=False)
class LogitLens(Summary):
    """The logits that the final norm and the classifier give at each depth of the residual stream.

    logits: the last depth is the model's own; places: the name of the residual stream at each depth.
    """

    logits: Float[Tensor, "batch depths classes"]
    places: tuple[str, ...]

    @property
    def predictions(self) -> Int[Tensor, "batch depths"]:
        """The class with the highest logit at each depth."""
        return self.logits.argmax(-1)


@takes_images
def logit_lens(model: Model, images: AnyImages) -> LogitLens:
    """The final norm and classifier applied to the residual stream before the first block and after every block.

    The last depth is the model's own logits (nostalgebraist 2020). Earlier depths are read with a norm and a classifier
    that were trained on the last one. Raises UnsupportedError where the classifier reads more than one residual stream,
    or reads it through attention (SigLIP, CaiT, Swin, a CNN).

    >>> import torch, vitlens
    >>> lens = vitlens.logit_lens(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32))
    >>> lens.logits.shape, lens.places[0], lens.places[-1]
    (torch.Size([2, 7, 10]), 'blocks.0.input', 'blocks.5.residual')
    """
    logits = torch.cat([logits_by_depth(model, batch) for batch in _batches(model, as_parts(images))])
    indices = {layer.unit: layer.index for layer in layers(model)}
    after = (f"blocks.{indices[name]}.residual" if name in indices else name for name in blocks_of(model))
    return LogitLens(logits, ("blocks.0.input", *after))


@takes_images
def direct_logit_attribution(model: Model, images: AnyImages, targets: Targets = "predicted") -> Contributions:
    """The direct contribution of every head and MLP to a logit, with the final norm's scale fixed at each image's own.

    targets: "predicted", "label", a class by name or index, or one for each image. `heads[:, 3, 7]` is what
    blocks.3.head.7 writes into the residual stream, as the classifier reads it; all parts sum to the logit (`total()`).
    Effects through later layers are not included: for these, see `patch`. Raises UnsupportedError where the classifier
    does not read the residual stream through a norm and a linear map (attention pooling, CaiT), or where a block adds
    something other than its heads and its MLP (windows, norms after the branches); InputError for a class that does
    not exist.

    >>> import torch, vitlens
    >>> parts = vitlens.direct_logit_attribution(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32))
    >>> parts.heads.shape, bool((parts.total() - parts.logit).abs().max() < 1e-3)
    (torch.Size([2, 6, 4]), True)
    """
    parts, classes, size = as_parts(images), as_targets(targets), fitting_batch_size(model)
    of_batches = []
    for number, batch in enumerate(_batches(model, parts)):
        own = None if classes is None else classes[size * number :][:size].to(model.device)
        of_batches.append(contributions(model, batch, targets=own))
    fields = zip(*(vars(each).values() for each in of_batches), strict=True)
    return Contributions(*(torch.cat(field) for field in fields))


def _batches(model: Model, images: Parts) -> Iterator[Images]:
    return (batch.to(model.device) for batch in images.split(fitting_batch_size(model)))
