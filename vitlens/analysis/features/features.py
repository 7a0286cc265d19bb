"""Features of an image at every layer, one vector each: the CLS token, the mean of the patches, or both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.features.reader import (
    FeatureLayer,
    FeatureReader,
    Vectors,
    chosen_stages,
    fitting_norm,
    require_embedding,
)
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.stages import FeatureStage, final_norm, watching_stages
from vitlens.models.model import Model
from vitlens.models.support import needs_of, require
from vitlens.names import FeaturePool
from vitlens.pixels import AnyImages, as_parts, takes_images
from vitlens.shapes import Images, Logits, Tokens
from vitlens.summary import Summary

PatchTokens = Float[Tensor, "images rows columns dim"]
LayerChoice = int | Literal["embedding"]
EMBEDDING: Final = "embedding"


@dataclass(frozen=True, repr=False)
class Features(Summary):
    """One vector an image for each layer, from one pass.

    values: by layer (n, dim), fp32 on the CPU, perhaps mapped from a file that must not be written to; logits:
    (n, classes) of the same pass; pool: the tokens that a vector is made of; notes: remarks for a report. The
    embedding, where it was read, comes first and has no number: block 0 is layer 0 with it and without it.
    """

    alias: str
    layers: tuple[FeatureLayer, ...]
    values: tuple[Float[Tensor, "images _"], ...]
    logits: Logits
    pool: FeaturePool
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def embedded(self) -> bool:
        """Whether the first of the layers is the embedding (a CNN's stem)."""
        return bool(self.layers) and self.layers[0].index is None

    def at(self, layer: LayerChoice = -1) -> Vectors:
        """The features of one layer by its index, from 0; -1 is the last layer read, "embedding" the embedding."""
        place = {EMBEDDING if known.index is None else known.index: place for place, known in enumerate(self.layers)}
        if layer == -1:
            return self.values[-1]
        if layer not in place:
            raise InputError(f"expected one of the layers {[*place]} of {self.alias}, found {layer}")
        return self.values[place[layer]]


@takes_images
def features(
    model: Model,
    images: AnyImages,
    *,
    layer: int | Sequence[int] | None = None,
    pool: FeaturePool | None = None,
    norm: bool = True,
    embedding: bool = False,
    batch_size: int | None = None,
) -> Features:
    """The features of each image at every block of a transformer, every stage of a CNN, in one pass.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes, batch_size at a time (None: chosen
    to fit); layer: from 0, -1 for the last, several, or None for all; pool: "cls", "mean" (of the patches or cells,
    without prefix tokens), "cls+mean" (concatenated), or None for what the classifier reads (CLS where it reads that,
    else the mean); norm: whether the model's final norm is applied to each layer, where it has one of that width, as
    DINO does; embedding: whether what enters block 0 (a CNN's stem) is read too, as the first of the layers: always the
    mean of its patches, as its CLS token is the same for every image, and without the final norm. Raises
    UnsupportedError for the CLS of a model without one and for the embedding of a model without blocks,
    NonFiniteError naming the layer.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> read = vitlens.features(vit, torch.rand(4, 3, 32, 32))
    >>> read.at(-1).shape == (4, read.layers[-1].dim)
    True
    """
    require(model, *needs_of("features"))
    reader = FeatureReader(model, layer=layer, pool=pool, norm=norm, embedding=embedding)
    size = batch_size or fitting_batch_size(model)
    read = [reader.read(batch.to(model.device)) for batch in as_parts(images).split(size)]
    values = tuple(torch.cat(parts) for parts in zip(*(batch.vectors for batch in read)))
    return Features(model.alias, reader.layers, values, torch.cat([batch.logits for batch in read]), reader.pool)


def patch_tokens(
    model: Model, images: Images, *, layer: LayerChoice = -1, norm: bool = True, batch_size: int | None = None
) -> PatchTokens:
    """The tokens of one layer's patches (a CNN's cells) on their grid, fp32 on the CPU, without prefix tokens.

    layer, norm: as in `features`, and "embedding" for the patches that enter block 0, without a norm; a norm that the
    model applies to the pooled vector only is applied to each token here. Raises UnsupportedError where the order of
    the tokens is unknown.
    """
    (tokens,) = patch_tokens_at(model, images, (layer,), norm=norm, batch_size=batch_size)
    return tokens


def patch_tokens_at(
    model: Model,
    images: Images,
    layers: Sequence[LayerChoice],
    *,
    norm: bool = True,
    batch_size: int | None = None,
) -> tuple[PatchTokens, ...]:
    """The tokens of the patches of several layers, as `patch_tokens` reads them, in one pass."""
    read = [require_embedding(model) if layer == EMBEDDING else chosen_stages(model, layer)[0] for layer in layers]
    for stage in read:
        if stage.grid is None:
            raise UnsupportedError(
                f"expected tokens with a place in the image, found {stage.title} of {model.alias}, whose order is "
                "unknown; try a ViT or a CNN"
            )
    final, parts = final_norm(model) if norm else None, dict[FeatureStage, list[Tensor]]()

    def take(stage: FeatureStage, tokens: Tokens) -> None:
        applied = fitting_norm(final, stage)
        apply = model.module.get_submodule(applied.module) if applied else torch.nn.Identity()
        patches = apply(tokens[:, len(stage.prefix) :])
        parts.setdefault(stage, []).append(patches.float().cpu().clone())  # a later block may write into it

    with torch.no_grad(), evaluating(model), watching_stages(model, read, take):
        for batch in images.split(batch_size or fitting_batch_size(model)):
            model(batch.to(model.device))
    return tuple(torch.cat(parts[stage]).unflatten(1, _grid(stage)) for stage in read)


def _grid(stage: FeatureStage) -> tuple[int, int]:
    assert stage.grid is not None  # refused above
    return stage.grid
