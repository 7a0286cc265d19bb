"""AdamW with weight decay where it belongs: on matrices, not on biases, norms, tokens or positions."""

import torch
from torch import nn

from vitlens.errors import InputError

UNDECAYED = ("cls_token", "reg_token", "dist_token", "pos_embed")


def decay_groups(module: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the trainable parameters that decay, and of those that do not, each in the module's order.

    A parameter of one axis or none (bias, scale of a norm) or named as a token or a position does not.
    """
    decayed: list[str] = []
    undecayed: list[str] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        spared = parameter.ndim <= 1 or name.rpartition(".")[2] in UNDECAYED
        (undecayed if spared else decayed).append(name)
    return decayed, undecayed


def adamw(
    module: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) with the two groups above. Raises InputError when nothing is trainable."""
    decayed, undecayed = decay_groups(module)
    if not decayed and not undecayed:
        raise InputError("expected a model with parameters to train, found none")
    named = dict(module.named_parameters())
    groups = [
        {"params": [named[name] for name in decayed], "weight_decay": weight_decay},
        {"params": [named[name] for name in undecayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas)
