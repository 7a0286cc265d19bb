"""Measurements of a model in training, which `train --track` and the callbacks log.

Numbers and pictures describe the attention on a few fixed images. Histograms describe the weights
and gradients of each block. Layers are numbered from 0: attention_entropy/patches/layer_00.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Final

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlens.analysis.attention.chain import require_chain
from vitlens.analysis.attention.methods import rollout
from vitlens.analysis.attention.weights import attention_maps
from vitlens.analysis.features.features import features
from vitlens.analysis.features.neighbours import nearest, vote
from vitlens.analysis.heads.batch import measure
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.analysis.heads.statistics import require_statistics
from vitlens.charts import Picture
from vitlens.charts import images as drawn_images
from vitlens.charts.pictures import with_maps
from vitlens.models.memo import holding
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels

NEIGHBOURS: Final = 5  # nearest images that vote for the class of an image
_MOST_LAYERS: Final = 6  # on a sheet
_BINS: Final = 64  # of a histogram
_WIDTH_OF_EQUAL: Final = 1e-3  # width of the bins of equal values, as a part of the value

Pixels = NDArray[np.uint8]  # a picture (height, width, 3)


@dataclass(frozen=True)
class Histogram:
    """A histogram of values.

    counts: the number of values in each bin.
    edges: the ends of the bins, one more than counts.
    total: the sum of the values.
    squares: the sum of the squared values.
    """

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    total: float
    squares: float


@dataclass(frozen=True)
class AttentionSnapshot:
    """The tracked statistics of attention, by name and layer.

    scalars: the means over images and heads.
    histograms: the values of every head on every image.
    """

    scalars: dict[str, float]
    histograms: dict[str, Histogram]


def attention_snapshot(model: Model, images: Images) -> AttentionSnapshot:
    """Return the tracked statistics of each layer, from one forward pass.

    Entropy is in units of ln(keys), distance in pixels. Raises UnsupportedError for a model without
    attention between tokens.
    """
    require_statistics(model)
    with holding(model):
        values = measure(model, images).values
    scalars = {}
    histograms = {}
    for name, statistic in STATISTICS.items():
        if not statistic.tracked_as:
            continue
        for layer in sorted(layer for measured, layer in values if measured == name):
            by_head = values[name, layer].double()  # (images, heads)
            finite = by_head[by_head.isfinite()]
            if not len(finite):
                continue
            place = f"{statistic.tracked_as}/layer_{layer:02}"
            mean_by_head = by_head.mean(0)  # NaN for a head without a value on some image
            scalars[f"attention_{place}"] = float(mean_by_head.nanmean())
            histograms[f"attention_of_heads_{place}"] = histogram([finite])
    return AttentionSnapshot(scalars, histograms)


def parameter_histograms(
    kind: str, tensors: Mapping[str, Tensor], blocks: Sequence[str]
) -> dict[str, Histogram]:
    """Return a histogram of the tensors of each block, and of each module outside the blocks.

    Vectors (biases and scales) have separate histograms, as their values differ from those of
    matrices.

    kind: the beginning of the names, such as "weights" in weights/layer_00.
    tensors: the tensors by the name of their parameter, which may have a prefix.
    blocks: the names of the blocks in order.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        place = _place_of(name, blocks)
        if tensor.ndim < 2:
            place += "_vectors"
        groups.setdefault(place, []).append(tensor)
    return {f"{kind}/{place}": histogram(group) for place, group in groups.items()}


def _place_of(name: str, blocks: Sequence[str]) -> str:
    """Return the layer of a parameter, or its module, or its name if it is in the outermost one."""
    for layer, block in enumerate(blocks):
        if f".{block}." in f".{name}":
            return f"layer_{layer:02}"
    module, _, parameter = name.rpartition(".")
    return module or parameter


def histogram(tensors: Sequence[Tensor]) -> Histogram:
    """Return the histogram of all values of several tensors, from the least to the largest."""
    # in float32, because some devices have no wider type
    parts = [tensor.detach().float().flatten() for tensor in tensors]
    low = min(float(part.min()) for part in parts)
    high = max(float(part.max()) for part in parts)
    if low == high:  # equal values need bins of some width
        width = max(abs(low), 1.0) * _WIDTH_OF_EQUAL
        low -= width
        high += width
    counts = np.zeros(_BINS, np.int64)
    total = 0.0
    squares = 0.0
    for part in parts:
        counts += torch.histc(part, _BINS, low, high).long().cpu().numpy()
        total += float(part.sum())
        squares += float(part.square().sum())
    return Histogram(counts, np.linspace(low, high, _BINS + 1), total, squares)


def attention_sheet(model: Model, images: Images, title: str) -> Pixels:
    """Draw images in rows: the mean map of the heads in evenly spaced layers, then the rollout.

    The rollout is left out if the model has none. Raises UnsupportedError for a model without maps.
    """
    layers = attention_maps(model, images)
    count = min(len(layers), _MOST_LAYERS)
    evenly_spaced = np.linspace(0, len(layers) - 1, count).round().astype(int)
    columns = {}
    for index in evenly_spaced:
        layer = layers[index]
        columns[f"layer {layer.site.layer}"] = layer.maps.mean(1)  # over the heads
    if require_chain.is_met(model):
        columns["rollout"] = rollout(model, images)
    return _pixels(_draw_maps(images, columns, label="attention (%)", title=title))


def rollout_sheet(model: Model, images: Images, title: str) -> Pixels:
    """Draw images next to their attention rollout."""
    columns = {"rollout": rollout(model, images)}
    return _pixels(_draw_maps(images, columns, label="rollout (%)", title=title))


def _draw_maps(images: Images, columns: Mapping[str, Tensor], *, label: str, title: str) -> Figure:
    """Draw images next to maps (batch, rows, columns) on one colour scale."""
    shares = [100 * maps.float().cpu().numpy() for maps in columns.values()]
    names = [f"image {number}" for number in range(len(images))]
    pictures: Iterator[Picture] = with_maps(images.cpu().numpy(), shares, [*columns], names)
    return drawn_images(scale="joint", label=label)(list(pictures), title)


def _pixels(figure: Figure) -> Pixels:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi="figure")
    return np.asarray(Image.open(buffer).convert("RGB"))


def neighbour_accuracy(model: Model, images: Images, labels: Labels) -> float:
    """Return the k-NN accuracy (fraction) of images, each classified by the others.

    The features are those of the last block. The NEIGHBOURS nearest of the other images vote, or
    all of them if there are fewer. The result is NaN for a single image.
    """
    if len(images) < 2:
        return float("nan")
    vectors = features(model, images, layer=-1).at(-1)
    numbers = torch.arange(len(images))
    k = min(NEIGHBOURS, len(images) - 1)
    # an image is no neighbour of itself
    neighbours = nearest(vectors, vectors, k=k, leave_out=numbers)
    labels = labels.cpu().long()
    predictions = vote(neighbours, labels, k=k, classes=1 + int(labels.max()))
    return float((predictions == labels).double().mean())
