"""The positions of an attention layer's queries and keys in the image: grid, distances in pixels,
sums by offset.

A windowed layer is treated window by window: within a window, offsets are those in the image
(multiples of the spacing where the patches of a window lie apart, as in MaxViT's grids), except
across the seam of a shifted window, where the model masks attention (but for timm's Swin on a
padded map, whose mask misses the seam: distances are then those in the image, and such pairs are
left out of the offsets).
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

    distance: mean over patches, px; keys: log2 of the number of keys of a patch, mean over patches;
    received: mean mass of each key, prefix first, summing to 1. Of the patches among the keys
    alone, all rows of equal weight: offsets, the mass at each offset, summing to 1; energy, the
    mean over rows of the sum of squared weights; pairs, the mean number of keys at each offset.
    """

    distance: float
    keys: float
    received: Float[Tensor, " keys"]
    offsets: Float[Tensor, "down across"]
    energy: float
    pairs: Float[Tensor, "down across"]


@dataclass(frozen=True)
class Geometry:
    """One layer's tokens in the image.

    grid: patches (rows, columns) of the whole map, or of one window; pitch: pixels (height, width)
    from patch to patch; prefix: the number of tokens before the patches; cls, registers: their
    positions among these (a distillation token counts as a register); windows: how the map is
    divided, or None.
    """

    grid: tuple[int, int]
    pitch: tuple[float, float]
    prefix: int = 0
    cls: tuple[int, ...] = ()
    registers: tuple[int, ...] = ()
    windows: Windows | None = None

    @property
    def patches(self) -> int:
        """Patches of the map, or of one window."""
        return self.grid[0] * self.grid[1]

    @property
    def map_grid(self) -> tuple[int, int]:
        """Patches (rows, columns) of the whole map."""
        return self.grid if self.windows is None else self.windows.resolution

    @property
    def spacing(self) -> tuple[int, int]:
        """Return how many patches apart (down, across) adjacent patches of a window are in the
        image.
        """
        if self.windows is None or not self.windows.dilated:
            return 1, 1
        return self.windows.resolution[0] // self.grid[0], self.windows.resolution[1] // self.grid[
            1
        ]

    @property
    def span(self) -> tuple[int, int]:
        """Return the patches (rows, columns) of the image from the first of a window to its
        last."""
        (rows, columns), (down, across) = self.grid, self.spacing
        return (rows - 1) * down + 1, (columns - 1) * across + 1

    def by_offset(
        self, weights: Float[Tensor, "*leading query key"]
    ) -> Float[Tensor, "*leading down across"]:
        """Return the weights between patches summed by offset in the image, key minus query: (.., 2
        rows - 1, 2 columns
        - 1), rows and columns being the span; offset 0 is in the middle, and 0 where no two patches
          of a window have
        it.
        """
        apart = weights.unflatten(-1, self.grid).unflatten(
            -3, self.grid
        )  # (.., rows, columns, rows, columns)
        across = _by_difference(apart.transpose(-3, -2))  # (.., rows, rows, 2 columns - 1)
        sums = _by_difference(across.movedim(-1, -3)).transpose(-2, -1)
        if self.spacing == (1, 1):
            return sums
        spread = sums.new_zeros(*sums.shape[:-2], *(2 * side - 1 for side in self.span))
        spread[..., :: self.spacing[0], :: self.spacing[1]] = sums
        return spread

    @lru_cache(maxsize=32)  # noqa: B019
    def distances(self) -> Float[Tensor, "calls query key"]:
        """Euclidean distances in px between the centres of all pairs of patches in the image;
        arbitrary for padding.
        """
        places = self.places()
        columns = self.map_grid[1]
        centres = torch.stack((places // columns, places % columns), -1) * torch.tensor(
            self.pitch, dtype=torch.float64
        )
        return (centres[:, :, None] - centres[:, None]).square().sum(-1).sqrt()

    @lru_cache(maxsize=32)  # noqa: B019
    def places(self) -> Int[Tensor, "calls patches"]:
        """Return the patch of the map at each position of each window; -1 for padding. One row
        without windows.
        """
        return (
            torch.arange(self.patches)[None] if self.windows is None else window_index(self.windows)
        )

    @lru_cache(maxsize=32)  # noqa: B019
    def pairs(self) -> Bool[Tensor, "calls query key"]:
        """Pairs of query and key with the same offset in the image as in the window: patches, not
        across a seam.
        """
        places = self.places()
        real = places >= 0
        pairs = real[:, :, None] & real[:, None]
        if self.windows is None:
            return pairs
        inside, (tall, wide) = torch.arange(self.patches), self.spacing
        for step, at, within in (
            (tall, places // self.windows.resolution[1], inside // self.grid[1]),
            (wide, places % self.windows.resolution[1], inside % self.grid[1]),
        ):
            pairs = pairs & (at[:, :, None] - at[:, None] == step * (within[:, None] - within))
        return pairs

    @lru_cache(maxsize=32)  # noqa: B019
    def share_of_queries(self) -> Float[Tensor, " keys"]:
        """Return the share of all patches that can attend to each key: all of them, or those of its
        window.
        """
        places = self.places()
        if self.windows is None:
            return torch.ones(self.prefix + self.patches, dtype=torch.float64)
        real = (places >= 0).double()
        share = real.new_zeros(self.map_grid[0] * self.map_grid[1] + 1)  # the last is for padding
        share[places] = (real.sum(-1, keepdim=True) / real.sum()).expand(places.shape)
        return share[:-1]

    @lru_cache(maxsize=32)  # noqa: B019
    def uniform(self) -> Uniform:
        """Uniform attention in this layer."""
        pairs = self.pairs().double()
        count = pairs.sum(-1)  # patches that each can attend to
        queries = count > 0  # all but padding
        rows = pairs / count.clamp_min(1)[..., None]
        if self.windows is None:
            keys = self.prefix + self.patches
            got = torch.full((keys,), 1 / keys, dtype=torch.float64)
        else:
            got = received(rows[:, None], self.windows).flatten() * self.share_of_queries()
        number = queries.sum()
        return Uniform(
            float((rows * self.distances()).sum() / number),
            float((count[queries] + self.prefix).log2().mean()),
            got,
            self.by_offset(rows.sum(0)) / number,
            float(rows.square().sum() / number),
            self.by_offset(pairs.sum(0)) / number,
        )


def geometry_of(site: Site, model: Model) -> Geometry | None:
    """Return the geometry of one layer; None where queries or keys are not patches (pooled keys,
    channels, one query).
    """
    layout, (height, width) = model.anatomy.layout, model.input_size
    if site.windows is not None:
        rows, columns = site.windows.resolution
        return Geometry(site.windows.window, (height / rows, width / columns), windows=site.windows)
    if site.kind != "patch":
        return None
    if layout is not None and site.keys == layout.patches:  # the prefix is added in a later layer
        layout = replace(layout, prefix=())
    if layout is not None and site.keys == layout.tokens:
        return of_layout(layout)
    # square patches that cover the image, where their order is not another
    grid = square_grid(site.keys, model.input_size) if model.anatomy.row_by_row else None
    return None if grid is None else Geometry(grid, (height / grid[0], width / grid[1]))


def of_layout(layout: TokenLayout) -> Geometry:
    """Return the geometry of a layer in which the tokens of one grid attend to each other."""
    (down, across), others = (
        layout.patch_size,
        layout.positions("register") + layout.positions("distillation"),
    )
    pitch = float(down), float(across)
    return Geometry(layout.grid, pitch, len(layout.prefix), layout.positions("cls"), others)


def square_grid(patches: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the (rows, columns) of square patches that cover an image of this size, or None if
    there is no such grid.
    """
    rows = round((patches * size[0] / size[1]) ** 0.5)
    columns = patches // max(rows, 1)
    return (
        (rows, columns)
        if rows * columns == patches and rows * size[1] == columns * size[0]
        else None
    )


def _by_difference(pairs: Float[Tensor, "*leading query key"]) -> Float[Tensor, "*leading offset"]:
    """Return sums along the diagonals of square matrices, from key - query = 1 - n to n - 1."""
    size = pairs.shape[-1]
    steps = torch.arange(size, device=pairs.device)
    chosen = F.one_hot((steps - steps[:, None] + size - 1).flatten(), 2 * size - 1)
    return pairs.flatten(-2) @ chosen.to(
        pairs.dtype
    )  # a matrix product is faster here than scatter_add
