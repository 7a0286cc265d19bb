"""Site: one place in a model where attention is computed, what kind of attention it is, and its
windows.

The windows, which patches of the map are in each, are read from the modules that are calling. The
windows of these families are known: Swin and Swin v2 (also transformers'), DaViT and TinyViT, the
blocks and grids of MaxViT, and the mask units of Hiera, also in SAM 2. Of other families the
windows are observed, but not where in the image they are.
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

    resolution: (rows, columns) of the map.
    window, shift: (rows, columns).
    pad_first: padded before it was shifted (torchvision) or after (timm).
    dilated: the patches of a window lie as far apart as there are windows on that axis, rather than
        side by side (MaxViT's grids).
    queries, keys: the index of the query and of the key at each place of the window, counted row by
        row; empty where both are row by row. Hiera sorts its tokens otherwise, and pools queries:
        one stands at the place of each patch that it was pooled from.
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
        """Return the number of windows of an image."""
        down = math.ceil(self.resolution[0] / self.window[0])
        across = math.ceil(self.resolution[1] / self.window[1])
        return down * across


@dataclass(frozen=True)
class Site:
    """One place where attention is computed.

    layer: the number of its block, from 0 in the order of the forward pass (see
        models/numbering.py).
    module: the name of the attention module.
    part: which of the module's attention calls (most have one).
    kind: which tokens attend to which.
    heads, queries, keys: of one call, per window where there are windows.
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
    """Return the kind of attention, from shapes alone.

    calls: windows an image (1 without windows).
    tokens: the number of tokens of an image that enter the attention module.
    channels: whether there are as many queries as channels a head.
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
    """Return the windows of a call (a single one where it covers the whole map), or None where they
    are not known.

    callers: the modules that are calling, the innermost last.
    calls: windows an image.
    queries, keys: of one window.
    """
    for depth, (name, module, shape) in enumerate(reversed(callers)):
        windows = (
            _shifted_windows(module, shape, pad_first=depth == 0)
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
    """Return Swin's windows, of a channels-last map, or of tokens in a block that knows the map's
    size (transformers).

    pad_first: whether the module pads its map before it shifts it; our block has an attribute for
    it.
    """
    window = getattr(module, "window_size", None)
    shift = getattr(module, "shift_size", None)
    if window is None or shift is None:
        return None
    if len(shape) == 4:
        pad_first = pad_first or getattr(module, "pad_first", False)
        return Windows((shape[1], shape[2]), _pair(window), _pair(shift), pad_first)
    size: Any = getattr(module, "input_resolution", None)
    if (
        len(shape) != 3
        or not isinstance(size, tuple | list)
        or len(size) != 2
        or math.prod(size) != shape[1]
    ):
        return None
    return Windows((int(size[0]), int(size[1])), _pair(window), _pair(shift), pad_first=True)


def _partition(module: nn.Module, shape: tuple[int, ...]) -> Windows | None:
    """Return MaxViT's blocks, or its grids: windows whose patches are spread evenly over the
    map."""
    if len(shape) != 4:
        return None
    is_block: Any = getattr(module, "partition_block", None)
    if isinstance(is_block, bool):  # timm
        channels_first = isinstance(getattr(getattr(module, "attn", None), "qkv", None), nn.Conv2d)
        rows, columns = shape[1:3]
        if channels_first:
            rows, columns = shape[2:]
        return Windows((rows, columns), _pair(module.partition_size), dilated=not is_block)
    rows, columns = shape[2:]
    kind = getattr(module, "partition_type", None)
    size = getattr(module, "p", None)
    if not isinstance(size, int):
        return None
    if kind == "window":  # torchvision
        return Windows((rows, columns), (size, size))
    if kind == "grid":
        return Windows((rows, columns), (rows // size, columns // size), dilated=True)
    return None


def _mask_units(
    model: nn.Module, name: str, module: nn.Module, shape: tuple[int, ...]
) -> Windows | None:
    """Return Hiera's mask units, or its whole map.

    Its tokens are sorted by their place within the patches of later stages. `Unroll` sorts the
    tokens once; each stage then pools those that lie `queries` apart.
    """
    within_units = getattr(module, "use_mask_unit_attn", None)
    pooled = getattr(module, "q_stride", None)
    unroll = _unroll(model, name)
    if within_units is None or not isinstance(pooled, int) or unroll is None:
        return None
    if len(shape) != 3 or len(unroll.size) != 2:
        return None
    rows, columns = unroll.size
    strides = [_pair(stride) for stride in unroll.schedule]
    while strides and rows * columns > shape[1]:  # the stages before have pooled these
        down, across = strides.pop(0)
        rows = rows // down
        columns = columns // across
    if rows * columns != shape[1]:
        return None
    window = (rows, columns)
    if within_units:
        window = (
            math.prod(down for down, _ in strides),
            math.prod(across for _, across in strides),
        )
    if not strides:  # no later stage merges patches: row by row
        return Windows((rows, columns), window) if pooled == 1 else None
    places = _unrolled_windows(window, strides)
    tokens = sorted(range(len(places)), key=places.__getitem__)
    # each query is the maximum of those of its patches, which are as many tokens apart as there are
    # queries
    queries = tuple(token % (len(places) // pooled) for token in tokens)
    return Windows((rows, columns), window, queries=queries, keys=tuple(tokens))


def _pooling(module: nn.Module, shape: tuple[int, ...]) -> Windows | None:
    """Return the windows of SAM 2's Hiera, or its whole map, row by row; queries may be the maxima
    of 2x2 patches.
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
    # the axis of the module's input that has the rows
    first = {"TinyVitBlock": 1, "SpatialBlock": 2}.get(type(module).__name__)
    if first is None or len(shape) != 4:
        return None
    window: Any = module.window_size
    return Windows((shape[first], shape[first + 1]), _pair(window))


def _unroll(model: nn.Module, name: str) -> Any:
    """Return the `Unroll` of the Hiera that has this module, or None."""
    parts = name.split(".")
    for count in range(len(parts)):
        unroll = getattr(model.get_submodule(".".join(parts[:count])), "unroll", None)
        if isinstance(unroll, nn.Module):
            return unroll
    return None


def _unrolled_windows(window: Pair, strides: Sequence[Pair]) -> tuple[int, ...]:
    """Return the place in the window, row by row, of each token in Hiera's order."""
    places = torch.arange(math.prod(window)).view(1, *window)
    for down, across in strides:
        count, rows, columns = places.shape
        split = places.view(count, rows // down, down, columns // across, across)
        places = split.permute(0, 2, 4, 1, 3).reshape(-1, rows // down, columns // across)
    return tuple(places.flatten().tolist())


def _pair(value: Any) -> Pair:
    if isinstance(value, int):
        return (value, value)
    return (int(value[0]), int(value[1]))
