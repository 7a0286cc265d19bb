"""Positions of an attention layer's queries and keys in the image: grid, distances, offsets.

A windowed layer is treated window by window. Offsets are those in the image. If the patches of a
window lie apart, as in MaxViT's grids, they are multiples of the spacing.

A shifted window wraps around the edge of the map: it holds patches from two edges, with a seam
between them. Pairs across the seam are left out of the offsets. Models mask attention there, except
timm's Swin on a padded map, which attends across the seam. Distances are always those in the image.
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

    `offsets`, `energy` and `pairs` count only keys that are patches; all queries have equal weight.

    distance: the mean distance from query to key, in px.
    keys: log2 of the number of keys of a patch, mean over patches.
    received: the mean mass of each key, prefix first. It sums to 1.
    offsets: the mass at each offset. It sums to 1.
    energy: the sum of the squared weights of a query, mean over queries.
    pairs: the number of keys at each offset, mean over queries.
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

    grid: the patches (rows, columns) of the whole map, or of one window.
    pitch: the pixels (height, width) from patch to patch.
    prefix: the number of tokens before the patches.
    cls, registers: the positions of CLS and of registers in this prefix. A distillation token
        counts as a register.
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
        # as (.., query row, query column, key row, key column)
        on_grid = weights.unflatten(-1, self.grid).unflatten(-3, self.grid)
        # Sums along diagonals, one axis at a time:
        # sums[.., d, a] is the sum over r and c of on_grid[.., r, c, r + d, c + a].
        # pairs of columns first: as (.., query row, key row, column offset)
        by_column = _by_difference(on_grid.transpose(-3, -2))
        # then pairs of rows: as (.., column offset, row offset), transposed
        sums = _by_difference(by_column.movedim(-1, -3)).transpose(-2, -1)
        if self.spacing == (1, 1):
            return sums
        rows, columns = self.span
        in_image = sums.new_zeros(*sums.shape[:-2], 2 * rows - 1, 2 * columns - 1)
        in_image[..., :: self.spacing[0], :: self.spacing[1]] = sums
        return in_image

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
        """Return True for pairs of patches with equal offsets in the image and in the window.

        These are all pairs except those with padding and those across a seam.
        """
        places = self.places()
        is_patch = places >= 0
        pairs = is_patch[:, :, None] & is_patch[:, None]
        if self.windows is None:
            return pairs
        map_columns = self.windows.resolution[1]
        positions = torch.arange(self.patches)
        down, across = self.spacing
        row_and_column = (
            (down, places // map_columns, positions // self.grid[1]),
            (across, places % map_columns, positions % self.grid[1]),
        )
        for step, in_map, in_window in row_and_column:
            map_offsets = in_map[:, :, None] - in_map[:, None]  # (windows, query, key)
            window_offsets = in_window[:, None] - in_window  # (query, key)
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
        # padding has the place -1: its share goes to an extra element, which is cut off
        share_of_place = is_patch.new_zeros(rows * columns + 1)
        window_share = is_patch.sum(-1, keepdim=True) / is_patch.sum()
        share_of_place[places] = window_share.expand(places.shape)
        return share_of_place[:-1]

    @lru_cache(maxsize=32)  # noqa: B019
    def uniform(self) -> Uniform:
        """Return uniform attention in this layer."""
        pairs = self.pairs().double()
        key_counts = pairs.sum(-1)  # patches that each patch can attend to
        is_query = key_counts > 0  # False for padding
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
    """Return the geometry of one layer; None if queries or keys are not patches.

    Pooled keys, channels and a single query are not.
    """
    layout = model.anatomy.layout
    height, width = model.input_size
    if site.windows is not None:
        rows, columns = site.windows.resolution
        pitch = (height / rows, width / columns)
        return Geometry(site.windows.window, pitch, windows=site.windows)
    if site.kind != "patch":
        return None
    if layout is not None and site.keys == layout.patches:
        layout = replace(layout, prefix=())  # the model adds the prefix in a later layer
    if layout is not None and site.keys == layout.tokens:
        return of_layout(layout)
    if not model.anatomy.row_by_row:
        return None
    grid = square_grid(site.keys, model.input_size)
    if grid is None:
        return None
    rows, columns = grid
    return Geometry(grid, pitch=(height / rows, width / columns))


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
    """Return the (rows, columns) of square patches that cover an image, None if none do."""
    height, width = size
    rows = round((patches * height / width) ** 0.5)
    columns = patches // max(rows, 1)
    are_square = rows * width == columns * height  # height / rows == width / columns
    if rows * columns != patches or not are_square:
        return None
    return rows, columns


def _by_difference(pairs: Float[Tensor, "*leading query key"]) -> Float[Tensor, "*leading offset"]:
    """Return sums along the diagonals of square matrices, from key - query = 1 - n to n - 1."""
    size = pairs.shape[-1]
    steps = torch.arange(size, device=pairs.device)
    differences = steps - steps[:, None]  # key - query
    diagonal_numbers = (differences + size - 1).flatten()
    # (query x key, diagonals): a matrix product is faster here than scatter_add
    is_on_diagonal = F.one_hot(diagonal_numbers, 2 * size - 1)
    return pairs.flatten(-2) @ is_on_diagonal.to(pairs.dtype)
