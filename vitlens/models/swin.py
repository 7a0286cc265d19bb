"""The Swin transformer (Liu 2021) from scratch: attention in windows.

A map of patches, channels last, (batch, rows, columns, dim), passes through stages. A block cuts it
into windows and attends within each. The next block moves the windows by half a window, so that
patches on both sides of a border meet. Between stages, 2x2 patches are merged into one. The cost of
attention grows with the number of patches, not with its square.
"""

from collections.abc import Mapping
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.configs import SwinConfig
from vitlens.models.vit import MLP, initialise
from vitlens.references import import_without_compiler
from vitlens.shapes import Images, Logits

import_without_compiler("torchvision")
from torchvision.ops import StochasticDepth  # noqa: E402

Pair = tuple[int, int]
Maps = Float[Tensor, "batch rows columns dim"]
# the windows of all images; inside: the places of one window, row by row
Windows = Float[Tensor, "windows inside dim"]
# pairs of names in state dicts: timm's, and ours
_RENAMED: Final = (
    ("attn.relative_position_bias_table", "position_bias.bias_table"),
    ("head.fc.", "head."),
)


def window_partition(maps: Maps, window: Pair) -> Windows:
    """Cut maps into windows of (rows, columns) that do not overlap.

    The windows of an image follow each other, row by row.
    """
    height, width = window
    # (batch, windows down, height, windows across, width, dim)
    split = maps.unflatten(1, (-1, height)).unflatten(3, (-1, width))
    # (batch, windows down, windows across, height x width, dim)
    by_window = split.transpose(2, 3).flatten(3, 4)
    windows: Tensor = by_window.flatten(0, 2)
    return windows


