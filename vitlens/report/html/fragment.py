"""The attention explorer as HTML: its data packed into the page, and a document of it alone."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from vitlens.report.explorer import Explorer, ExplorerImage, rollout_of
from vitlens.report.html import pictures
from vitlens.report.html.packing import BUDGET, Packed, in_base64, packed_explorer, quantised
from vitlens.report.html.templates import POLICY, asset, rendered
from vitlens.report.html.text import name, plain

_MAP: Final = 64  # rows and columns of a map on the page, at most
_SHAPE: Final = ("layers", "heads", "queries", "keys", "levels")  # of packed weights, for the page
_EXACT: Final = 0.0005  # an error, of the largest weight of a row, that needs no words


def explorer_fragment(explorer: Explorer) -> str:
    """Return a standalone HTML document of an explorer alone, for an <iframe srcdoc> of a notebook; it fetches
    nothing."""
    return rendered(
        "fragment.html.jinja",
        title=f"Attention explorer: {name(explorer.model)}",
        explorer=explorer_part(explorer),
        policy=POLICY,
        style=asset("style.css"),
        explorer_script=asset("explorer.js"),
    )


def explorer_part(explorer: Explorer, *, budget: int = BUDGET) -> dict[str, Any]:
    """Return an explorer packed for the page: notes, the JSON and the blocks of weights by id.

    budget: bytes of base64 for its pictures and weights.
    """
    embedded = [pictures.photograph(image.picture) for image in explorer.images]
    weights = packed_explorer(explorer, budget=budget - sum(len(picture.uri) for picture in embedded))
    notes = tuple(map(plain, explorer.notes))
    rises = explorer.importance
    blocks = tuple((_block(index), Markup(each.data)) for index, each in enumerate(weights) if each is not None)
    data = {
        "model": name(explorer.model),
        "special": [name(each) for each in explorer.special],
        "grid": explorer.keys,
        "labels": [[name(label) for label in layer] for layer in explorer.labels],
        "words": [[name(words) for words in layer] for layer in explorer.words],
        "importance": None
        if rises is None
        else [[each if np.isfinite(each) else None for each in layer] for layer in rises.tolist()],
        "notes": notes,
        "exactness": tuple(_exactness(explorer, weights)),
        "images": [
            _image(explorer, image, picture, each, _block(index))
            for index, (image, picture, each) in enumerate(zip(explorer.images, embedded, weights))
        ],
    }
    return {"notes": notes, "data": as_json(data), "blocks": blocks}


def as_json(data: Mapping[str, object]) -> Markup:
    """JSON that can stand in a script element: no "<", ">" or "&" of a name is left in it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)


def _block(index: int) -> str:
    return f"vl-weights-{index}"


def _image(
    explorer: Explorer, image: ExplorerImage, picture: pictures.Embedded, weights: Packed | None, block: str
) -> dict[str, object]:
    height, width = image.picture.shape[:2]
    return {
        "name": name(image.name),
        "facts": [plain(fact) for fact in image.facts],
        "picture": picture.uri,
        "width": width,
        "height": height,
        "weights": None if weights is None else {**{each: getattr(weights, each) for each in _SHAPE}, "block": block},
        "rollout": _rollout(explorer, image),
        "maps": [_map(plain(title), values) for title, values in image.maps.items()],
    }


def _rollout(explorer: Explorer, image: ExplorerImage) -> dict[str, object] | None:
    """Return the rollout that an image comes with, or of its weights where these were not pooled."""
    rows = image.rollout
    if rows is None and explorer.queries == explorer.keys:
        means = image.layer_weights if image.weights is None else image.weights.mean(axis=1)
        rows = None if means is None else rollout_of(np.nan_to_num(means), len(explorer.special))
    if rows is None:
        return None
    bytes_, maxima = quantised(np.nan_to_num(rows.astype(np.float32)), len(explorer.special), 255)
    return {"layers": len(rows), "levels": 255, "data": in_base64(maxima.astype("<f4").tobytes() + bytes_.tobytes())}


def _map(title: str, values: NDArray[np.floating]) -> dict[str, object]:
    """Return a raw map, from its least to its greatest value in 256 steps, at most _MAP rows and columns of block
    means."""
    grid = np.nan_to_num(np.atleast_2d(values).astype(np.float64))
    for axis in (0, 1):
        if grid.shape[axis] > _MAP:
            parts = np.array_split(grid, _MAP, axis=axis)
            grid = np.stack([part.mean(axis=axis) for part in parts], axis=axis)
    low = float(grid.min())
    high = float(grid.max())
    steps = np.round((grid - low) / ((high - low) or 1) * 255).astype(np.uint8)
    return {"name": title, "grid": grid.shape, "low": low, "high": high, "data": in_base64(steps.tobytes())}


def _exactness(explorer: Explorer, weights: tuple[Packed | None, ...]) -> Iterator[str]:
    """Yield how exact the weights of the page are."""
    known = [each for each in weights if each is not None]
    for what, some in (
        ("heads", [each for each in known if each.heads]),
        ("layer means", [each for each in known if not each.heads]),
    ):
        if not some:
            continue
        error = max(each.error for each in some)
        if error < _EXACT and some[0].queries == explorer.queries and some[0].keys == explorer.keys:
            continue  # such weights were in as many steps before
        words = (
            f"Weights of {what} are kept in {some[0].levels + 1} steps of their square root; the largest error is "
            f"{100 * error:.1f} % of the largest weight of the same row."
        )
        queries, keys = ("{}x{}".format(*grid) for grid in (some[0].queries, some[0].keys))
        if some[0].queries != explorer.queries:
            words += f" To keep the page small, their queries are averaged over {queries} blocks of patches."
        if some[0].keys != explorer.keys:
            words += f" Their keys are added up over {keys} blocks."
        yield words
