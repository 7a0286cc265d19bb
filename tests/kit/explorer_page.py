"""The data of a page's attention explorer, decoded as explorer.js in vitlens/report/html does."""

import json
import re
import zlib
from base64 import b64decode
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Shown = NDArray[np.float64]


def shown_data(page: str) -> dict[str, Any]:
    """Return the JSON in the page."""
    data: dict[str, Any] = json.loads(_script(page, "vl-explorer"))
    return data


def shown_weights(page: str, image: int) -> Shown | None:
    """Return the weights (layers, heads, queries, keys) of one image, or None without any.

    Layer means count as one head.
    """
    data = shown_data(page)
    packed = data["images"][image]["weights"]
    special = len(data["special"])
    if packed is None:
        return None
    queries = special + packed["queries"][0] * packed["queries"][1]
    keys = special + packed["keys"][0] * packed["keys"][1]
    rows = (packed["layers"], max(packed["heads"], 1), queries)
    content = zlib.decompress(b64decode(_script(page, packed["block"])))
    return _restored(content, rows, keys=keys, special=special, levels=packed["levels"])


def shown_rollout(page: str, image: int) -> Shown | None:
    """Return the rollout (layers, keys) of one image."""
    data = shown_data(page)
    packed = data["images"][image]["rollout"]
    special = len(data["special"])
    if packed is None:
        return None
    keys = special + data["grid"][0] * data["grid"][1]
    rows = (packed["layers"],)
    content = b64decode(packed["data"])
    return _restored(content, rows, keys=keys, special=special, levels=packed["levels"])


def shown_map(page: str, image: int, name: str) -> Shown:
    """Return a map of one image by its name, from its least to its greatest value."""
    maps = shown_data(page)["images"][image]["maps"]
    (packed,) = [entry for entry in maps if entry["name"] == name]
    steps = np.frombuffer(b64decode(packed["data"]), np.uint8).reshape(packed["grid"])
    span = packed["high"] - packed["low"]
    return np.asarray(packed["low"] + span * steps / 255)


def picture_of(uri: str) -> Image.Image:
    """Return a picture that a page holds."""
    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    return Image.open(BytesIO(b64decode(data)))


def _script(page: str, name: str) -> str:
    (content,) = re.findall(rf'<script type="[a-z/]+" id="{name}">(.*?)</script>', page, re.DOTALL)
    return str(content)


def _restored(
    content: bytes, rows: tuple[int, ...], *, keys: int, special: int, levels: int
) -> Shown:
    """Return weights (*rows, keys) from bytes: two maxima of each row, then a step for each key.

    A step is the square root of the share of the row's maximum. Special tokens, which come first,
    have another maximum than patches.
    """
    maxima = np.frombuffer(content, "<f4", count=2 * int(np.prod(rows))).reshape(*rows, 2)
    steps = np.frombuffer(content, np.uint8, offset=maxima.nbytes).reshape(*rows, keys)
    is_special = np.arange(keys) < special
    maximum_of_key = np.where(is_special, maxima[..., :1], maxima[..., 1:])
    return np.asarray(maximum_of_key * (steps / levels) ** 2, np.float64)


def shown_vectors(page: str, image: int) -> tuple[Shown, Shown] | None:
    """Return queries and keys (last layers, heads, tokens, head_dim) of one image."""
    data = shown_data(page)
    shape = data["pairs"]
    block = data["images"][image].get("vectors")
    if block is None:
        return None
    content = zlib.decompress(b64decode(_script(page, block)))
    half = len(content) // 2
    return _vectors(content[:half], shape), _vectors(content[half:], shape)


def _vectors(content: bytes, shape: dict[str, Any]) -> Shown:
    """Return vectors from bytes: the largest component of each, then the high bytes of all steps,
    then the low bytes.
    """
    sizes = (shape["layers"], shape["heads"], shape["tokens"], shape["dim"])
    count = int(np.prod(sizes))  # components of all vectors
    largest = np.frombuffer(content, "<f4", count=count // shape["dim"])
    high = np.frombuffer(content, np.int8, count=count, offset=largest.nbytes)
    low = np.frombuffer(content, np.uint8, count=count, offset=largest.nbytes + count)
    steps = 256 * high.astype(np.float64) + low
    scale = largest.reshape(*sizes[:-1], 1) / shape["steps"]
    return np.asarray(steps.reshape(sizes) * scale, np.float64)
