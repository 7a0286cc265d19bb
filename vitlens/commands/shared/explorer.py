"""The attention explorer: what a run keeps for it, and the explorer of a report; free of torch.

A run writes an `ExplorerRow` and `ExplorerArrays` for each model. A report adds `ExplorerContents`
(pictures, facts, maps) and makes the explorer of both. `sinks_claim` is a note about the same
arrays.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import Form, Stack
from vitlens.display import protected, unprotected, visible
from vitlens.record import OfModel
from vitlens.report.claims import Claim
from vitlens.report.explorer import Explorer, ExplorerImage
from vitlens.report.html.packing import restored
from vitlens.report.prose import Marked, say
from vitlens.report.verdicts import LIMITS

_Bytes = NDArray[np.uint8]
_Scales = NDArray[np.float32]
Floats = NDArray[np.floating[Any]]
Vectors = Annotated[Floats, Form("f", (None, None, None, None, None))]

LEVELS: Final = 255  # of a byte, in which weights are kept
_DEVIATIONS: Final = 5  # as a statistic's sinks (analysis/heads/rows.py, tested)
_ROUNDING: Final = 1e-4  # of the median, by which equal keys may differ
# of the patches: more that all queries share are an object or a region, as the label of heads
_FEW: Final = 0.1
_SPECIAL: Final = {"cls": "CLS"}  # names of tokens that are written otherwise


@dataclass(frozen=True)
class ExplorerRow(OfModel):
    """The sizes of one model's explorer, or the reason why it has none.

    reason: why there is no explorer of the model, "" where there is one.
    keys: grid (rows, columns) of the patches that are attended to.
    queries: grid (rows, columns) of the patches that attend; smaller than `keys` if pooled.
    special: the tokens before the patches.
    images: the number of images.
    whole: the number of first images that are kept by head; the others are means over heads.
    layers: the numbers of the layers with attention, None where these are 0, 1, 2 and so on (blocks
        without attention have a number, too).
    scales: the factor on the product of query and key, of each layer with vectors.
    without_pairs: why there are no queries and keys, "" where there are.
    """

    reason: str = ""
    keys: tuple[int, int] = (0, 0)
    queries: tuple[int, int] = (0, 0)
    special: tuple[str, ...] = ()
    images: int = 0
    whole: int = 0
    layers: tuple[int, ...] | None = None
    scales: tuple[float, ...] = ()
    without_pairs: str = ""

    def numbers(self, arrays: "ExplorerArrays") -> tuple[int, ...]:
        """Return the number of each layer of its arrays."""
        if self.layers:
            return self.layers
        return tuple(range(arrays.heads.shape[1]))


@dataclass(frozen=True)
class ExplorerArrays:
    """One model's attention weights on n images, in the bytes of a page (report/html/packing.py).

    A row of weights is kept as bytes and as its two largest weights, which scale the bytes: that on
    the special tokens and that on the patches. `ExplorerRow.whole` first images are kept by head.

    heads: (whole, layers, heads, queries, keys), bytes of the first images.
    heads_most: (whole, layers, heads, queries, 2), the largest weights of these rows.
    means: (n - whole, layers, queries, keys), bytes of the means over heads of the other images.
    means_most: (n - whole, layers, queries, 2), the largest weights of these rows.
    rollout: (n, layers, keys), rollout from the first layer to each layer.
    query_vectors, key_vectors: (images, last layers, heads, tokens, head_dim), for as many first
        images as there is room for.
    """

    heads: Annotated[_Bytes, Form("u", (None, None, None, None, None))]
    heads_most: Annotated[_Scales, Form("f", (None, None, None, None, 2))]
    means: Annotated[_Bytes, Form("u", (None, None, None, None))]
    means_most: Annotated[_Scales, Form("f", (None, None, None, 2))]
    rollout: Stack
    query_vectors: Vectors | None = None
    key_vectors: Vectors | None = None


@dataclass(frozen=True)
class ExplorerContents:
    """What a command adds to the measured attention.

    pictures: (n, 3, height, width) uint8.
    names: the file or name of each image.
    facts: sentences below each image.
    maps: by name, (n or fewer, rows, columns), of the first images.
    labels: the label of each head, by layer number and head.
    importance: (layers, heads), the loss increase without each head.
    words: the three tested labels of each head, by layer number and head.
    """

    pictures: NDArray[np.uint8]
    names: Sequence[str]
    facts: Sequence[Sequence[str]] = ()
    maps: Mapping[str, Floats] = field(default_factory=dict)
    labels: Sequence[Sequence[str]] = ()
    importance: Floats | None = None
    words: Sequence[Sequence[str]] = ()


def explorer_of(record: Any, contents: ExplorerContents) -> Explorer | None:
    """Return the explorer of the first model that has one.

    record: with the fields `explorer`, a table of ExplorerRow, and `explorer_arrays`, by model.
    """
    for row in record.explorer:
        if row.model in record.explorer_arrays:
            return explorer(row, record.explorer_arrays[row.model], contents)
    return None


def without_explorer(rows: Sequence[ExplorerRow]) -> Iterator[str]:
    """Yield why models have no explorer, one sentence of the first page for each."""
    for row in rows:
        if row.reason:
            # a whole sentence, which must not be shortened
            reason = Marked(protected(visible(row.reason)))
            yield say(
                "There is no attention explorer of {{ model }}: {{ reason }}.",
                model=row.model,
                reason=reason,
            )


@dataclass(frozen=True)
class SinkRow:
    """The sinks of one layer, as `vitlens stats` defines them.

    A sink is a patch that receives more than the median of the keys plus 5 median absolute
    deviations. If more than _FEW of the patches do, only those that receive most count.

    mass: the share of the patches' attention on sinks, mean over images and heads.
    patches: the number of sinks, mean over images and heads.
    """

    layer: int
    mass: float
    patches: float


def sink_rows(row: ExplorerRow, arrays: ExplorerArrays) -> Iterator[SinkRow]:
    """Yield the sinks of every layer, in the images of which every head is kept."""
    special = len(row.special)
    numbers = row.numbers(arrays)
    packed_by_layer = arrays.heads.swapaxes(0, 1)
    largest_by_layer = arrays.heads_most.swapaxes(0, 1)
    for layer, packed, largest in zip(numbers, packed_by_layer, largest_by_layer):
        weights = restored(packed, largest, special, LEVELS)  # (images, heads, queries, keys)
        patch_queries = weights[..., special:, :]
        received = patch_queries.mean(-2, dtype=np.float64)  # (images, heads, keys)
        # outliers among all keys, the special tokens included; sinks are those that are patches
        median = np.median(received, -1, keepdims=True)
        excess = received - median
        deviation = np.median(np.abs(excess), -1, keepdims=True)
        is_outlier = excess > np.maximum(_DEVIATIONS * deviation, _ROUNDING * median)
        on_patches = received[..., special:]
        most_sinks = max(1, int(_FEW * on_patches.shape[-1]))
        # (images, heads, 1): the smallest of the `most_sinks` largest
        least_of_largest = np.sort(on_patches, -1)[..., -most_sinks, None]
        is_sink = is_outlier[..., special:] & (on_patches >= least_of_largest)
        mass = (on_patches * is_sink).sum(-1)
        count = is_sink.sum(-1)
        yield SinkRow(layer, float(mass.mean()), float(count.mean()))


def sinks_claim(record: Any, model: str) -> Iterator[Claim]:
    """Yield a note that bright spots of late layers are attention sinks, if there are any.

    record: as for `explorer_of`.
    model: the name of the model in the note.
    """
    for row in record.explorer:
        has_heads = row.whole > 0
        if row.model not in record.explorer_arrays or not has_heads:
            continue
        patches = row.keys[0] * row.keys[1]
        layers = list(sink_rows(row, record.explorer_arrays[row.model]))
        late_count = max(1, len(layers) // 4)
        late_layers = layers[-late_count:]
        sinks = [sink for sink in late_layers if LIMITS["sinks"].state(sink.mass) != "pass"]
        if sinks:
            strongest = max(sinks, key=lambda sink: sink.mass)
            yield Claim(
                "attention sinks",
                model,
                say(
                    "In {{ layers|ranges }} of **{{ model }}** {% if layers|length > 1 %}up to "
                    "{% endif %}{{ strongest.mass|percent }} of the attention of all patches lies "
                    "on the same few of them ({{ few }} of {{ n }}): bright spots there are "
                    "attention sinks, which need not be evidence for a class.",
                    model=model,
                    layers=[sink.layer for sink in sinks],
                    strongest=strongest,
                    few=round(strongest.patches),
                    n=patches,
                ),
                kind="answer",
                evidence="attributed",
            )


def explorer(row: ExplorerRow, arrays: ExplorerArrays, contents: ExplorerContents) -> Explorer:
    """Return the explorer of one model's arrays."""
    image_count = min(row.images, len(contents.pictures))
    images = tuple(_image(row, arrays, contents, index) for index in range(image_count))
    importance = None
    if contents.importance is not None:
        importance = np.asarray(contents.importance, float)
        if row.layers is not None:
            # `row.layers` are layer numbers, which index the table; it may end before the last ones
            layers_with_importance = [layer for layer in row.layers if layer < len(importance)]
            importance = importance[layers_with_importance]
    return Explorer(
        model=row.model,
        images=images,
        keys=row.keys,
        special=tuple(_SPECIAL.get(token, token) for token in row.special),
        queries=row.queries,
        labels=of_layers(contents.labels, row.layers),
        importance=importance,
        notes=tuple(_notes(row, len(contents.pictures))),
        words=of_layers(contents.words, row.layers),
        layers=row.layers or (),
        scales=row.scales,
        without_pairs=row.without_pairs,
    )


