"""Arrays with gaps: NaN where a layer has no such head, drawn as a hatched patch."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Final

import numpy as np
from matplotlib.patches import Patch, Rectangle
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError
from vitlens.figures.inputs import Array, as_array

MOST: Final = 6  # panels on a page


def as_array_with_gaps(values: ArrayLike, *, name: str, axes: Sequence[str]) -> Array:
    """As as_array, with the same errors, but NaN is allowed where there is no value."""
    detach = getattr(values, "detach", None)  # a torch tensor, without importing torch
    array: Array = np.asarray(values if detach is None else detach().cpu().double(), dtype=np.float64)
    as_array(np.where(np.isnan(array), 0.0, array), name=name, axes=axes)
    return array


def as_measured(values: ArrayLike, *, name: str, axes: Sequence[str]) -> Array:
    """As as_array_with_gaps, with the same errors and one more where every number is NaN."""
    array = as_array_with_gaps(values, name=name, axes=axes)
    if np.isnan(array).all():
        raise InputError(f"expected a number in {name}, found only NaN; leave it out")
    return array


def no_value_patch(
    corner: tuple[float, float] = (0.0, 0.0), width: float = 1.0, height: float = 1.0, **options: Any
) -> Patch:
    """A hatched patch for cells without a value, behind a map or in a legend."""
    style: dict[str, Any] = {"hatch": "//////", "facecolor": "#E0E0E0", "edgecolor": "#A8A8A8", "linewidth": 0}
    return Rectangle(corner, width, height, **style, **options)


def require_panel_count(panels: Sized) -> None:
    """Raise InputError for no panel, or for more than fit on a page."""
    if not 1 <= len(panels) <= MOST:
        raise InputError(f"expected 1 to {MOST} statistics, found {len(panels)}; draw them in several figures")


def require_known(names: Iterable[str], maps: Mapping[str, Array]) -> None:
    """Raise InputError unless every name is that of a map."""
    unknown = [name for name in names if name not in maps]
    if unknown:
        raise InputError(f"expected names of the statistics {list(maps)}, found {unknown}")


def require_shape(values: Array | NDArray[np.bool_], like: Array, name: str) -> None:
    """Raise InputError unless values have the shape of `like`."""
    if values.shape != like.shape:
        raise InputError(f"expected {name} of shape {like.shape}, found {values.shape}")
