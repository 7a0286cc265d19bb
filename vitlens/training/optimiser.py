"""AdamW and Muon, the learning-rate schedule, and the moving average of the weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

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
MOMENTUM: Final = 0.95  # the momentum of Muon


def decay_groups(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the trainable parameters with weight decay, and of those without.

    Both are in the module's order. Parameters of at most one axis (biases, scales of norms), the
    model's tokens, position embeddings and tables of biases do not decay. MAE's mask token decays.
    """
    decayed = []
    undecayed = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim <= 1 or _is_undecayed(name):
            undecayed.append(name)
        else:
            decayed.append(name)
    return decayed, undecayed


def _is_undecayed(name: str) -> bool:
    """Return True for a token, a position embedding or a bias, by the parameter's name."""
    return name.rpartition(".")[2] in UNDECAYED


def rate_shares(module: nn.Module, blocks: Sequence[str], *, decay: float) -> dict[str, float]:
    """Return each parameter's share of the learning rate: decay^(layers above it).

    This is layer-wise decay (BEiT, Bao 2022). Parameters before the first block count as a layer
    below it. Those between two blocks count with the block before. Those after the last block
    (norm, head) have the full rate, and count as one layer above the last block.

    blocks: the names of the blocks in forward order.
    """
    names = [name for name, _ in module.named_parameters()]
    block_of_parameter = [_block_of(name, blocks) for name in names]
    last_in_block = -1  # the index of the last parameter of any block
    for index, block in enumerate(block_of_parameter):
        if block is not None:
            last_in_block = index
    shares = {}
    layer = 0  # 0 before the first block, then the number of the block plus 1
    for index, (name, block) in enumerate(zip(names, block_of_parameter)):
        if block is not None:
            layer = block + 1
        layers_above = len(blocks) + 1 - layer
        shares[name] = decay**layers_above if index <= last_in_block else 1.0
    return shares


def _block_of(name: str, blocks: Sequence[str]) -> int | None:
    """Return the index of a parameter's block, None outside the blocks."""
    for index, block in enumerate(blocks):
        if name.startswith(f"{block}."):
            return index
    return None


class Optimiser:
    """The optimiser of a recipe over a module's trainable parameters, with its state by parameter.

    It is "adamw" (Loshchilov & Hutter 2019) or "muon" (Jordan 2024). Muon takes orthogonalised
    momentum for the matrices of the blocks, and AdamW for all other parameters. Its updates are
    scaled to the size of AdamW's, so that both take the same learning rate. Raises InputError if
    nothing is trainable, or if torch has no Muon.

    blocks: the names of the blocks in forward order.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, *, blocks: Sequence[str] = ()) -> None:
        if recipe.optimiser == "muon" and not hasattr(torch.optim, "Muon"):
            raise InputError(
                f"expected torch 2.9 or later for {argument('optimiser', 'muon')}, found "
                f"{torch.__version__}; try adamw"
            )
        parameters = dict(module.named_parameters())
        shares = rate_shares(module, blocks, decay=recipe.layer_decay)
        adamw_groups = _Groups(parameters)
        muon_groups = _Groups(parameters)
        decayed, undecayed = decay_groups(module)
        for names, decay in ((decayed, recipe.weight_decay), (undecayed, 0.0)):
            for name in names:
                # a table of positions has two axes, but is no map between features
                is_matrix = parameters[name].ndim == 2 and not _is_undecayed(name)
                takes_muon = is_matrix and _block_of(name, blocks) is not None
                groups = muon_groups if recipe.optimiser == "muon" and takes_muon else adamw_groups
                groups.add(name, decay=decay, share=shares[name])
        # torch's optimisers, each with the names of its parameters in its order
        self._parts: list[tuple[torch.optim.Optimizer, list[str]]] = []
        if adamw_groups.names:
            adamw = torch.optim.AdamW(adamw_groups.options(), lr=1.0, betas=recipe.betas)
            self._parts.append((adamw, adamw_groups.names))
        if muon_groups.names:
            muon = torch.optim.Muon(
                muon_groups.options(),
                lr=1.0,
                momentum=MOMENTUM,
                nesterov=True,
                adjust_lr_fn="match_rms_adamw",
            )
            self._parts.append((muon, muon_groups.names))
        if not self._parts:
            raise InputError("expected a model with parameters to train, found none")

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
        """Return all state by PARAMETER/KEY; it is empty before the first step."""
        tensors = {}
        for optimizer, names in self._parts:
            for index, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"{names[index]}/{key}"] = value
        return tensors

    def expected(self) -> dict[str, Tensor]:
        """Return tensors with the names and shapes of the state after the first step."""
        state: dict[str, Tensor] = {}
        for optimizer, names in self._parts:
            parameters: list[Tensor] = []
            for group in optimizer.param_groups:
                parameters += group["params"]
            for name, parameter in zip(names, parameters):
                if isinstance(optimizer, torch.optim.AdamW):
                    state[f"{name}/exp_avg"] = parameter.detach()
                    state[f"{name}/exp_avg_sq"] = parameter.detach()
                    state[f"{name}/step"] = torch.zeros(())
                else:
                    state[f"{name}/momentum_buffer"] = parameter.detach()
        return state

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of an optimiser of the same kind and parameters."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition("/")
            by_parameter.setdefault(parameter, {})[key] = value
        for optimizer, names in self._parts:
            state = {}
            for index, name in enumerate(names):
                if name in by_parameter:
                    state[index] = by_parameter[name]
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})


class _Groups:
    """Names of parameters, grouped by weight decay and share of the learning rate."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._names: dict[tuple[float, float], list[str]] = {}  # by (weight decay, share)

    def add(self, name: str, *, decay: float, share: float) -> None:
        """Add a parameter to its group."""
        self._names.setdefault((decay, share), []).append(name)

    @property
    def names(self) -> list[str]:
        """Return all names, group by group."""
        names = []
        for group in self._names.values():
            names += group
        return names

    def options(self) -> list[dict[str, Any]]:
        """Return the groups as torch's optimisers take them."""
        options = []
        for (decay, share), names in self._names.items():
            parameters = [self._parameters[name] for name in names]
            options.append({"params": parameters, "weight_decay": decay, "share": share})
        return options


def learning_rate(step: int, recipe: Recipe, *, total: int) -> float:
    """Return the learning rate of a step, from 0 to total - 1.

    It rises linearly to the peak in the warm-up, then falls as a cosine to the minimum (Loshchilov
    & Hutter 2017, eq. 5, without restarts).
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

    decay: the weight of the old average at each update. After n updates, it is min(decay, (1 + n) /
        (10 + n)), so that the initial weights are soon forgotten.
    """

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.tensors = copy_of(module)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move the average towards the module's current weights; integer buffers are copied."""
        n = self.updates
        keep = min(self.decay, (1 + n) / (10 + n))
        self.updates += 1
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.tensors[name].lerp_(value, 1 - keep)
            else:
                self.tensors[name].copy_(value)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Yield the module with the averaged weights; the current weights are restored on exit."""
        current = copy_of(module)
        copy_into(module, self.tensors)
        try:
            yield
        finally:
            copy_into(module, current)


def copy_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters and buffers, without those that no file holds."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@torch.no_grad()
def copy_into(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors, as of `copy_of`, into a module in place."""
    for name, value in module.state_dict().items():
        value.copy_(tensors[name])
