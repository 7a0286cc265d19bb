"""Features of an image at every layer, one vector each: the CLS token, the mean of the patches, or both."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.features.reader import FeatureLayer, FeatureReader, Vectors, chosen_stages, fitting_norm
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.stages import FeatureStage, final_norm, watching_stages
from vitlens.models.model import Model
from vitlens.models.support import needs_of, require
from vitlens.names import FeaturePool
from vitlens.pixels import AnyImages, as_images, takes_images
from vitlens.shapes import Images, Logits, Tokens
from vitlens.summary import Summary

PatchTokens = Float[Tensor, "images rows columns dim"]


@dataclass(frozen=True, repr=False)
class Features(Summary):
    """One vector an image for each layer, from one pass.

    values: by layer (n, dim), fp32 on the CPU, perhaps mapped from a file that must not be written to; logits:
    (n, classes) of the same pass; pool: the tokens that a vector is made of; notes: remarks for a report.
    """

    alias: str
    layers: tuple[FeatureLayer, ...]
    values: tuple[Float[Tensor, "images _"], ...]
    logits: Logits
    pool: FeaturePool
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.logits)

    def at(self, layer: int = -1) -> Vectors:
        """The features of one layer by its index, from 0; -1 is the last layer read."""
        place = {known.index: place for place, known in enumerate(self.layers)}
        if layer == -1:
            return self.values[-1]
        if layer not in place:
            raise InputError(f"expected one of the layers {sorted(place)} of {self.alias}, found {layer}")
        return self.values[place[layer]]


@takes_images
def features(
    model: Model,
    images: AnyImages,
    *,
    layer: int | Sequence[int] | None = None,
    pool: FeaturePool | None = None,
    norm: bool = True,
    batch_size: int | None = None,
) -> Features:
    """The features of each image at every block of a transformer, every stage of a CNN, in one pass.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes, batch_size at a time (None: chosen
    to fit); layer: from 0, -1 for the last, several, or None for all; pool: "cls", "mean" (of the patches or cells,
    without prefix tokens), "cls+mean" (concatenated), or None for what the classifier reads (CLS where it reads that,
    else the mean); norm: whether the model's final norm is applied to each layer, where it has one of that width, as
    DINO does. Raises UnsupportedError for the CLS of a model without one, NonFiniteError naming the layer.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> read = vitlens.features(vit, torch.rand(4, 3, 32, 32))
    >>> read.at(-1).shape == (4, read.layers[-1].dim)
    True
    """
    require(model, *needs_of("features"))
    reader = FeatureReader(model, layer=layer, pool=pool, norm=norm)
    size = batch_size or fitting_batch_size(model)
    read = [reader.read(batch.to(model.device)) for batch in as_images(images).split(size)]
    values = tuple(torch.cat(parts) for parts in zip(*(batch.vectors for batch in read)))
    return Features(model.alias, reader.layers, values, torch.cat([batch.logits for batch in read]), reader.pool)


def patch_tokens(
    model: Model, images: Images, *, layer: int = -1, norm: bool = True, batch_size: int | None = None
) -> PatchTokens:
    """The tokens of one layer's patches (a CNN's cells) on their grid, fp32 on the CPU, without prefix tokens.

    layer, norm: as in `features`; a norm that the model applies to the pooled vector only is applied to each token
    here. Raises UnsupportedError where the order of the tokens is unknown.
    """
    (stage,) = chosen_stages(model, layer)
    if stage.grid is None:
        raise UnsupportedError(
            f"expected tokens with a place in the image, found {stage.title} of {model.alias}, whose order is "
            "unknown; try a ViT or a CNN"
        )
    norm_layer = fitting_norm(final_norm(model) if norm else None, stage)
    apply = model.module.get_submodule(norm_layer.module) if norm_layer else torch.nn.Identity()
    parts: list[Tensor] = []

    def take(_stage: FeatureStage, tokens: Tokens) -> None:
        parts.append(apply(tokens[:, len(stage.prefix) :]).float().cpu())

    with torch.no_grad(), evaluating(model), watching_stages(model, [stage], take):
        for batch in images.split(batch_size or fitting_batch_size(model)):
            model(batch.to(model.device))
    tokens: Tensor = torch.cat(parts).unflatten(1, stage.grid)
    return tokens