def window_reverse(windows: Windows, window: Pair, size: Pair) -> Maps:
    """Return the maps that `window_partition` cut into these windows; size: (rows, columns)."""
    height, width = window
    rows, columns = size
    # (batch, windows down, windows across, height x width, dim)
    by_window = windows.unflatten(0, (-1, rows // height, columns // width))
    # (batch, windows down, height, windows across, width, dim)
    split = by_window.unflatten(3, (height, width)).transpose(2, 3)
    maps: Tensor = split.flatten(3, 4).flatten(1, 2)  # (batch, rows, columns, dim)
    return maps


def padded_size(size: Pair, window: Pair) -> Pair:
    """Return rows and columns of a map padded, below and on the right, to whole windows."""
    rows, columns = size
    rows_below = -rows % window[0]
    columns_on_right = -columns % window[1]
    return rows + rows_below, columns + columns_on_right


def window_shift(size: Pair, window: Pair, shift: Pair) -> Pair:
    """Return the shift that is applied: 0 on an axis on which one window covers the whole map."""
    down, across = shift
    if size[0] <= window[0]:
        down = 0
    if size[1] <= window[1]:
        across = 0
    return down, across


def window_mask(
    size: Pair, window: Pair, shift: Pair
) -> Bool[Tensor, "count inside inside"] | None:
    """Return which places of each window may attend to which (True = take part).

    The map is padded and rolled by the shift. A window at the end then also holds patches from the
    start of the map, on the opposite side of the image. The two must not attend to each other.
    Padding attends only to padding: it may not attend to nothing, as a row without any key has no
    softmax. Returns None if all places may attend to all.

    size: the (rows, columns) of the map before padding.
    shift: the shift that is applied (see `window_shift`).
    """
    rows, columns = padded_size(size, window)
    if shift == (0, 0) and size == (rows, columns):
        return None
    # the places after the roll; their places before it are (row + shift[0]) % rows and so on
    row = torch.arange(rows)[:, None]
    column = torch.arange(columns)
    is_row_wrapped = row >= rows - shift[0]
    is_column_wrapped = column >= columns - shift[1]
    is_row_padding = (row + shift[0]) % rows >= size[0]
    is_column_padding = (column + shift[1]) % columns >= size[1]
    # places of one region may attend to each other: four regions of the map, and -1 for padding
    region = 2 * is_row_wrapped + is_column_wrapped  # (rows, columns)
    region = region.masked_fill(is_row_padding | is_column_padding, -1)
    # of shape (count, inside)
    region_by_window = window_partition(region[None, :, :, None].float(), window)[..., 0]
    return region_by_window[:, :, None] == region_by_window[:, None, :]


def relative_position_index(window: Pair) -> Int[Tensor, "inside inside"]:
    """Return the number of the offset between each query and each key of a window.

    The offset is the place of the query minus that of the key. Offsets from 1 - rows to rows - 1,
    and from 1 - columns to columns - 1, are numbered row by row.
    """
    rows, columns = window
    row = torch.arange(rows).repeat_interleave(columns)  # of each place
    column = torch.arange(columns).repeat(rows)
    down = row[:, None] - row + rows - 1  # from 0 to 2 rows - 2
    across = column[:, None] - column + columns - 1  # from 0 to 2 columns - 2
    return down * (2 * columns - 1) + across


class RelativePositionBias(nn.Module):
    """A learned bias of the scores for each head and each offset between two places of a window."""

    index: Tensor

    def __init__(self, window: Pair, heads: int) -> None:
        super().__init__()
        offsets = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.bias_table = nn.Parameter(nn.init.trunc_normal_(torch.empty(offsets, heads), std=0.02))
        self.register_buffer("index", relative_position_index(window), persistent=False)

    def forward(self) -> Float[Tensor, "heads inside inside"]:
        """Return the bias of every pair of places."""
        return self.bias_table[self.index].permute(2, 0, 1)


class SwinBlock(nn.Module):
    """One block: attention in windows, then an MLP, each added to the residual stream.

    The map is padded, shifted and cut into windows for attention, and put together again.

    drop_path: the probability, per image and in training, that a branch is dropped.
    """

    pad_first = True  # read by the lens: the map is padded before it is shifted

    def __init__(
        self, config: SwinConfig, *, stage: int, shifted: bool, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        dim = config.widths[stage]
        heads = config.heads[stage]
        self.window_size = config.window
        self.shift_size = (config.window[0] // 2, config.window[1] // 2) if shifted else (0, 0)
        self.norm1 = nn.LayerNorm(dim)
        self.position_bias = RelativePositionBias(config.window, heads)
        self.attn = MultiHeadSelfAttention(
            dim,
            heads,
            qkv_bias=config.qkv_bias,
            dropout=config.attention_dropout,
            projection_dropout=config.dropout,
        )
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, int(dim * config.mlp_ratio), dropout=config.dropout)
        self.drop_path = StochasticDepth(drop_path, mode="row")

    def forward(self, maps: Maps) -> Maps:
        """Return the residual stream after this block."""
        maps = maps + self.drop_path(self.attend(self.norm1(maps)))
        tokens = maps.flatten(1, 2)  # (batch, rows x columns, dim)
        tokens = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        result: Tensor = tokens.unflatten(1, maps.shape[1:3])
        return result

    def attend(self, maps: Maps) -> Maps:
        """Return attention within each window of the shifted map, shifted back."""
        batch, rows, columns = maps.shape[:3]
        size = padded_size((rows, columns), self.window_size)
        down, across = window_shift((rows, columns), self.window_size, self.shift_size)
        # before and after: channels, columns, rows
        padded = F.pad(maps, (0, 0, 0, size[1] - columns, 0, size[0] - rows))
        shifted = padded.roll((-down, -across), dims=(1, 2))
        windows = window_partition(shifted, self.window_size)  # (batch x count, inside, dim)
        allowed = window_mask((rows, columns), self.window_size, (down, across))
        windows = self.attn(windows, self._scores_bias(allowed, batch))
        shifted = window_reverse(windows, self.window_size, size)
        return shifted.roll((down, across), dims=(1, 2))[:, :rows, :columns]

    def _scores_bias(
        self, allowed: Tensor | None, batch: int
    ) -> Float[Tensor, "windows heads inside inside"]:
        """Return the position bias, with -inf where a place may not attend to another.

        allowed: which places of each window may attend to which, (count, inside, inside), or None.
        """
        bias: Tensor = self.position_bias()  # (heads, inside, inside)
        if allowed is None:
            return bias[None]  # the same for all windows
        # of shape (count, heads, inside, inside)
        masked = bias.masked_fill(~allowed[:, None].to(bias.device), -torch.inf)
        return masked.repeat(batch, 1, 1, 1)


class PatchMerging(nn.Module):
    """Merges 2x2 patches into one of twice the width.

    Their features are concatenated and normed, and pass through a linear layer.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, maps: Maps) -> Float[Tensor, "batch half_rows half_columns more"]:
        """Return maps of half the rows and columns (rounded up) and twice the width."""
        rows, columns = maps.shape[1:3]
        # before and after: channels, columns, rows
        maps = F.pad(maps, (0, 0, 0, columns % 2, 0, rows % 2))
        corners = [  # in the order of the paper's code
            maps[:, 0::2, 0::2],
            maps[:, 1::2, 0::2],
            maps[:, 0::2, 1::2],
            maps[:, 1::2, 1::2],
        ]
        result: Tensor = self.reduction(self.norm(torch.cat(corners, dim=-1)))
        return result


class SwinStage(nn.Module):
    """Patch merging, then blocks of which every second shifts its windows.

    The first stage does not merge patches.
    """

    def __init__(self, config: SwinConfig, *, stage: int, drop_paths: list[float]) -> None:
        super().__init__()
        if stage == 0:
            self.downsample: nn.Module = nn.Identity()
        else:
            self.downsample = PatchMerging(config.widths[stage - 1])
        blocks = []
        for index, drop_path in enumerate(drop_paths):
            shifted = config.shift and index % 2 == 1
            blocks.append(SwinBlock(config, stage=stage, shifted=shifted, drop_path=drop_path))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, maps: Maps) -> Float[Tensor, "batch stage_rows stage_columns width"]:
        """Return the residual stream after this stage."""
        result: Tensor = self.blocks(self.downsample(maps))
        return result


class PatchMap(nn.Module):
    """Cuts an image into patches and maps each to a vector, normalised.

    An incomplete patch is padded with zeros.
    """

    def __init__(self, patch_size: Pair, dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Images) -> Maps:
        """Return the map of patches, channels last."""
        height, width = images.shape[-2:]
        pixels_below = -height % self.patch_size[0]
        pixels_on_right = -width % self.patch_size[1]
        padded = F.pad(images, (0, pixels_on_right, 0, pixels_below))
        result: Tensor = self.norm(self.proj(padded).movedim(1, -1))  # (batch, rows, columns, dim)
        return result


class SwinTransformer(nn.Module):
    """Images (batch, 3, height, width) of any size, already normalised -> logits (batch, classes).

    The logits are read from the mean over the last stage's patches, after a norm.
    """

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchMap(config.patch_size, config.dim)
        depth = sum(config.depths)
        last_block = max(depth - 1, 1)  # 1 for a single block, to divide by
        drop_paths = [config.drop_path * block / last_block for block in range(depth)]
        stages = []
        first_block = 0  # the number of the stage's first block
        for stage, stage_depth in enumerate(config.depths):
            drop_paths_of_stage = drop_paths[first_block : first_block + stage_depth]
            stages.append(SwinStage(config, stage=stage, drop_paths=drop_paths_of_stage))
            first_block += stage_depth
        self.layers = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(config.widths[-1])
        self.head = nn.Linear(config.widths[-1], config.classes)
        self.apply(initialise)

    def forward_features(self, images: Images) -> Maps:
        """Return the last stage's map, after the final norm."""
        result: Tensor = self.norm(self.layers(self.patch_embed(images)))
        return result

    def forward(self, images: Images) -> Logits:
        """Return logits (batch, classes)."""
        logits: Tensor = self.head(self.forward_features(images).mean(dim=(1, 2)))
        return logits


def padding_note(config: SwinConfig, image_size: Pair) -> str:
    """Return a note on the maps that are padded to whole windows, or "" if none is.

    image_size: the (height, width) of the images.
    """
    changes = []
    for stage, size in enumerate(config.maps(image_size)):
        padded = padded_size(size, config.window)
        if padded != size:
            changes.append(
                f"{size[0]}x{size[1]} patches to {padded[0]}x{padded[1]} in stage {stage}"
            )
    if not changes:
        return ""
    rows, columns = config.window
    return f"windows of {rows}x{columns} do not divide every map: padded {', '.join(changes)}"


def from_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights, with timm's names replaced by those of `SwinTransformer`."""
    renamed = {}
    for name, value in state.items():
        for theirs, ours in _RENAMED:
            name = name.replace(theirs, ours)
        renamed[name] = value
    return renamed
