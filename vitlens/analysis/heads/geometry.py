"""Positions of an attention layer's queries and keys in the image: grid, distances, offsets.

A windowed layer is treated window by window. Within a window, offsets are those in the image:
multiples of the spacing where the patches of a window lie apart, as in MaxViT's grids. Pairs across
the seam of a shifted window are left out of the offsets. Models mask attention there, except timm's
Swin on a padded map: its mask misses the seam, and distances are those in the image.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.lens.call import received, window_index
from vitlens.lens.site import Site, Windows
from vitlens.models.model import Model
from vitlens.shapes import TokenLayout


@dataclass(frozen=True)
class Uniform:
    """Uniform attention of patches on the keys that they can attend to.

    distance: mean over patches, px.
    keys: log2 of the number of keys of a patch, mean over patches.
    received: mean mass of each key, prefix first, summing to 1.

    The rest is about the keys that are patches, with all rows of equal weight.

    offsets: the mass at each offset, summing to 1.
    energy: the mean over rows of the sum of squared weights.
    pairs: the mean number of keys at each offset.
    """

    distance: float
    keys: float
    received: Float[Tensor, " keys"]
    offsets: Float[Tensor, "down across"]
    energy: float
    pairs: Float[Tensor, "down across"]


@dataclass(frozen=True)
class Geometry:
    """The tokens of one layer in the image.

    grid: patches (rows, columns) of the whole map, or of one window.
    pitch: pixels (height, width) from patch to patch.
    prefix: the number of tokens before the patches.
    cls, registers: positions of CLS and of registers in this prefix (a distillation token counts as
        a register).
    windows: the division of the map into windows, or None.
    """

    grid: tuple[int, int]
    pitch: tuple[float, float]
    prefix: int = 0
    cls: tuple[int, ...] = ()
    registers: tuple[int, ...] = ()
    windows: Windows | None = None

    @property
    def patches(self) -> int:
        """Return the number of patches of the map, or of one window."""
        return self.grid[0] * self.grid[1]

    @property
    def map_grid(self) -> tuple[int, int]:
        """Return the patches (rows, columns) of the whole map."""
        return self.grid if self.windows is None else self.windows.resolution

    @property
    def spacing(self) -> tuple[int, int]:
        """Return the steps (down, across) in the image between adjacent patches of a window."""
        if self.windows is None or not self.windows.dilated:
            return 1, 1
        rows, columns = self.windows.resolution
        return rows // self.grid[0], columns // self.grid[1]

    @property
    def span(self) -> tuple[int, int]:
        """Return the extent (rows, columns) of a window in the image, in patches."""
        rows, columns = self.grid
        down, across = self.spacing
        return (rows - 1) * down + 1, (columns - 1) * across + 1

    def by_offset(
        self, weights: Float[Tensor, "*leading query key"]
    ) -> Float[Tensor, "*leading down across"]:
        """Sum the weights between patches by offset in the image, key minus query.

        Returns (.., 2 rows - 1, 2 columns - 1), where rows and columns are those of the span.
        Offset 0 is in the middle. Offsets that no two patches of a window have are 0.
        """
        # (.., query row, query column, key row, key column)
        on_grid = weights.unflatten(-1, self.grid).unflatten(-3, self.grid)
        by_column = _by_difference(on_grid.transpose(-3, -2))  # (.., rows, rows, 2 columns - 1)
        sums = _by_difference(by_column.movedim(-1, -3)).transpose(-2, -1)
        if self.spacing == (1, 1):
            return sums
        rows, columns = self.span
        spread = sums.new_zeros(*sums.shape[:-2], 2 * rows - 1, 2 * columns - 1)
        spread[..., :: self.spacing[0], :: self.spacing[1]] = sums
        return spread

    @lru_cache(maxsize=32)  # noqa: B019
    def distances(self) -> Float[Tensor, "calls query key"]:
        """Return the distances in px between the centres of all patches; arbitrary for padding."""
        places = self.places()
        columns = self.map_grid[1]
        positions = torch.stack((places // columns, places % columns), -1)
        centres = positions * torch.tensor(self.pitch, dtype=torch.float64)
        return (centres[:, :, None] - centres[:, None]).square().sum(-1).sqrt()

    @lru_cache(maxsize=32)  # noqa: B019
    def places(self) -> Int[Tensor, "calls patches"]:
        """Return the patch of the map at each position of each window; -1 for padding.

        Without windows there is one row.
        """
        if self.windows is None:
            return torch.arange(self.patches)[None]
        return window_index(self.windows)

    @lru_cache(maxsize=32)  # noqa: B019
    def pairs(self) -> Bool[Tensor, "calls query key"]:
        """Return the pairs of patches with equal offsets in the image and in the window.

        These are all pairs but those with padding, and those across a seam.
        """
        places = self.places()
        is_patch = places >= 0
        pairs = is_patch[:, :, None] & is_patch[:, None]
        if self.windows is None:
            return pairs
        map_columns = self.windows.resolution[1]
        positions = torch.arange(self.patches)
        down, across = self.spacing
        for step, in_map, in_window in (
            (down, places // map_columns, positions // self.grid[1]),
            (across, places % map_columns, positions % self.grid[1]),
        ):
            map_offsets = in_map[:, :, None] - in_map[:, None]
            window_offsets = in_window[:, None] - in_window
            pairs = pairs & (map_offsets == step * window_offsets)
        return pairs

    @lru_cache(maxsize=32)  # noqa: B019
    def share_of_queries(self) -> Float[Tensor, " keys"]:
        """Return the share of all patches that can attend to each key.

        In windows these are the patches of its window.
        """
        if self.windows is None:
            return torch.ones(self.prefix + self.patches, dtype=torch.float64)
        places = self.places()
        is_patch = (places >= 0).double()
        rows, columns = self.map_grid
        share = is_patch.new_zeros(rows * columns + 1)  # the last is for padding
        window_share = is_patch.sum(-1, keepdim=True) / is_patch.sum()
        share[places] = window_share.expand(places.shape)
        return share[:-1]

    @lru_cache(maxsize=32)  # noqa: B019
    def uniform(self) -> Uniform:
        """Return uniform attention in this layer."""
        pairs = self.pairs().double()
        key_counts = pairs.sum(-1)  # patches to which each patch can attend
        is_query = key_counts > 0  # all but padding
        weights = pairs / key_counts.clamp_min(1)[..., None]
        if self.windows is None:
            tokens = self.prefix + self.patches
            mass = torch.full((tokens,), 1 / tokens, dtype=torch.float64)
        else:
            mass = received(weights[:, None], self.windows).flatten() * self.share_of_queries()
        queries = is_query.sum()
        return Uniform(
            distance=float((weights * self.distances()).sum() / queries),
            keys=float((key_counts[is_query] + self.prefix).log2().mean()),
            received=mass,
            offsets=self.by_offset(weights.sum(0)) / queries,
            energy=float(weights.square().sum() / queries),
            pairs=self.by_offset(pairs.sum(0)) / queries,
        )


def geometry_of(site: Site, model: Model) -> Geometry | None:
    """Return the geometry of one layer; None where queries or keys are not patches.

    They are not for pooled keys, for channels, and for a single query.
    """
    layout = model.anatomy.layout
    height, width = model.input_size
    if site.windows is not None:
        rows, columns = site.windows.resolution
        return Geometry(site.windows.window, (height / rows, width / columns), windows=site.windows)
    if site.kind != "patch":
        return None
    if layout is not None and site.keys == layout.patches:  # the prefix is added in a later layer
        layout = replace(layout, prefix=())
    if layout is not None and site.keys == layout.tokens:
        return of_layout(layout)
    if not model.anatomy.row_by_row:
        return None
    grid = square_grid(site.keys, model.input_size)
    if grid is None:
        return None
    return Geometry(grid, (height / grid[0], width / grid[1]))


def of_layout(layout: TokenLayout) -> Geometry:
    """Return the geometry of a layer in which the tokens of one grid attend to each other."""
    height, width = layout.patch_size
    return Geometry(
        layout.grid,
        pitch=(float(height), float(width)),
        prefix=len(layout.prefix),
        cls=layout.positions("cls"),
        registers=layout.positions("register") + layout.positions("distillation"),
    )


def square_grid(patches: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the (rows, columns) of square patches that cover an image, None without them."""
    height, width = size
    rows = round((patches * height / width) ** 0.5)
    columns = patches // max(rows, 1)
    if rows * columns != patches or rows * width != columns * height:
        return None
    return rows, columns


def _by_difference(pairs: Float[Tensor, "*leading query key"]) -> Float[Tensor, "*leading offset"]:
    """Return sums along the diagonals of square matrices, from key - query = 1 - n to n - 1."""
    size = pairs.shape[-1]
    steps = torch.arange(size, device=pairs.device)
    differences = steps - steps[:, None]
    diagonals = F.one_hot((differences + size - 1).flatten(), 2 * size - 1)
    # a matrix product is faster here than scatter_add
    return pairs.flatten(-2) @ diagonals.to(pairs.dtype)
