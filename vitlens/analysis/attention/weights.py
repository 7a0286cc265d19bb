"""Attention weights of a model, and the maps that can be read from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import Chain
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.geometry import assumed_grid
from vitlens.errors import UnsupportedError
from vitlens.lens.call import AttentionCall, received
from vitlens.lens.capture import capture_attention
from vitlens.lens.layers import probe_images
from vitlens.lens.observe import observe, survey_weights
from vitlens.lens.site import NO_PLACE, Site
from vitlens.models.model import Model
from vitlens.models.support import require
from vitlens.pixels import AnyImages, as_parts, takes_images
from vitlens.shapes import Images

RowChoice = Literal["all", "cls"]


@takes_images
def attention(model: Model, images: AnyImages, *, rows: RowChoice = "all") -> tuple[Tensor, ...]:
    """The weights of every layer: a tuple of (batch, heads, query, key), rows summing to 1.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; rows: "all", or "cls" for the
    CLS row only (query axis of length 1), which costs N instead of N² a head. For a windowed model, batch is images x
    windows. Raises UnsupportedError where there is no attention or no CLS.

    >>> import torch, vitlens
    >>> weights = vitlens.attention(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32))
    >>> len(weights), weights[0].shape  # six layers of four heads; 64 patches and CLS
    (6, torch.Size([2, 4, 65, 65]))
    """
    require(model, "attention")
    places = None if rows == "all" else model.layout.positions("cls")
    if places == ():
        raise UnsupportedError(f"expected a CLS token in {model.alias}, found none; try rows='all'")
    batches = as_parts(images).split(fitting_batch_size(model))
    parts = [capture_attention(model, batch.to(model.device), rows=places).layers for batch in batches]
    return tuple(torch.cat(layer) for layer in zip(*parts, strict=True))


@dataclass(frozen=True)
class LayerMaps:
    """The attention of one layer's heads from the readout's query: maps (batch, heads, rows, columns), not scaled.

    prefix: mass (batch, heads) on CLS and other prefix tokens, which is not in the map; reading: the name of the query.
    """

    site: Site
    maps: Float[Tensor, "batch heads rows columns"]
    prefix: Float[Tensor, "batch heads"]
    reading: str


def attention_maps(model: Model, images: Images) -> tuple[LayerMaps, ...]:
    """The attention of every layer as maps: the CLS row, the mean over patch rows where there is no CLS, the pooling
    query's row, or, in windows, the attention that each patch receives. Layers of pooled keys or channels are left out,
    as are windows whose place in the image is not known. Raises UnsupportedError where no layer is left."""
    require(model, "maps")
    layers: list[LayerMaps] = []

    def keep(call: AttentionCall) -> None:
        read = layer_map(call, model)
        if read is not None:
            layers.append(read)

    observe(model, images, keep)
    return tuple(layers)


def require_attention(model: Model) -> None:
    """Raise UnsupportedError for a model without attention, LensError where the lens cannot observe all of it."""
    survey_weights(model, probe_images(model, 1))


def require_maps(model: Model) -> None:
    """Raise UnsupportedError unless the attention of some layer is a map of the image."""
    sites = survey_weights(model, probe_images(model, 1))
    if not any(has_map(site, model) for site in sites):
        kinds = Counter(site.kind for site in sites)
        listed = ", ".join(f"{count} of kind {kind} ({NO_PLACE[kind]})" for kind, count in kinds.items())
        raise UnsupportedError(
            f"expected layers whose attention has a known place in the image, found in {model.alias} {listed}"
        )


def has_map(site: Site, model: Model) -> bool:
    """Whether the attention of a layer's heads is a map of the image."""
    layout = model.anatomy.layout
    if site.windows is not None:
        return True
    if site.kind != "patch":
        return site.kind == "class" and layout is not None
    whole = layout is not None and site.keys == layout.tokens
    return whole or assumed_grid(site, model) is not None


def layer_map(call: AttentionCall, model: Model) -> LayerMaps | None:
    """The attention maps of one layer's heads, or None for a layer whose queries or keys are no patches."""
    site, layout, readout = call.site, model.anatomy.layout, model.anatomy.readout
    if not has_map(site, model):
        return None
    if site.windows is not None:
        maps = received(call.placed(), site.windows)
        return LayerMaps(site, maps, maps.new_zeros(maps.shape[:2]), "mean over the patches of a window")
    if site.kind == "class" and layout is not None:
        return _of_row(site, call.weights()[:, :, 0], layout.grid, "the pooling query")
    if layout is None or site.keys != layout.tokens:
        grid = assumed_grid(site, model)
        assert grid is not None  # as has_map is true
        return _of_row(site, call.weights().mean(2), grid, "mean over all patches")
    if readout in ("cls", "cls+distillation"):
        return _of_row(site, call.rows(layout.positions("cls"))[:, :, 0], layout.grid, "the CLS token")
    rows = range(len(layout.prefix), layout.tokens)
    return _of_row(site, call.rows(rows).mean(2), layout.grid, "mean over all patches")


def layer_maps(chain: Chain, *, layer: int | None = None) -> Float[Tensor, "batch rows columns"]:
    """The mean over heads of a layer's maps (layer from 0, None: the last that has one).

    Raises UnsupportedError for a layer without a map.
    """
    placed = [call.site.layer for call in chain.calls if has_map(call.site, chain.model)]
    chosen = (placed or [chain.calls[-1].site.layer])[-1] if layer is None else layer
    read = layer_map(next(call for call in reversed(chain.calls) if call.site.layer == chosen), chain.model)
    if read is None:
        raise UnsupportedError(
            f"expected a layer in which patches attend to patches, found pooled keys or channels in layer {chosen} of "
            f"{chain.model.alias}; choose another --layer"
        )
    maps: Tensor = read.maps.mean(1)
    return maps


def _of_row(site: Site, row: Float[Tensor, "batch heads key"], grid: tuple[int, int], reading: str) -> LayerMaps:
    patches = grid[0] * grid[1]
    return LayerMaps(site, row[..., -patches:].unflatten(-1, grid), row[..., :-patches].sum(-1), reading)


def head_mean(layers: Sequence[LayerMaps]) -> tuple[Float[Tensor, "batch rows columns"], ...]:
    """The mean over heads of each layer's maps."""
    return tuple(layer.maps.mean(1) for layer in layers)
