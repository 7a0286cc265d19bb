"""Reads the features of one batch at chosen layers: tokens are pooled during the forward pass and not kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.lens.stages import (
    FeatureStage,
    FinalNorm,
    StageKind,
    embedding_stage,
    final_norm,
    stages,
    watching_stages,
)
from vitlens.models.model import Model
from vitlens.names import FEATURE_POOLS, FeaturePool
from vitlens.shapes import Images, Tokens

Vectors = Float[Tensor, "images dim"]


@dataclass(frozen=True)
class FeatureLayer:
    """A layer at which features were read.

    index: from 0, None for the embedding; title: as a figure names it ("block 5"); kind: "block" or "stage", for what
    enters the first block "embedding" or "stem"; module: the one whose output (of the embedding: input) was read; dim:
    of the features; norm: the name of the model's final norm where it was applied, else None.
    """

    index: int | None
    title: str
    kind: StageKind
    module: str
    dim: int
    norm: str | None


class BatchFeatures(NamedTuple):
    """One batch: vectors (batch, dim) by layer, and logits (batch, classes); fp32, on the CPU."""

    vectors: list[Tensor]
    logits: Tensor


class FeatureReader:
    """Reads the chosen layers of a model in one forward pass a batch.

    layer, pool, norm, embedding: as in `features`; layers: those that it reads. Raises what `features` raises.
    """

    def __init__(
        self,
        model: Model,
        *,
        layer: int | Sequence[int] | None = None,
        pool: FeaturePool | None = None,
        norm: bool = True,
        embedding: bool = False,
    ) -> None:
        self.model = model
        self.stages = (*([require_embedding(model)] if embedding else []), *chosen_stages(model, layer))
        self.pool = resolve_pool(model, pool)
        self._norm = final_norm(model) if norm else None
        self.layers = tuple(self._layer(stage) for stage in self.stages)

    def read(self, images: Images) -> BatchFeatures:
        """The features of a batch. Raises NonFiniteError naming the layer."""
        vectors: dict[int | None, Tensor] = {}

        def take(stage: FeatureStage, tokens: Tokens) -> None:
            vectors[stage.index] = self._pooled(stage, tokens).float().cpu()

        with torch.no_grad(), evaluating(self.model), watching_stages(self.model, self.stages, take):
            logits = self.model(images).float().cpu()
        for stage in self.stages:
            if not vectors[stage.index].isfinite().all():
                raise NonFiniteError(
                    f"expected finite features, found NaN or infinity in {stage.title} of {self.model.alias}"
                )
        return BatchFeatures([vectors[stage.index] for stage in self.stages], logits)

    def _layer(self, stage: FeatureStage) -> FeatureLayer:
        norm = fitting_norm(self._norm, stage)
        dim = stage.width * (2 if self._pool_of(stage) == "cls+mean" else 1)
        return FeatureLayer(stage.index, stage.title, stage.kind, stage.module, dim, norm.module if norm else None)

    def _pooled(self, stage: FeatureStage, tokens: Tokens) -> Float[Tensor, "batch _"]:
        norm = fitting_norm(self._norm, stage)
        apply = self.model.module.get_submodule(norm.module) if norm else torch.nn.Identity()
        parts, pool = [], self._pool_of(stage)
        if "cls" in pool:
            parts.append(apply(tokens[:, stage.prefix.index("cls")]))
        if "mean" in pool:
            patches = tokens[:, len(stage.prefix) :]
            # as the model does: the mean of normalised tokens, or the normalised mean (timm's fc_norm)
            parts.append(apply(patches).mean(1) if norm and norm.on_tokens else apply(patches.mean(1)))
        return torch.cat(parts, 1)

    def _pool_of(self, stage: FeatureStage) -> FeaturePool:
        """The pooling of one layer; the CLS token of the embedding is the same for every image, and is left out."""
        return "mean" if stage.index is None else self.pool


def require_embedding(model: Model) -> FeatureStage:
    """What enters the first block. Raises UnsupportedError for a model where that is no sequence of all patches."""
    stage = embedding_stage(model)
    if stage is None:
        raise UnsupportedError(
            f"expected a model whose first block is given the embedding of all patches, found {model.alias} "
            f"({model.anatomy.family}); read its layers without embedding=True"
        )
    return stage


def resolve_pool(model: Model, pool: FeaturePool | None) -> FeaturePool:
    """The pooling; None: what the classifier reads. Raises UnsupportedError for the CLS of a model without one."""
    has_cls = "cls" in stages(model)[0].prefix
    if pool is None:
        return "cls" if has_cls and model.anatomy.readout in ("cls", "cls+distillation") else "mean"
    if pool not in FEATURE_POOLS:
        raise UnknownNameError("pooling of features", pool, FEATURE_POOLS)
    if "cls" in pool and not has_cls:
        raise UnsupportedError(
            f"expected a CLS token for the pooling {pool!r}, found none in {model.alias} "
            f"({model.anatomy.family}); try the pooling 'mean'"
        )
    return pool


def chosen_stages(model: Model, layer: int | Sequence[int] | None) -> tuple[FeatureStage, ...]:
    """Layers by index from 0 (-1: the last); None: all. Raises InputError for an index that does not exist."""
    known = stages(model)
    if layer is None:
        return known
    indices = [layer] if isinstance(layer, int) else layer
    for index in indices:
        if not -len(known) <= index < len(known):
            raise InputError(f"expected a layer from 0 to {len(known) - 1} of {model.alias}, found {index}")
    return tuple(known[index] for index in sorted({index % len(known) for index in indices}))


def fitting_norm(norm: FinalNorm | None, stage: FeatureStage) -> FinalNorm | None:
    """The norm if its width is that of the layer, else None; None for the embedding, which is read as it enters block
    0."""
    return norm if norm is not None and norm.width == stage.width and stage.index is not None else None
