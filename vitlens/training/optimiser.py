"""AdamW and Muon, the learning-rate schedule, and the moving average of the weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from vitlens.errors import InputError, argument
from vitlens.training.recipe import Recipe

UNDECAYED = (
    "cls_token",
    "reg_token",
    "dist_token",
    "pos_embed",
    "class_token",
    "pos_embedding",
    "bias_table",
    "relative_position_bias_table",
)
MOMENTUM: Final = 0.95  # Muon's


def decay_groups(module: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the trainable parameters with weight decay, and of those without, each in the
    module's order.

    Parameters of at most one axis (biases, scales of norms), tokens, position embeddings and biases
    do not decay.
    """
    trained = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    undecayed = [
        name
        for name, each in trained.items()
        if each.ndim <= 1 or name.rpartition(".")[2] in UNDECAYED
    ]
    return [name for name in trained if name not in undecayed], undecayed


def rate_shares(module: nn.Module, blocks: Sequence[str], *, decay: float) -> dict[str, float]:
    """Return each parameter's share of the learning rate: decay^(layers above it) (layer-wise
    decay, Bao 2022, BEiT).

    blocks: module names in forward order. Parameters before the first block count as a layer below
    it, those after the last block (norm, head) have the full rate; those between two blocks count
    with the block before.
    """
    names = [name for name, _ in module.named_parameters()]
    block_of = {name: _block_of(name, blocks) for name in names}
    last = max(
        (index for index, name in enumerate(names) if block_of[name] is not None), default=-1
    )
    shares = {}
    layer = 0
    for index, name in enumerate(names):
        block = block_of[name]
        layer = block + 1 if block is not None else layer
        shares[name] = 1.0 if index > last else decay ** (len(blocks) + 1 - layer)
    return shares


def _block_of(name: str, blocks: Sequence[str]) -> int | None:
    return next((index for index, block in enumerate(blocks) if name.startswith(f"{block}.")), None)


class Optimiser:
    """The optimiser of a recipe over all trainable parameters of a module; its state is named by
    parameter.

    "adamw" (Loshchilov & Hutter 2019) or "muon" (Jordan 2024: orthogonalised momentum for the
    matrices of the blocks, scaled to AdamW's update size, so that both take the same learning rate;
    AdamW for the rest). blocks: module names in forward order. Raises InputError when nothing is
    trainable, or torch has no Muon.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, *, blocks: Sequence[str] = ()) -> None:
        if recipe.optimiser == "muon" and not hasattr(torch.optim, "Muon"):
            raise InputError(
                f"expected torch 2.9 or later for {argument('optimiser', 'muon')}, found "
                f"{torch.__version__}; try adamw"
            )
        named = dict(module.named_parameters())
        shares = rate_shares(module, blocks, decay=recipe.layer_decay)
        # of AdamW and of Muon: parameters with the same weight decay and share of the learning rate
        groups: tuple[dict[tuple[float, float], list[str]], ...] = ({}, {})
        for names, decay in zip(decay_groups(module), (recipe.weight_decay, 0.0)):
            for name in names:
                # a table of positions is no map between features
                matrix = named[name].ndim == 2 and name.rpartition(".")[2] not in UNDECAYED
                muon = recipe.optimiser == "muon" and matrix and _block_of(name, blocks) is not None
                groups[muon].setdefault((decay, shares[name]), []).append(name)
        if not any(groups):
            raise InputError("expected a model with parameters to train, found none")
        adamw, matrices = (
            [
                {"params": [named[name] for name in names], "weight_decay": decay, "share": share}
                for (decay, share), names in own.items()
            ]
            for own in groups
        )
        optimisers: list[torch.optim.Optimizer] = []
        if adamw:
            optimisers.append(torch.optim.AdamW(adamw, lr=1.0, betas=recipe.betas))
        if matrices:
            muons = torch.optim.Muon(
                matrices, lr=1.0, momentum=MOMENTUM, nesterov=True, adjust_lr_fn="match_rms_adamw"
            )
            optimisers.append(muons)
        order = [[name for names in own.values() for name in names] for own in groups if own]
        self._parts = list(zip(optimisers, order))

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step; each group takes its share of it."""
        for optimizer, _ in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]

    def step(self) -> None:
        """Update the parameters by their gradients, and set the gradients to None."""
        for optimizer, _ in self._parts:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return all state, as PARAMETER/KEY; none before the first step."""
        return {
            f"{names[index]}/{key}": value
            for optimizer, names in self._parts
            for index, values in optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }

    def expected(self) -> dict[str, Tensor]:
        """Tensors with the names and shapes of the state after the first step."""
        state: dict[str, Tensor] = {}
        for optimizer, names in self._parts:
            keys = (
                ("exp_avg", "exp_avg_sq", "step")
                if isinstance(optimizer, torch.optim.AdamW)
                else ("momentum_buffer",)
            )
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            for name, parameter in zip(names, parameters):
                state |= {
                    f"{name}/{key}": torch.zeros(()) if key == "step" else parameter.detach()
                    for key in keys
                }
        return state

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of an optimiser of the same kind and parameters."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition("/")
            by_parameter.setdefault(parameter, {})[key] = value
        for optimizer, names in self._parts:
            state = {
                index: by_parameter[name]
                for index, name in enumerate(names)
                if name in by_parameter
            }
            optimizer.load_state_dict(
                {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
            )


def learning_rate(step: int, recipe: Recipe, *, total: int) -> float:
    """Return the learning rate of a step, from 0 to total - 1: rising up to the peak in the
    warm-up, then a cosine to the end.

    The cosine is Loshchilov & Hutter 2017, eq. 5, without restarts.
    """
    peak = recipe.learning_rate
    warmup = round(recipe.warmup * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    minimum = recipe.minimum * peak
    span = max(total - warmup - 1, 1)
    return minimum + 0.5 * (peak - minimum) * (1 + math.cos(math.pi * (step - warmup) / span))


class Average:
    """Averaged parameters and buffers of a module, by name.

    decay: weight of the old average at each update; min(decay, (1 + n) / (10 + n)) after n updates,
    so that the initial weights are soon forgotten.
    """

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.tensors = copy_of(module)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move the average towards the module's current weights; integer buffers are copied."""
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.tensors[name].lerp_(value, 1 - keep)
            else:
                self.tensors[name].copy_(value)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Yield the module with the averaged weights; its own are restored on exit."""
        own = copy_of(module)
        copy_into(module, self.tensors)
        try:
            yield
        finally:
            copy_into(module, own)


def copy_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers of a module."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@torch.no_grad()
def copy_into(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into all parameters and buffers of a module, in place."""
    for name, value in module.state_dict().items():
        value.copy_(tensors[name])
