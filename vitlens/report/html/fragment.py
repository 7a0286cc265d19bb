"""The attention explorer as HTML: its data in a page, or a document with nothing else."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vitlens.report.explorer import Explorer, ExplorerImage, rollout_of
from vitlens.report.html import pictures
from vitlens.report.html.packing import (
    BUDGET,
    COMPONENT_STEPS,
    VECTORS,
    Packed,
    in_base64,
    packed_explorer,
    packed_vectors,
    quantised,
    restored_vectors,
)
from vitlens.report.html.templates import POLICY, asset, explorer_script, rendered
from vitlens.report.html.text import name, plain

_MAP: Final = 64  # most rows and columns of a map on the page
# fields of packed weights that the page needs
_SHAPE: Final = ("layers", "heads", "queries", "keys", "levels")
_LEVELS: Final = 255  # the largest value of a byte
_EXACT: Final = 0.0005  # the page does not mention a smaller error, as a share of a row's maximum
_COMPRESSION: Final = 6  # level of zlib, its default between speed and size


def explorer_fragment(explorer: Explorer) -> str:
    """Return an HTML document with only an explorer, for an iframe of a notebook.

    It fetches nothing.
    """
    return rendered(
        "fragment.html.jinja",
        title=f"Attention explorer: {name(explorer.model)}",
        explorer=explorer_part(explorer),
        policy=POLICY,
        style=asset("style.css"),
        explorer_script=explorer_script(),
    )


def explorer_part(
    explorer: Explorer, *, budget: int = BUDGET, spare: int = VECTORS
) -> dict[str, Any]:
    """Return an explorer packed for the page: notes, the JSON and the blocks of data by id.

    budget: bytes of base64 for its pictures and weights.
    spare: more bytes of base64, for queries and keys.
    """
    photographs = [pictures.photograph(image.picture) for image in explorer.images]
    size_of_pictures = sum(len(photograph.uri) for photograph in photographs)
    all_weights = packed_explorer(explorer, budget=budget - size_of_pictures)
    notes = tuple(map(plain, explorer.notes))
    images = []
    blocks = []  # (id, content) of each block of data, which is a script element
    for index, (image, photograph, weights) in enumerate(
        zip(explorer.images, photographs, all_weights)
    ):
        block = f"vl-weights-{index}"
        images.append(_image(explorer, image, photograph, weights, block))
        if weights is not None:
            blocks.append((block, Markup(weights.data)))
    used = size_of_pictures + sum(len(content) for _, content in blocks)
    # vectors get what pictures and weights leave of budget and spare, at most VECTORS
    vectors = list(_vectors(explorer, room=min(VECTORS, budget + spare - used)))
    for index, content in enumerate(vectors):
        block = f"vl-vectors-{index}"
        images[index]["vectors"] = block
        blocks.append((block, content))
    data: dict[str, object] = {
        "model": name(explorer.model),
        "special": list(map(name, explorer.special)),
        "grid": explorer.keys,
        "labels": _names_by_layer(explorer.labels),
        "words": _names_by_layer(explorer.words),
        "importance": _importance(explorer.importance),
        "notes": notes,
        "exactness": tuple(_exactness(explorer, all_weights)),
        "images": images,
        "pairs": _pairs(explorer, images_with_vectors=len(vectors)),
    }
    if explorer.layers:
        data["layers"] = explorer.layers
    return {"notes": notes, "data": as_json(data), "blocks": tuple(blocks)}


def _names_by_layer(layers: Sequence[Sequence[str]]) -> list[list[str]]:
    return [list(map(name, layer)) for layer in layers]


def _importance(rises: NDArray[np.floating] | None) -> list[list[float | None]] | None:
    """Return the importance of heads for JSON, which has no NaN; None if there is none."""
    if rises is None:
        return None
    layers = []
    for layer in rises.tolist():
        layers.append([rise if np.isfinite(rise) else None for rise in layer])
    return layers


def as_json(data: Mapping[str, object]) -> Markup:
    """Return JSON for a script element, in which every "<", ">" and "&" is escaped."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)


def _image(
    explorer: Explorer,
    image: ExplorerImage,
    picture: pictures.Embedded,
    weights: Packed | None,
    block: str,
) -> dict[str, object]:
    """Return an image for JSON; block: the id of the block that holds its weights."""
    height, width = image.picture.shape[:2]
    weights_data = None
    if weights is not None:
        weights_data = {field: getattr(weights, field) for field in _SHAPE}
        weights_data["block"] = block
    return {
        "name": name(image.name),
        "facts": list(map(plain, image.facts)),
        "picture": picture.uri,
        "width": width,
        "height": height,
        "weights": weights_data,
        "rollout": _rollout(explorer, image),
        "maps": [_map(plain(title), values) for title, values in image.maps.items()],
    }


def _vectors(explorer: Explorer, *, room: int) -> Iterator[Markup]:
    """Yield the queries and keys of the first images, as many as fit into `room` bytes."""
    for image in explorer.images:
        if image.query_vectors is None or image.key_vectors is None:
            return
        content = packed_vectors(image.query_vectors) + packed_vectors(image.key_vectors)
        block = in_base64(zlib.compress(content, _COMPRESSION))
        room -= len(block)
        if room < 0:
            return
        yield Markup(block)


