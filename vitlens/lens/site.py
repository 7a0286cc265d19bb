"""Site: one place in a model where attention is computed, and what kind of attention it is. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

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
    """How a map was cut into windows.

    resolution: (rows, columns) of the map; window, shift: (rows, columns); pad_first: padded before it was shifted
    (torchvision) or after (timm); dilated: the patches of a window lie as far apart as there are windows on that axis,
    rather than side by side (MaxViT's grids). queries, keys: the index of the query and of the key at each place of the
    window, counted row by row; empty where both are row by row. Hiera sorts its tokens otherwise, and pools queries:
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
        """The number of windows of an image."""
        return -(-self.resolution[0] // self.window[0]) * -(-self.resolution[1] // self.window[1])


@dataclass(frozen=True)
class Site:
    """One place where attention is computed.

    layer: counted from 0 in the order of the forward pass; module: the name of the attention module; part: which of
    the module's attention calls (most have one); kind: which tokens attend to which; heads, queries, keys: of one call,
    per window where there are windows.
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
    """The kind of attention, from shapes alone.

    calls: windows an image (1 without windows); tokens: of an image that enter the attention module; channels: whether
    there are as many queries as channels a head.
    """
    if calls > 1:
        return "window"
    if queries == 1 and keys > 1:
        return "class"
    if queries == keys == tokens:
        return "patch"
    return "channel" if queries == keys and channels else "pooled"
