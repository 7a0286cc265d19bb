"""Numbers with gaps: NaN where a layer has no such head, and what is drawn there."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Final

import numpy as np
from matplotlib.patches import Patch, Rectangle
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array

MOST: Final = 6  # panels that a page holds


def as_gapped(values: ArrayLike, *, name: str, axes: Sequence[str]) -> Array:
    """As as_array, with the same errors, but NaN stays where there is no value."""
    detach = getattr(values, "detach", None)  # a torch tensor, without importing torch
    array: Array = np.asarray(values if detach is None else detach().cpu().double(), dtype=np.float64)
    as_array(np.where(np.isnan(array), 0.0, array), name=name, axes=axes)
    return array


def as_measured(values: ArrayLike, *, name: str, axes: Sequence[str]) -> Array:
    """As as_gapped, with the same errors and one more where every number is NaN."""
    array = as_gapped(values, name=name, axes=axes)
    if np.isnan(array).all():
        raise InputError(f"expected a number in {name}, found only NaN; leave it out")
    return array


def blank(corner: tuple[float, float] = (0.0, 0.0), width: float = 1.0, height: float = 1.0, **options: Any) -> Patch:
    """What stands where there is no value, behind a map or in a legend."""
    look: dict[str, Any] = {"hatch": "//////", "facecolor": "#E0E0E0", "edgecolor": "#A8A8A8", "linewidth": 0}
    return Rectangle(corner, width, height, **look, **options)


def require_few(panels: Sized) -> None:
    """Raise InputError for no panel, or for more than a page holds."""
    if not 1 <= len(panels) <= MOST:
        raise InputError(f"expected 1 to {MOST} statistics, found {len(panels)}; draw them in several figures")


def require_known(names: Iterable[str], maps: Mapping[str, Array]) -> None:
    """Raise InputError unless all names are those of maps."""
    wrong = [name for name in names if name not in maps]
    if wrong:
        raise InputError(f"expected names of the statistics {list(maps)}, found {wrong}")


def require_shape(found: Array | NDArray[np.bool_], like: Array, name: str) -> None:
    """Raise InputError for another shape."""
    if found.shape != like.shape:
        raise InputError(f"expected {name} of shape {like.shape}, found {found.shape}")
