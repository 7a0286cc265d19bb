"""Relevance maps by Chefer's published formula (ICCV 2021, equations 5 and 6), from a state dict.

It stands for a script of somebody else: no code of vitlens, only torch and the parameters' names of
timm, of a ViT with a CLS token and pre-norm. Its maps are what `vitlens.verify` and `--maps` get.

In the paper's letters, A are the weights of a layer, dA their gradient and R the relevance of every
token for every other one. R begins as the identity; each layer adds to it:

    E = mean over heads of max(A * dA, 0)    (equation 5)
    R = R + E R                              (equation 6)

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
    """Return the relevance of each patch for a class (n, rows, columns), image by image.

    pixels: normalised (n, 3, height, width).
    targets: the class of each image (n,).
    """
    maps = []
    for image, target in zip(pixels, targets.tolist(), strict=True):
        maps.append(_relevance_of_image(state, heads, image, target))
    return torch.stack(maps)


def _relevance_of_image(state: State, heads: int, pixels: Tensor, target: int) -> Tensor:
    kernel = state["patch_embed.proj.weight"]
    bias = state["patch_embed.proj.bias"]
    patches = F.conv2d(pixels[None], kernel, bias, stride=kernel.shape[-2:])
    grid = patches.shape[-2:]
    embedded = torch.cat([state["cls_token"], patches.flatten(2).mT], dim=1)
    tokens = embedded + state["pos_embed"]  # (1, tokens, dim)
    weights_by_layer = []
    for number in range(_count_blocks(state)):
        tokens, weights = _block(state, f"blocks.{number}.", heads, tokens)
        weights_by_layer.append(weights)
    cls = _norm(state, "norm", tokens)[:, 0]
    logits = _linear(state, "head", cls)
    gradients = torch.autograd.grad(logits[0, target], weights_by_layer)
    relevance_of_tokens = torch.eye(tokens.shape[1])
    for weights, gradient in zip(weights_by_layer, gradients, strict=True):
        raising = (weights * gradient).clamp_min(0)  # (1, heads, query, key)
        mean_over_heads = raising.mean(1)[0].detach()  # equation 5
        relevance_of_tokens = relevance_of_tokens + mean_over_heads @ relevance_of_tokens
    return relevance_of_tokens[0, 1:].view(grid)  # of the patches, for the CLS token


def _count_blocks(state: State) -> int:
    numbers = [int(name.split(".")[1]) for name in state if name.startswith("blocks.")]
    return 1 + max(numbers)


def _block(state: State, block: str, heads: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens after a block, and its attention weights (1, heads, query, key)."""
    mixed = _linear(state, f"{block}attn.qkv", _norm(state, f"{block}norm1", tokens))
    # (1, tokens, 3 * dim) to three tensors (1, heads, tokens, head_dim)
    query, key, value = mixed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    weights = scores.softmax(-1).requires_grad_()
    attended = (weights @ value).transpose(1, 2).flatten(2)  # (1, tokens, dim)
    tokens = tokens + _linear(state, f"{block}attn.proj", attended)
    hidden = F.gelu(_linear(state, f"{block}mlp.fc1", _norm(state, f"{block}norm2", tokens)))
    return tokens + _linear(state, f"{block}mlp.fc2", hidden), weights


def _norm(state: State, name: str, tokens: Tensor) -> Tensor:
    weight = state[f"{name}.weight"]
    bias = state[f"{name}.bias"]
    return F.layer_norm(tokens, tokens.shape[-1:], weight, bias, EPSILON)


def _linear(state: State, name: str, tokens: Tensor) -> Tensor:
    return F.linear(tokens, state[f"{name}.weight"], state[f"{name}.bias"])


def save(path: Path, maps: Tensor, **more: np.ndarray) -> Path:
    """Write a file for --maps, and return its path."""
    arrays: dict[str, Any] = {"maps": maps.numpy(), **more}
    np.savez(path, **arrays)
    return path
