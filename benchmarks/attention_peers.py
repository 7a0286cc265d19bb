"""What users of timm write by hand: its unfused path with hooks, vit-explain's rollout, Chefer's
relevance.
"""

import copy

import torch
from torch import Tensor, nn

from vitlens.models.model import Model


class Unfused(nn.Module):
    """timm's own unfused path: what its users hook to get weights and their gradients."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model.module)
        self.seen: list[Tensor] = []
        for block in self.model.blocks:
            block.attn.fused_attn = False
            block.attn.attn_drop.register_forward_hook(
                lambda _module, inputs, _output: self.seen.append(inputs[0])
            )

    def weights(self, images: Tensor) -> list[Tensor]:
        self.seen.clear()
        with torch.no_grad():
            self.model(images)
        return list(self.seen)

    def with_gradients(self, images: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        self.seen.clear()
        logits = self.model(images.requires_grad_())
        total = logits.max(-1).values.sum()
        return [seen.detach() for seen in self.seen], torch.autograd.grad(total, self.seen)


def vit_explain(layers: list[Tensor]) -> Tensor:
    """jacobgil/vit-explain's rollout, mean fusion, no discard: the CLS row over the patches."""
    result = torch.eye(layers[0].shape[-1], device=layers[0].device).expand(len(layers[0]), -1, -1)
    for weights in layers:
        mixed = (weights.mean(1) + torch.eye(weights.shape[-1], device=weights.device)) / 2
        result = (mixed / mixed.sum(-1, keepdim=True)) @ result
    return result[:, 0, 1:]


def chefer(layers: list[Tensor], gradients: tuple[Tensor, ...]) -> Tensor:
    """Chefer's relevance with full matrices: the CLS row over the patches."""
    result = torch.eye(layers[0].shape[-1], device=layers[0].device).expand(len(layers[0]), -1, -1)
    for weights, gradient in zip(layers, gradients):
        result = result + (weights * gradient).clamp(min=0).mean(1) @ result
    return result[:, 0, 1:]
