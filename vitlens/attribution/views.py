"""Maps averaged over views of an image: shifted by half a patch, and mirrored.

A view shows the same content at another place of the patch grid, so the mean of the maps, each moved back, is finer
than the grid: it has twice as many cells a side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.faithfulness.maps import AnyMaps, enlarged
from vitlens.errors import InputError
from vitlens.shapes import Images


@dataclass(frozen=True)
class View:
    """Content moved up and left by so many half patches, then mirrored or not."""

    up: int
    left: int
    mirrored: bool = False


VIEWS: Final = (
    View(0, 0), View(1, 1), View(1, 0), View(0, 1),
    View(0, 0, True), View(1, 1, True), View(1, 0, True), View(0, 1, True),
)  # fmt: skip


def require_views(count: int) -> None:
    """Raise InputError unless there are so many views."""
    if not 1 <= count <= len(VIEWS):
        raise InputError(f"expected 1 to {len(VIEWS)} views, found {count}")


def over_views(maps_of: Callable[[Images], AnyMaps], images: Images, *, views: int, cells: tuple[int, int]) -> AnyMaps:
    """The mean of the maps of the first `views` of VIEWS, each moved back; one view: its maps as they are.

    cells: rows and columns of patches, which decide the shift. The mean has twice as many cells a side as a map, or as
    many as the image where that is fewer. What a shift moves in at the edge is the image mirrored. Raises InputError.
    """
    require_views(views)
    first = maps_of(images)
    if views == 1:
        return first
    height, width = images.shape[-2:]
    half = max(1, round(height / cells[0] / 2)), max(1, round(width / cells[1] / 2))
    size = min(2 * first.shape[-2], height), min(2 * first.shape[-1], width)
    total = enlarged(first, size)
    for view in VIEWS[1:views]:
        shift = view.up * half[0], view.left * half[1]
        seen = maps_of(_viewed(images, shift, mirrored=view.mirrored))
        large = enlarged(seen.flip(-1) if view.mirrored else seen, size)
        total = total + _moved_back(large, (round(shift[0] * size[0] / height), round(shift[1] * size[1] / width)))
    return total / views


def _viewed(images: Images, shift: tuple[int, int], *, mirrored: bool) -> Images:
    """Images with their content moved up and left by so many pixels, then mirrored."""
    up, left = shift
    moved: Tensor = F.pad(images, (0, left, 0, up), mode="reflect")[..., up:, left:] if up or left else images
    return moved.flip(-1) if mirrored else moved


def _moved_back(maps: AnyMaps, shift: tuple[int, int]) -> AnyMaps:
    """Maps moved down and right by so many cells; the first rows and columns keep their own values."""
    down, right = shift
    padded: Tensor = F.pad(maps.unsqueeze(1), (right, 0, down, 0), mode="replicate").squeeze(1)
    return padded[..., : maps.shape[-2], : maps.shape[-1]]
