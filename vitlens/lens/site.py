"""The places in a model where attention is computed: the kind of attention and its windows.

Which patches of the map are in each window is read from the modules that are calling. These windows
are known:

- Swin and Swin v2 (also those of transformers), DaViT and TinyViT.
- The blocks and grids of MaxViT.
- The mask units of Hiera, and the windows of SAM 2's Hiera.

In other families, windows are observed, but their place in the image is not known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

Pair = tuple[int, int]
Kind = Literal["patch", "class", "window", "pooled", "channel"]

KIND_WORDS = {
    "patch": "every token attends to every token",
    "class": "one query (CLS or attention pooling) attends to all patches",
    "window": "patches attend to the patches of their window",
    "pooled": "tokens attend to fewer, pooled keys",
    "channel": "channels attend to channels, not positions to positions",
}

NO_PLACE: Final[Mapping[str, str]] = MappingProxyType(
    {  # why the attention of a layer of this kind may have no place in the image
        "patch": "tokens do not form a square grid of patches",
        "class": "the query is not a patch",
        "window": "the positions of the windows are not known",
        "pooled": "keys are pooled from several patches",
        "channel": "channels attend to channels",
    }
)


@dataclass(frozen=True)
class Windows:
    """The division of a map into windows.

    Places in a window are counted row by row.

    resolution: the (rows, columns) of the map.
    window: the (rows, columns) of a window.
    shift: the (rows, columns) by which the map is shifted before it is divided.
    pad_first: whether the map is padded before it is shifted (torchvision) or after (timm).
    dilated: whether the patches of a window lie as far apart as there are windows on that axis, not
        next to each other (MaxViT's grids).
    queries: the index of the query at each place of the window, or () if queries are sorted row by
        row. Hiera sorts its tokens differently, and pools queries: one query then has the places of
        all patches that it was pooled from.
    keys: the index of the key at each place of the window, or () if keys are sorted row by row.
    """

    resolution: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    pad_first: bool = False
    dilated: bool = False
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Return the number of windows in an image."""
        down = math.ceil(self.resolution[0] / self.window[0])
        across = math.ceil(self.resolution[1] / self.window[1])
        return down * across


@dataclass(frozen=True)
class Site:
    """One place in a model where attention is computed.

    layer: the number of its block, from 0 in the order of the forward pass (see
        models/numbering.py).
    module: the name of the attention module.
    part: the number of the attention call among those of the module; most modules have one.
    kind: which tokens attend to which.
    heads: the number of heads.
    queries: the number of queries in one call; in a layer with windows, in one window.
    keys: the number of keys in one call; in a layer with windows, in one window.
    windows: the division of the map into windows, or None if there are none or they are not known.
    """

    layer: int
    module: str
    part: int
    kind: Kind
    heads: int
    queries: int
    keys: int
    windows: Windows | None = None


def decide_kind(*, calls: int, queries: int, keys: int, tokens: int, channels: bool) -> Kind:
    """Return the kind of attention, from shapes only.

    calls: the number of windows in an image, 1 without windows.
    queries, keys: their number in one call.
    tokens: the number of tokens of an image that enter the attention module.
    channels: whether there are as many queries as channels in a head.
    """
    if calls > 1:
        return "window"
    if queries == 1 and keys > 1:
        return "class"
    if queries == keys == tokens:
        return "patch"
    if queries == keys and channels:
        return "channel"
    return "pooled"


class Caller(NamedTuple):
    """A module that is running: its name, itself, and the shape of its first argument."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]


def windows_of(
    model: nn.Module, callers: Sequence[Caller], *, calls: int, queries: int, keys: int
) -> Windows | None:
    """Return the windows of a call, or None if they are not known.

    Attention over the whole map has a single window.

    callers: the modules that are calling, the innermost last.
    calls: the number of windows in an image.
    queries, keys: their number in one window.
    """
    # from the innermost on: the attention itself, then the modules that contain it
    for depth, (name, module, shape) in enumerate(reversed(callers)):
        is_innermost = depth == 0  # torchvision's attention pads and shifts by itself
        windows = (  # of the first family that the module belongs to
            _shifted_windows(module, shape, pad_first=is_innermost)
            or _partition(module, shape)
            or _mask_units(model, name, module, shape)
            or _pooling(module, shape)
            or _unshifted_windows(module, shape)
        )
        if windows is None or windows.count != calls or math.prod(windows.window) != keys:
            continue
        expected_queries = len(set(windows.queries)) or keys
        return windows if queries == expected_queries else None
    return None


def _shifted_windows(
    module: nn.Module, shape: tuple[int, ...], *, pad_first: bool
) -> Windows | None:
    """Return Swin's windows, or None for another module.

    The module takes a channels-last map, or tokens if it has the size of the map as an attribute
    (transformers).

    pad_first: whether the module pads its map before it shifts it; our block has the attribute
        `pad_first` for it.
    """
    window = getattr(module, "window_size", None)
    shift = getattr(module, "shift_size", None)
    if window is None or shift is None:
        return None
    if len(shape) == 4:
        pad_first = pad_first or getattr(module, "pad_first", False)
        return Windows((shape[1], shape[2]), _pair(window), _pair(shift), pad_first)
    size: Any = getattr(module, "input_resolution", None)
    is_size = isinstance(size, tuple | list) and len(size) == 2
    if len(shape) != 3 or not is_size or math.prod(size) != shape[1]:
        return None
    return Windows((int(size[0]), int(size[1])), _pair(window), _pair(shift), pad_first=True)


def _partition(module: nn.Module, shape: tuple[int, ...]) -> Windows | None:
    """Return MaxViT's blocks, or its grids: windows with patches spread evenly over the map."""
    if len(shape) != 4:
        return None
    is_block: Any = getattr(module, "partition_block", None)
    if isinstance(is_block, bool):  # timm
        attention = getattr(module, "attn", None)
        channels_first = isinstance(getattr(attention, "qkv", None), nn.Conv2d)
        rows, columns = shape[2:] if channels_first else shape[1:3]
        return Windows((rows, columns), _pair(module.partition_size), dilated=not is_block)
    partition_type = getattr(module, "partition_type", None)  # torchvision
    size = getattr(module, "p", None)
    if not isinstance(size, int):
        return None
    rows, columns = shape[2:]  # of (batch, channels, rows, columns)
    if partition_type == "window":
        return Windows((rows, columns), (size, size))
    if partition_type == "grid":
        return Windows((rows, columns), (rows // size, columns // size), dilated=True)
    return None


def _mask_units(
    model: nn.Module, name: str, module: nn.Module, shape: tuple[int, ...]
) -> Windows | None:
    """Return Hiera's mask units, or its whole map as one window; None for another module.

    Hiera's `Unroll` sorts the tokens once, by their place within the patches of later stages. With
    q queries after pooling, a stage then pools the tokens n, n + q, n + 2q and so on.
    """
    within_units = getattr(module, "use_mask_unit_attn", None)
    pooled = getattr(module, "q_stride", None)
    unroll = _unroll(model, name)
    if within_units is None or not isinstance(pooled, int) or unroll is None:
        return None
    if len(shape) != 3 or len(unroll.size) != 2:
        return None
    rows, columns = unroll.size
    strides = [_pair(stride) for stride in unroll.schedule]  # by which the stages pool, in order
    while strides and rows * columns > shape[1]:  # an earlier stage has pooled by this stride
        down, across = strides.pop(0)  # the strides that remain are those of later stages
        rows = rows // down
        columns = columns // across
    if rows * columns != shape[1]:
        return None
    window = (rows, columns)
    if within_units:  # a unit holds the patches that become one in the last stage
        window = (
            math.prod(down for down, _ in strides),
            math.prod(across for _, across in strides),
        )
    if not strides:  # no later stage merges patches, so that the tokens are row by row
        return Windows((rows, columns), window) if pooled == 1 else None
    place_of_token = _unrolled_windows(window, strides)
    tokens = range(len(place_of_token))
    # the inverse of place_of_token
    token_at_place = sorted(tokens, key=place_of_token.__getitem__)
    # Token n is pooled into query n % query_count, the maximum of its tokens' queries. A place has
    # the query of its token.
    query_count = len(place_of_token) // pooled
    query_at_place = tuple(token % query_count for token in token_at_place)
    return Windows((rows, columns), window, queries=query_at_place, keys=tuple(token_at_place))


def _pooling(module: nn.Module, shape: tuple[int, ...]) -> Windows | None:
    """Return the windows of SAM 2's Hiera, or its whole map as one window; None for another module.

    Tokens are row by row. A query may be the maximum of the queries of 2x2 patches.
    """
    if not isinstance(getattr(module, "is_windowed", None), bool) or len(shape) != 4:
        return None
    resolution = (shape[1], shape[2])
    height, width = _pair(module.window_size) if module.is_windowed else resolution
    if not module.q_stride:
        return Windows(resolution, (height, width))
    down, across = _pair(module.q_stride)
    queries = []
    for row in range(height):
        for column in range(width):
            queries.append((row // down) * (width // across) + column // across)
    return Windows(
        resolution, (height, width), queries=tuple(queries), keys=tuple(range(height * width))
    )


def _unshifted_windows(module: nn.Module, shape: tuple[int, ...]) -> Windows | None:
    """Return the windows of timm's blocks that never shift them, padded below and on the right."""
    # the axis of the rows in the module's input
    row_axis = {"TinyVitBlock": 1, "SpatialBlock": 2}.get(type(module).__name__)
    if row_axis is None or len(shape) != 4:
        return None
    window: Any = module.window_size
    return Windows((shape[row_axis], shape[row_axis + 1]), _pair(window))


def _unroll(model: nn.Module, name: str) -> Any:
    """Return the `Unroll` of the Hiera that has this module, or None."""
    parts = name.split(".")
    for count in range(len(parts)):
        unroll = getattr(model.get_submodule(".".join(parts[:count])), "unroll", None)
        if isinstance(unroll, nn.Module):
            return unroll
    return None


def _unrolled_windows(window: Pair, strides: Sequence[Pair]) -> tuple[int, ...]:
    """Return the place in the window, row by row, of each token in Hiera's order.

    Each stride divides the map into down x across smaller maps. Each of these has every down-th row
    and every across-th column. The smaller maps follow each other and are divided again. In a 4x4
    window with the strides (2, 2) and (2, 2), the tokens 0 to 3 are at the places 0, 2, 8 and 10.
    """
    places = torch.arange(math.prod(window)).view(1, *window)  # (maps, rows, columns)
    for down, across in strides:
        count, rows, columns = places.shape
        split = places.view(count, rows // down, down, columns // across, across)
        by_map = split.permute(0, 2, 4, 1, 3)  # (maps, down, across, rows, columns)
        places = by_map.reshape(-1, rows // down, columns // across)
    return tuple(places.flatten().tolist())


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return (value, value)
    return (int(value[0]), int(value[1]))
