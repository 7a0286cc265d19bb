"""The vision transformer (Dosovitskiy 2021) from scratch.

Parameters have timm's names, so that timm's weights load.
"""

from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlens.errors import InputError
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.configs import ViTConfig
from vitlens.models.positions import FIXED, fixed_positions, interpolate_positions
from vitlens.references import import_without_compiler
from vitlens.shapes import Images, Logits, TokenLayout, Tokens

import_without_compiler("torchvision")
from torchvision.ops import StochasticDepth  # noqa: E402

_DISTILLATION: Final = 1  # the position of the distillation token, after CLS
NORM_EPSILON = 1e-6  # timm's, and the paper's JAX code; torch's own default is 1e-5


class PatchEmbedding(nn.Module):
    """Cuts an image into patches and maps each to a token.

    It is a convolution with a stride of its kernel size.
    """

    def __init__(self, patch_size: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size)

    def grid(self, images: Images) -> tuple[int, int]:
        """Return the patches (rows, columns) of these images.

        Raises InputError unless patches cover them exactly.
        """
        height, width = images.shape[-2:]
        patch_height, patch_width = self.patch_size
        if height % patch_height or width % patch_width:
            raise InputError(
                f"expected images divisible into patches of {patch_height}x{patch_width} px, found "
                f"{height}x{width} px"
            )
        return height // patch_height, width // patch_width

    def forward(self, images: Images) -> Tokens:
        """Return patches (batch, rows x columns, dim), row by row."""
        maps: Tensor = self.proj(images)  # (batch, dim, rows, columns)
        return maps.flatten(2).transpose(1, 2)  # (batch, rows x columns, dim)


class MLP(nn.Module):
    """Two linear layers with an exact GELU between them, for each token separately."""

    def __init__(self, dim: int, hidden: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.activation = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tokens) -> Tokens:
        """Return tokens of the same shape."""
        hidden = self.dropout(self.activation(self.fc1(tokens)))  # (batch, tokens, hidden)
        result: Tensor = self.dropout(self.fc2(hidden))  # (batch, tokens, dim)
        return result


class TransformerBlock(nn.Module):
    """One block: attention, then an MLP, each added to the residual stream.

    A norm stands before each branch (pre-norm), or with norm_first=False after each addition
    (post-norm).

    The config can remove attention, MLP, norms or the residual connection. Without the latter, the
    output of a branch replaces the stream.

    drop_path: the probability, per image and in training, that a branch is dropped.
    """

    def __init__(self, config: ViTConfig, *, drop_path: float = 0.0) -> None:
        super().__init__()
        self.residual = config.residual
        self.norm_first = config.norm_first
        if config.attention:
            self.norm1 = _norm(config)
            self.attn: nn.Module | None = MultiHeadSelfAttention(
                config.dim,
                config.heads,
                qkv_bias=config.qkv_bias,
                dropout=config.attention_dropout,
                projection_dropout=config.dropout,
            )
        else:
            self.attn = None
        if config.mlp:
            self.norm2 = _norm(config)
            self.mlp: nn.Module | None = MLP(config.dim, config.hidden, dropout=config.dropout)
        else:
            self.mlp = None
        self.drop_path = StochasticDepth(drop_path, mode="row")

    def forward(self, tokens: Tokens) -> Tokens:
        """Return the residual stream after this block."""
        if self.attn is not None:
            tokens = self._branch(tokens, self.attn, self.norm1)
        if self.mlp is not None:
            tokens = self._branch(tokens, self.mlp, self.norm2)
        return tokens

    def _branch(self, tokens: Tokens, branch: nn.Module, norm: nn.Module) -> Tokens:
        if self.norm_first:
            return self._add(tokens, branch(norm(tokens)))
        result: Tensor = norm(self._add(tokens, branch(tokens)))
        return result

    def _add(self, tokens: Tokens, branch: Tokens) -> Tokens:
        dropped: Tensor = self.drop_path(branch)
        if self.residual:
            return tokens + dropped
        return dropped


