"""The explorer of attention weights that are given as an array: of any model, which is not run here."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt, prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.archives import Bounds
from vitlens.commands.shared.explorer import LEVELS, ExplorerArrays, ExplorerRow, Shown
from vitlens.commands.shared.explorer import explorer as explorer_of_arrays
from vitlens.commands.shared.explorer_measure import ExplorerView
from vitlens.data.given import read_pictures
from vitlens.errors import InputError
from vitlens.preprocessing import Preprocessing
from vitlens.report.explorer import pooled, rollout_of
from vitlens.report.html.packing import quantised

SIDE: Final = 336  # px of the picture
MOST_PREFIX: Final = 16  # tokens before the patches that are looked for
TOLERANCE: Final = 0.01  # of a row's sum: half precision keeps it
MOST_TOKENS: Final = 4112  # of an image: 64x64 patches
_KEPT: Final = 128 << 20  # weights that an explorer holds, at most; twice as many in the means over heads
_FORM: Final = "(layers, heads, tokens, tokens)"


@dataclass(frozen=True)
class GivenAttention:
    """An explorer's row and arrays of given weights. means (layers, tokens, tokens): over heads; prefix: tokens before
    the patches; rows: of weights, in all; off: of them those whose sum is not 1; least, most: sums of rows."""

    row: ExplorerRow
    arrays: ExplorerArrays
    means: NDArray[np.float32]
    prefix: int
    rows: int
    off: int
    least: float
    most: float


def read_attention(path: Path) -> NDArray[np.floating[Any]]:
    """The array in an .npy, mapped into memory and not read yet; nothing is unpickled.

    Raises InputError, one line, for what is no array of floating-point numbers, and for one beyond the bounds.
    """
    if not path.is_file():
        raise InputError(f"expected attention weights in an .npy, found no file at {path}; write one with numpy.save")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises several types for what is no array, is damaged, or holds objects
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise InputError(
            f"expected a plain array in {path}, found: {reason}; write it with numpy.save(FILE, weights)"
        ) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InputError(f"expected one array in {path}, found an .npz of several; write it with numpy.save")
    return array


def given_attention(
    weights: NDArray[np.floating[Any]], *, prefix: int | None = None, name: str = "attention", option: str = "prefix"
) -> GivenAttention:
    """What an explorer shows of weights (layers, heads, tokens, tokens) of one image, each row over the keys.

    prefix: tokens before the patches (None: the fewest that leave a square of patches); name: of the weights, for
    display; option: how the caller gives the prefix. Raises InputError for another shape or type, weights below 0 or
    not finite, tokens that are no square of patches, and arrays that are too large.
    """
    _require_form(weights)
    layers, heads, tokens, _ = weights.shape
    special = _prefix(tokens, prefix, option)
    side = isqrt(tokens - special)
    grid = (side, side)
    queries = pooled(np.zeros((tokens, 1)), special, grid)[1]
    kept = layers * heads * (special + prod(queries)) * tokens
    if max(kept, layers * tokens * tokens // 2) > _KEPT:
        raise InputError(
            f"expected at most {_KEPT:,} weights to show, found more in {layers} layers and {heads} heads; save "
            "some layers: weights[-4:]"
        )
    packed, means, sums = [], [], []
    for layer in range(layers):
        own = np.asarray(weights[layer], np.float32)
        if not np.isfinite(own).all():
            raise InputError(f"expected finite weights, found others in layer {layer}; save them after the softmax")
        if own.min() < 0:
            raise InputError(
                f"expected weights of at least 0, found {own.min():.3g} in layer {layer}; save them after the softmax"
            )
        sums.append(own.sum(-1, dtype=np.float64))
        fewer, _ = pooled(own, special, grid)
        packed.append(quantised(fewer, special, LEVELS))
        means.append(own.mean(0))
    every, of_layers = np.stack(sums), np.stack(means)
    heads_, most = (np.stack(each)[None] for each in zip(*packed))
    none = np.zeros((0, *heads_.shape[1:2], *heads_.shape[3:]), np.uint8)  # there is no image without its heads
    rollout = rollout_of(of_layers, special)[None].astype(np.float16)
    arrays = ExplorerArrays(heads_, most, none, np.zeros((*none.shape[:3], 2), np.float32), rollout)
    names = tuple(f"prefix {number}" for number in range(special)) if special > 1 else ("CLS",) * special
    return GivenAttention(
        ExplorerRow(name, "", grid, queries, names, 1, 1), arrays, of_layers, special, every.size,
        int((np.abs(every - 1) > TOLERANCE).sum()), float(every.min()), float(every.max()),
    )  # fmt: skip


def _require_form(weights: NDArray[Any]) -> None:
    """Raise InputError for another shape or type than that of attention weights, or too many bytes."""
    shape = weights.shape
    if weights.dtype.kind != "f":
        raise InputError(f"expected floating-point weights {_FORM}, found {weights.dtype}; save weights.astype('f4')")
    if len(shape) != 4 or shape[2] != shape[3] or not weights.size:
        fix = {3: "save weights[None]", 5: "save one image: weights[:, 0]"}.get(len(shape), "save those of one image")
        raise InputError(f"expected weights {_FORM}, found {shape}; {fix}")
    if shape[2] > MOST_TOKENS:
        raise InputError(f"expected at most {MOST_TOKENS:,} tokens, found {shape[2]:,}; save those of a smaller image")
    if weights.nbytes > Bounds().size:
        raise InputError(
            f"expected at most {Bounds().size >> 30} GiB of weights, found {weights.nbytes / (1 << 30):.1f}; save some "
            "layers: weights[-4:]"
        )


def _prefix(tokens: int, prefix: int | None, option: str) -> int:
    """The number of tokens before the patches. Raises InputError where the others are no square."""
    if prefix is not None:
        if prefix < 0 or prefix >= tokens or isqrt(tokens - prefix) ** 2 != tokens - prefix:
            raise InputError(
                f"expected {option} {prefix} to leave a square of patches, found {tokens} - {prefix}; try {option} "
                f"{tokens - isqrt(tokens) ** 2}"
            )
        return prefix
    squares = (each for each in range(min(MOST_PREFIX + 1, tokens)) if isqrt(tokens - each) ** 2 == tokens - each)
    found = next(squares, None)
    if found is None:
        raise InputError(
            f"expected a square of patches after at most {MOST_PREFIX} tokens, found {tokens} tokens; give {option} N"
        )
    return found


def picture_of(image: Any) -> NDArray[np.uint8]:
    """The centre square of one picture, (3, SIDE, SIDE). Raises DataError for what is no picture, InputError for
    several."""
    pixels = read_pictures(image, Preprocessing((SIDE, SIDE), SIDE, "bicubic"))
    if len(pixels) != 1:
        raise InputError(f"expected one image, of which the weights are, found {len(pixels)}")
    return np.asarray(pixels[0].cpu().numpy())


def notes_of(given: GivenAttention) -> Iterator[str]:
    """Where the rows do not sum to 1."""
    if given.off:
        yield (
            f"{given.off:,} of {given.rows:,} rows do not sum to 1 (sums from {given.least:.3g} to {given.most:.3g}): "
            "a part of the keys may be missing, or dropout was on."
        )


def attention_explorer(
    weights: Tensor | NDArray[np.floating[Any]], image: Any, *, prefix: int | None = None, name: str = "attention"
) -> ExplorerView:
    """The explorer of attention weights of any model: where every head looks from a patch, and who looks at it.

    weights: (layers, heads, tokens, tokens) of one image, after the softmax, the patches row by row after the prefix;
    image: that image, in any form that `vitlens.images` takes, of which the centre square is shown; prefix: tokens
    before the patches (None: the fewest that leave a square of patches); name: of the model. A notebook shows the
    result; `.save("page.html")` writes it. Raises InputError where shapes do not fit, and for weights below 0.

    >>> import numpy, vitlens
    >>> weights = numpy.full((2, 3, 17, 17), 1 / 17)
    >>> vitlens.attention_explorer(weights, numpy.zeros((32, 32, 3), dtype="uint8"))
    ExplorerView
      model          attention
      images         1
      layers, heads  2, 3
      patches        4x4
      maps           none
    """
    array = weights.detach().cpu().float().numpy() if isinstance(weights, torch.Tensor) else np.asarray(weights)
    given = given_attention(array, prefix=prefix, name=name)
    shown = Shown(picture_of(image)[None], ["image"], [tuple(notes_of(given))])
    return ExplorerView(explorer_of_arrays(given.row, given.arrays, shown))