def of_layers(
    by_number: Sequence[Sequence[str]], layers: Sequence[int] | None
) -> tuple[tuple[str, ...], ...]:
    """Return the labels of the heads of these layers.

    by_number: labels by layer number and head.
    layers: layer numbers, None for all; those beyond the end of the table are left out.
    """
    if layers is None:
        return tuple(map(tuple, by_number))
    return tuple(tuple(by_number[layer]) for layer in layers if layer < len(by_number))


def _image(
    row: ExplorerRow, arrays: ExplorerArrays, contents: ExplorerContents, index: int
) -> ExplorerImage:
    special = len(row.special)
    head_weights = None
    layer_weights = None
    if index < row.whole:
        head_weights = restored(arrays.heads[index], arrays.heads_most[index], special, LEVELS)
    else:
        rest = index - row.whole  # the means begin after the images with every head
        layer_weights = restored(arrays.means[rest], arrays.means_most[rest], special, LEVELS)
    maps = {}
    for name, values in contents.maps.items():
        if index < len(values):
            maps[name] = np.asarray(values[index])
    facts: tuple[str, ...] = ()
    if index < len(contents.facts):
        facts = tuple(unprotected(fact) for fact in contents.facts[index])
    return ExplorerImage(
        name=Path(unprotected(contents.names[index])).name,
        picture=np.ascontiguousarray(contents.pictures[index].transpose(1, 2, 0)),
        weights=head_weights,
        layer_weights=layer_weights,
        rollout=arrays.rollout[index].astype(np.float32),
        maps=maps,
        facts=facts,
        query_vectors=_vectors_of(arrays.query_vectors, index),
        key_vectors=_vectors_of(arrays.key_vectors, index),
    )


def _vectors_of(vectors: Floats | None, index: int) -> Floats | None:
    """Return the queries or keys of one image; None if there are none."""
    if vectors is None or index >= len(vectors):
        return None
    return np.asarray(vectors[index])


def _notes(row: ExplorerRow, drawn: int) -> Iterator[str]:
    if row.images < drawn:
        yield f"The explorer has the first {row.images} of {drawn} images."
    if row.images > row.whole:
        yield (
            f"Of the first {row.whole} images every head is shown, of the other "
            f"{row.images - row.whole} the mean over the heads of each layer."
        )
    yield "Weights are kept in 8 bits: exact to 0.4 % of the largest weight of their row."
    if row.queries != row.keys:
        rows, columns = row.queries
        yield (
            f"The queries are pooled to {rows}x{columns}: each is the mean of several "
            "neighbouring patches."
        )