def _pairs(explorer: Explorer, *, images_with_vectors: int) -> dict[str, object]:
    """Return the shape of the queries and keys on the page, and a note on those left out.

    images_with_vectors: the number of images with queries and keys on the page.
    """
    if not images_with_vectors:
        reason = "there is no room for them on this page"
        if not explorer.scales:  # the explorer has none at all
            reason = explorer.without_pairs or "this report was measured without them"
        return {"note": f"No queries and keys are kept: {name(reason)}."}
    first = explorer.images[0]
    assert first.query_vectors is not None
    layers, heads, tokens, dim = first.query_vectors.shape
    return {
        "layers": layers,
        "heads": heads,
        "tokens": tokens,
        "dim": dim,
        "scales": explorer.scales,
        "steps": COMPONENT_STEPS,
        "note": " ".join(_pair_notes(explorer, images_with_vectors)),
    }


def _pair_notes(explorer: Explorer, images_with_vectors: int) -> Iterator[str]:
    """Yield sentences on what is left out, and on the error of weights from packed vectors."""
    images = explorer.images[:images_with_vectors]
    first = images[0]
    assert first.query_vectors is not None
    if first.weights is not None:
        layers = len(first.query_vectors)
        if layers < len(first.weights):
            yield f"Queries and keys are kept of the last {layers} layers, to keep the page small."
        error = max(_error_of_vectors(image, explorer.scales) for image in images)
        yield (
            f"Components are kept in {2 * COMPONENT_STEPS + 1:,} steps. The weights that follow "
            f"from them differ by at most {100 * error:.1f} % of the largest weight "
            "of the same query."
        )
    if images_with_vectors < len(explorer.images):
        yield (
            f"Images with queries and keys: the first {images_with_vectors} of "
            f"{len(explorer.images)}."
        )


def _error_of_vectors(image: ExplorerImage, scales: Sequence[float]) -> float:
    """Return the largest error of weights from packed vectors, as a share of a row's maximum.

    It is 0 for an image without weights to compare them with.

    scales: the factor of the scores of each layer with vectors.
    """
    if image.weights is None:
        return 0.0
    assert image.query_vectors is not None
    assert image.key_vectors is not None
    layers = len(image.query_vectors)
    weights = image.weights[-layers:]  # (layers, heads, queries, keys)
    queries = restored_vectors(image.query_vectors)  # (layers, heads, tokens, dim)
    keys = restored_vectors(image.key_vectors)
    # the page computes weights from packed vectors in the same way
    scores = queries @ keys.swapaxes(-1, -2) * np.asarray(scales)[:, None, None, None]
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    restored_weights = powers / powers.sum(axis=-1, keepdims=True)
    errors = np.abs(restored_weights - weights).max(axis=-1) / weights.max(axis=-1)
    return float(errors.max())


def _rollout(explorer: Explorer, image: ExplorerImage) -> dict[str, object] | None:
    """Return the rollout of an image for the page.

    If the image has none, it is computed from weights, unless their queries were pooled.
    """
    rows = image.rollout
    if rows is None and explorer.queries == explorer.keys:
        rows = _computed_rollout(image, len(explorer.special))
    if rows is None:
        return None
    bytes_, maxima = quantised(
        np.nan_to_num(rows.astype(np.float32)), len(explorer.special), _LEVELS
    )
    content = maxima.astype("<f4").tobytes() + bytes_.tobytes()
    return {"layers": len(rows), "levels": _LEVELS, "data": in_base64(content)}


def _computed_rollout(image: ExplorerImage, special: int) -> NDArray[np.floating] | None:
    means = image.layer_weights
    if image.weights is not None:
        means = image.weights.mean(axis=1)
    if means is None:
        return None
    return rollout_of(np.nan_to_num(means), special)


def _map(title: str, values: NDArray[np.floating]) -> dict[str, object]:
    """Return a raw map in 256 steps from its smallest to its largest value.

    A map of more than _MAP rows or columns is averaged over blocks.
    """
    grid = np.nan_to_num(np.atleast_2d(values).astype(np.float64))
    for axis in (0, 1):
        if grid.shape[axis] > _MAP:
            parts = np.array_split(grid, _MAP, axis=axis)
            grid = np.stack([part.mean(axis=axis) for part in parts], axis=axis)
    low = float(grid.min())
    high = float(grid.max())
    extent = (high - low) or 1.0  # a constant map has only zeros
    steps = np.round((grid - low) / extent * _LEVELS).astype(np.uint8)
    return {
        "name": title,
        "grid": grid.shape,
        "low": low,
        "high": high,
        "data": in_base64(steps.tobytes()),
    }


def _exactness(explorer: Explorer, weights: tuple[Packed | None, ...]) -> Iterator[str]:
    """Yield sentences on the exactness of the weights of heads, and of layer means."""
    head_weights: list[Packed] = []
    layer_means: list[Packed] = []
    for packed in weights:
        if packed is None:
            continue
        if packed.heads:
            head_weights.append(packed)
        else:
            layer_means.append(packed)
    if head_weights:
        yield from _exactness_of("heads", explorer, head_weights)
    if layer_means:
        yield from _exactness_of("layer means", explorer, layer_means)


def _exactness_of(kind: str, explorer: Explorer, weights: Sequence[Packed]) -> Iterator[str]:
    first = weights[0]
    error = max(packed.error for packed in weights)
    has_all_queries = first.queries == explorer.queries
    has_all_keys = first.keys == explorer.keys
    if error < _EXACT and has_all_queries and has_all_keys:
        return
    text = (
        f"Weights of {kind} are kept in {first.levels + 1} steps of their square root; the largest "
        f"error is {100 * error:.1f} % of the largest weight of the same row."
    )
    if not has_all_queries:
        rows, columns = first.queries
        text += (
            f" To keep the page small, their queries are averaged over {rows}x{columns} "
            "blocks of patches."
        )
    if not has_all_keys:
        rows, columns = first.keys
        text += f" Their keys are added up over {rows}x{columns} blocks."
    yield text