class VisionTransformer(nn.Module):
    """Images (batch, 3, height, width), already normalised -> logits (batch, classes).

    The order of tokens is CLS, distillation token, registers, patches. Positions are added to all
    but the registers, which have no position in the image. For images of another size than the
    config's, learned positions are interpolated, and fixed ones computed again. The latter are a
    buffer that files do not hold. A distilled model has two heads: forward returns their average,
    forward_heads both. Without classes, the outputs are the head's input.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.patch_embed = PatchEmbedding(config.patch_size, dim)
        self.cls_token = _token(1, dim) if config.pooling == "cls" else None
        self.dist_token = _token(1, dim) if config.distillation else None
        self.reg_token = _token(config.registers, dim) if config.registers else None
        self.pos_embed = _positions(config)
        self.pos_drop = nn.Dropout(config.dropout)
        last_block = max(config.depth - 1, 1)  # 1 for a single block, to divide by
        self.blocks = nn.ModuleList()
        for index in range(config.depth):
            drop_path = config.drop_path * index / last_block
            self.blocks.append(TransformerBlock(config, drop_path=drop_path))
        # As in timm, CLS is taken from normalised tokens, and the mean of the patches is normalised
        # after pooling. The last block of a post-norm model ends with a norm, so that it has none
        # here.
        self.norm: nn.Module = nn.Identity()
        self.fc_norm: nn.Module = nn.Identity()
        if config.norm_first and config.pooling == "cls":
            self.norm = _norm(config)
        elif config.norm_first:
            self.fc_norm = _norm(config)
        self.head = _head(config)
        self.head_dist = _head(config) if config.distillation else None
        self.apply(initialise)

    def reset_classifier(self, classes: int) -> None:
        """Replace the heads by new ones for this number of classes; 0: the outputs are features."""
        self.config = replace(self.config, classes=classes)
        like = next(self.parameters())
        self.head = _head(self.config).to(like)
        if self.head_dist is not None:
            self.head_dist = _head(self.config).to(like)

    @property
    def layout(self) -> TokenLayout:
        """Return the layout of its tokens, for images of the config's size."""
        return self.config.layout

    def positions(self, grid: tuple[int, int]) -> Float[Tensor, "1 placed dim"]:
        """Return the position embeddings of the prefix without registers and of a grid of patches.

        Learned ones are interpolated to another grid than the config's, fixed ones computed again.
        Raises InputError for a model without position embeddings.
        """
        config = self.config
        if self.pos_embed is None:
            raise InputError("expected a model with position embeddings, found positions 'none'")
        if grid == self.layout.grid:
            return self.pos_embed
        prefix = len(self.layout.prefix) - config.registers
        if config.positions in FIXED:
            return fixed_positions(config.positions, grid=grid, prefix=prefix, dim=config.dim).to(
                self.pos_embed
            )
        return interpolate_positions(self.pos_embed, prefix=prefix, grid=self.layout.grid, to=grid)

    def tokens(self, images: Images) -> Tokens:
        """Return the residual stream before the first block.

        It is the prefix and the patches, with positions added.
        """
        grid = self.patch_embed.grid(images)
        batch = len(images)
        patches = self.patch_embed(images)  # (batch, patches, dim)
        prefix = []  # CLS and the distillation token, (batch, 1, dim)
        for token in (self.cls_token, self.dist_token):
            if token is not None:
                prefix.append(token.expand(batch, -1, -1))
        # (batch, prefix without registers + patches, dim)
        placed = torch.cat([*prefix, patches], dim=1)
        if self.pos_embed is not None:
            placed = placed + self.positions(grid)
        if self.reg_token is not None:
            prefix_tokens = placed[:, : len(prefix)]
            patch_tokens = placed[:, len(prefix) :]
            registers = self.reg_token.expand(batch, -1, -1)
            # of shape (batch, tokens, dim)
            placed = torch.cat((prefix_tokens, registers, patch_tokens), dim=1)
        result: Tensor = self.pos_drop(placed)
        return result

    def forward_features(self, images: Images) -> Tokens:
        """Return the residual stream after the last block.

        With CLS pooling and pre-norm, the final norm is applied.
        """
        tokens = self.tokens(images)
        for block in self.blocks:
            tokens = block(tokens)
        result: Tensor = self.norm(tokens)
        return result

    def pool(self, features: Tokens) -> Float[Tensor, "batch dim"]:
        """Return the head's input for the result of forward_features.

        It is the CLS token, or the normalised mean of the patches.
        """
        if self.cls_token is not None:
            pooled = features[:, 0]
        else:
            patches = features[:, len(self.layout.prefix) :]
            pooled = patches.mean(dim=1)
        result: Tensor = self.fc_norm(pooled)
        return result

    def forward_head(self, features: Tokens) -> Logits:
        """Return the logits for the result of forward_features.

        For a distilled model, they are the average of its two heads.
        """
        logits: Tensor = self.head(self.pool(features))
        if self.head_dist is not None:
            distillation_token = features[:, _DISTILLATION]
            logits = (logits + self.head_dist(distillation_token)) / 2
        return logits

    def forward_heads(self, images: Images) -> tuple[Logits, Logits]:
        """Return the logits of the CLS head and of the distillation head.

        Raises InputError for a model without the latter.
        """
        if self.head_dist is None:
            raise InputError(
                "expected a model with a distillation token, found none; try distillation=True"
            )
        features = self.forward_features(images)
        distillation_token = features[:, _DISTILLATION]
        return self.head(self.pool(features)), self.head_dist(distillation_token)

    def forward(self, images: Images) -> Logits:
        """Return logits (batch, classes)."""
        return self.forward_head(self.forward_features(images))


def _norm(config: ViTConfig) -> nn.Module:
    return nn.LayerNorm(config.dim, eps=NORM_EPSILON) if config.norm else nn.Identity()


def _head(config: ViTConfig) -> nn.Module:
    return nn.Linear(config.dim, config.classes) if config.classes else nn.Identity()


def _token(count: int, dim: int) -> nn.Parameter:
    """Return learned vectors (1, count, dim), truncated at two standard deviations."""
    return nn.Parameter(
        nn.init.trunc_normal_(torch.empty(1, count, dim), std=0.02, a=-0.04, b=0.04)
    )


def _positions(config: ViTConfig) -> Tensor | None:
    """Return position embeddings of the prefix without registers and of the patches."""
    prefix = len(config.layout.prefix) - config.registers
    grid = config.layout.grid
    if config.positions in FIXED:
        return nn.Buffer(
            fixed_positions(config.positions, grid=grid, prefix=prefix, dim=config.dim),
            persistent=False,
        )
    if config.positions == "learned":
        return _token(prefix + config.layout.patches, config.dim)
    return None


def initialise(module: nn.Module) -> None:
    """Set truncated normal weights of standard deviation 0.02 and zero biases."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Conv2d):
        # A deviation of 0.02 suits a fan-in of 2,500. The patch embedding of 4 px patches has a
        # fan-in of 48, and its embeddings would start too small.
        nn.init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
        nn.init.zeros_(module.bias)
