"""Windows as the libraries cut them, with the weights put back on the map; and models."""

from collections.abc import Callable
from functools import partial

import timm
import torch
from jaxtyping import Float
from timm.models.maxxvit import grid_partition
from timm.models.swin_transformer import window_partition
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.maxvit import MaxVit

from tests.kit.tiny import TIMM, model_of, shaken, timm_model, torchvision_swin
from vitlens import Model
from vitlens.lens.site import Windows
from vitlens.models.loading import untrained

Pair = tuple[int, int]


def of_timm(name: str, *, size: Pair = (32, 32), **options: object) -> Model:
    """Return a timm model of this name, its own shape but for the options."""
    return model_of(
        shaken(partial(timm.create_model, name, num_classes=5, **options)), alias=name, size=size
    )


def _torchvision_maxvit() -> Model:
    shape = {
        "stem_channels": 8,
        "partition_size": 4,
        "block_channels": [8, 16],
        "block_layers": [1, 1],
        "head_dim": 4,
    }
    return model_of(
        shaken(lambda: MaxVit((64, 64), stochastic_depth_prob=0.0, num_classes=5, **shape)),
        size=(64, 64),
    )


_HIERA = {
    "img_size": (32, 32),
    "embed_dim": 8,
    "num_heads": 1,
    "stages": (1, 2, 2, 1),
    "patch_stride": (2, 2),
}
_HIERADET = {
    "embed_dim": 8,
    "num_heads": 1,
    "stages": (1, 2, 2),
    "window_spec": (8, 4, 6),
    "q_pool": 2,
    "patch_stride": (2, 2),
    "patch_kernel": (3, 3),
    "patch_padding": (1, 1),
    "global_att_blocks": (4,),
}
WINDOWED: dict[
    str, Callable[[], Model]
] = {  # of Swin patches of 2x2 pixels, windows of 4x4 patches
    "swin": partial(timm_model, TIMM["swin"]),
    "swin, padded": partial(timm_model, TIMM["swin"], img_size=(20, 36)),
    "swinv2": partial(timm_model, TIMM["swinv2"]),
    "swinv2, padded": partial(timm_model, TIMM["swinv2"], img_size=(20, 36)),
    "torchvision": torchvision_swin,
    "torchvision, padded": partial(torchvision_swin, (20, 36)),
    # 16 x 16 patches in units of 8 x 8, then pooled queries; whole maps from the third stage on
    "hiera": partial(of_timm, "hiera_tiny_224", **_HIERA),
    # windows of 8 x 8, 4 x 4 and 6 x 6 patches (padded), and whole maps; queries pooled in the
    # windows
    "sam2's hiera": partial(of_timm, "hieradet_small", **_HIERADET),
    "maxvit": partial(of_timm, "test_maxvit", size=(64, 64), img_size=64),  # blocks and grids
    "torchvision's maxvit": _torchvision_maxvit,
}


def padded_swin_micro() -> Model:
    """Build our Swin on a map that its windows do not divide: padding attends to itself."""
    return untrained("swin-micro", classes=("a", "b"), image_size=(40, 40))


def numbered(rows: int, columns: int) -> Tensor:
    """Return the patches of a map by number, row by row."""
    return torch.arange(float(rows * columns)).view(rows, columns)


def timm_tokens(resolution: Pair, window: Pair, shift: Pair) -> Tensor:
    """Return patches in the order of timm's block: rolled, then padded, then cut (_attn)."""
    tokens = torch.arange(1.0, 1 + resolution[0] * resolution[1]).view(1, *resolution, 1)
    tokens = tokens.roll((-shift[0], -shift[1]), (1, 2))
    tokens = F.pad(tokens, (0, 0, 0, -resolution[1] % window[1], 0, -resolution[0] % window[0]))
    return window_partition(tokens, window).flatten(1) - 1  # 0 was padding


def torchvision_tokens(resolution: Pair, window: Pair, shift: Pair) -> Tensor:
    """Return patches in the order of torchvision's shifted_window_attention: padded, then rolled.

    It never rolls where one window covers all.
    """
    tokens = torch.arange(1.0, 1 + resolution[0] * resolution[1]).view(1, *resolution, 1)
    tokens = F.pad(tokens, (0, 0, 0, -resolution[1] % window[1], 0, -resolution[0] % window[0]))
    _, height, width, _ = tokens.shape
    down = 0 if height <= window[0] else shift[0]
    across = 0 if width <= window[1] else shift[1]
    tokens = tokens.roll((-down, -across), (1, 2))
    tokens = tokens.view(1, height // window[0], window[0], width // window[1], window[1], 1)
    return tokens.permute(0, 1, 3, 2, 4, 5).reshape(-1, window[0] * window[1]) - 1


def window_places(cut: Windows) -> Tensor:
    """Return the number of the patch at each place of each window (windows, inside).

    -1 is padding.
    """
    if cut.dilated:
        grid = numbered(*cut.resolution)[None, ..., None]
        return grid_partition(grid, list(cut.window)).flatten(1).long()
    tokens = torchvision_tokens if cut.pad_first else timm_tokens
    return tokens(cut.resolution, cut.window, cut.shift).long()


def unwindow(
    weights: Float[Tensor, "calls heads inside inside"], cut: Windows
) -> Float[Tensor, "batch heads patches patches"]:
    """Return the weights between all patches of the map, zero for those without a shared window.

    weights: row by row. Rows sum to 1 minus the mass on padding. `calls` holds the windows of each
    image one after another.
    """
    index = window_places(cut).to(weights.device)
    count = len(index)
    patches = cut.resolution[0] * cut.resolution[1]
    # of shape (batch, heads, count, inside, inside)
    split = weights.unflatten(0, (-1, count)).transpose(1, 2)
    # padding gets an extra row and column, which is cut off at the end
    place = index.masked_fill(index < 0, patches)
    full = weights.new_zeros(*split.shape[:2], patches + 1, patches + 1)
    full[:, :, place[:, :, None], place[:, None, :]] = split
    return full[:, :, :patches, :patches]
