"""Relevance maps by Chefer's published formula (ICCV 2021, equations 5 and 6), from a state dict.

A script of somebody else: no code of vitlens, only torch and the parameters' names of timm, of a
ViT with a CLS token and pre-norm. Its maps are what `vitlens.verify` and `--maps` are given.

    maps = relevance(state, heads=4, pixels=normalised, targets=labels)    # (n, rows, columns)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-6  # of timm's norms
State = Mapping[str, Tensor]


def relevance(state: State, *, heads: int, pixels: Tensor, targets: Tensor) -> Tensor:
    """Return the relevance of each patch for a class, image by image.

    pixels are normalised, (n, 3, height, width).
    """
    pairs = zip(pixels, targets.tolist(), strict=True)
    return torch.stack([_of_image(state, heads, image, target) for image, target in pairs])


def _of_image(state: State, heads: int, pixels: Tensor, target: int) -> Tensor:
    kernel = state["patch_embed.proj.weight"]
    patches = F.conv2d(
        pixels[None], kernel, state["patch_embed.proj.bias"], stride=kernel.shape[-2:]
    )
    grid = patches.shape[-2:]
    tokens = torch.cat([state["cls_token"], patches.flatten(2).mT], 1) + state["pos_embed"]
    layers = []
    for number in range(1 + max(int(name.split(".")[1]) for name in state if "blocks." in name)):
        tokens, weights = _block(state, f"blocks.{number}.", heads, tokens)
        layers.append(weights)
    logits = F.linear(_norm(state, "norm", tokens)[:, 0], state["head.weight"], state["head.bias"])
    gradients = torch.autograd.grad(logits[0, target], layers)
    together = torch.eye(tokens.shape[1])
    for weights, gradient in zip(layers, gradients, strict=True):
        raising = (weights * gradient).clamp_min(0).mean(1)[0].detach()  # equation 5
        together = together + raising @ together  # equation 6
    return together[0, 1:].view(grid)


def _block(state: State, block: str, heads: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens after a block, and its attention weights (1, heads, query, key)."""
    mixed = _linear(state, f"{block}attn.qkv", _norm(state, f"{block}norm1", tokens))
    query, key, value = mixed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1).requires_grad_()
    attended = (weights @ value).transpose(1, 2).flatten(2)
    tokens = tokens + _linear(state, f"{block}attn.proj", attended)
    hidden = F.gelu(_linear(state, f"{block}mlp.fc1", _norm(state, f"{block}norm2", tokens)))
    return tokens + _linear(state, f"{block}mlp.fc2", hidden), weights


def _norm(state: State, name: str, tokens: Tensor) -> Tensor:
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    return F.layer_norm(tokens, tokens.shape[-1:], weight, bias, EPSILON)


def _linear(state: State, name: str, tokens: Tensor) -> Tensor:
    return F.linear(tokens, state[f"{name}.weight"], state[f"{name}.bias"])


def save(path: Path, maps: Tensor, **more: np.ndarray) -> Path:
    """Write a file for --maps, and return its path."""
    arrays: dict[str, Any] = {"maps": maps.numpy(), **more}
    np.savez(path, **arrays)
    return path
