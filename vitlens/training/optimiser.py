"""AdamW and Muon, the learning-rate schedule, and the moving average of the weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from vitlens.errors import InputError
from vitlens.names import OPTIMISERS

UNDECAYED = (
    "cls_token", "reg_token", "dist_token", "pos_embed", "class_token", "pos_embedding",
    "bias_table", "relative_position_bias_table",
)  # fmt: skip
MOMENTUM: Final = 0.95  # Muon's


def decay_groups(module: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the trainable parameters with weight decay, and of those without, each in the module's order.

    Parameters of at most one axis (biases, scales of norms), tokens, position embeddings and biases do not decay.
    """
    decayed: list[str] = []
    undecayed: list[str] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        excluded = parameter.ndim <= 1 or name.rpartition(".")[2] in UNDECAYED
        (undecayed if excluded else decayed).append(name)
    return decayed, undecayed


def rate_shares(module: nn.Module, blocks: Sequence[str], *, decay: float) -> dict[str, float]:
    """Each parameter's share of the learning rate: decay^(layers above it) (layer-wise decay, Bao 2022, BEiT).

    blocks: module names in forward order. Parameters before the first block count as a layer below it, those after the
    last block (norm, head) have the full rate; those between two blocks count with the block before.
    """
    names = [name for name, _ in module.named_parameters()]
    block_of = {name: _block_of(name, blocks) for name in names}
    last = max((index for index, name in enumerate(names) if block_of[name] is not None), default=-1)
    shares, layer = {}, 0
    for index, name in enumerate(names):
        block = block_of[name]
        layer = block + 1 if block is not None else layer
        shares[name] = 1.0 if index > last else decay ** (len(blocks) + 1 - layer)
    return shares


class Group(NamedTuple):
    """Parameters with the same settings: optimiser, weight decay, share of the learning rate."""

    muon: bool
    decays: bool
    share: float


class Optimiser:
    """One optimiser over all trainable parameters of a module; its state is named by parameter.

    kind: "adamw" (Loshchilov & Hutter 2019) or "muon" (Jordan 2024: orthogonalised momentum for the matrices of the
    blocks, scaled to AdamW's update size, so that both take the same learning rate; AdamW for the rest); blocks: module
    names in forward order; layer_decay: see rate_shares. Raises InputError when nothing is trainable.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        kind: str = "adamw",
        weight_decay: float,
        betas: tuple[float, float],
        layer_decay: float = 1.0,
        blocks: Sequence[str] = (),
    ) -> None:
        _require_kind(kind)
        self.groups = _grouped(module, kind, layer_decay, blocks)
        if not self.groups:
            raise InputError("expected a model with parameters to train, found none")
        named = dict(module.named_parameters())
        self._parts: list[tuple[torch.optim.Optimizer, list[str]]] = []
        for muon in (False, True):
            matching = {group: names for group, names in self.groups.items() if group.muon == muon}
            if matching:
                groups = [
                    {"params": [named[name] for name in names], "weight_decay": weight_decay * group.decays,
                     "share": group.share}
                    for group, names in matching.items()
                ]  # fmt: skip
                optimizer = _muon(groups) if muon else torch.optim.AdamW(groups, lr=1.0, betas=betas)
                self._parts.append((optimizer, [name for names in matching.values() for name in names]))

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
        """All state, as PARAMETER/KEY."""
        state: dict[str, Tensor] = {}
        for optimizer, names in self._parts:
            for index, values in optimizer.state_dict()["state"].items():
                state |= {f"{names[index]}/{key}": value for key, value in values.items()}
        return state

    def expected_state(self, *, started: bool) -> dict[str, Tensor]:
        """Tensors with the names and shapes of the state after the first step; before it there is none."""
        state: dict[str, Tensor] = {}
        for optimizer, names in self._parts if started else ():
            muon = not isinstance(optimizer, torch.optim.AdamW)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for name, parameter in zip(names, parameters):
                keys = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq")
                state |= {f"{name}/{key}": parameter.detach() for key in keys}
                if not muon:
                    state[f"{name}/step"] = torch.zeros(())
        return state

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of an optimiser of the same kind and parameters."""
        by_parameter: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition("/")
            by_parameter.setdefault(parameter, {})[key] = value
        for optimizer, names in self._parts:
            state = {index: by_parameter[name] for index, name in enumerate(names) if name in by_parameter}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _grouped(module: nn.Module, kind: str, layer_decay: float, blocks: Sequence[str]) -> dict[Group, list[str]]:
    """The trainable parameters' names by their settings."""
    decayed, undecayed = decay_groups(module)
    shares = rate_shares(module, blocks, decay=layer_decay)
    matrices = set(_matrices(module, blocks)) if kind == "muon" else set()
    groups: dict[Group, list[str]] = {}
    for name in (*decayed, *undecayed):
        groups.setdefault(Group(name in matrices, name in set(decayed), shares[name]), []).append(name)
    return groups


def _matrices(module: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        learned_per_place = name.rpartition(".")[2] in UNDECAYED  # a table of numbers, not a map between features
        if parameter.ndim == 2 and not learned_per_place and _block_of(name, blocks) is not None:
            yield name


def _block_of(name: str, blocks: Sequence[str]) -> int | None:
    """The block that contains a parameter, or None."""
    return next((index for index, block in enumerate(blocks) if name.startswith(f"{block}.")), None)


def _require_kind(kind: str) -> None:
    if kind not in OPTIMISERS:
        raise InputError(f"expected an optimiser ({', '.join(OPTIMISERS)}), found {kind!r}")
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        raise InputError(f"expected torch 2.9 or later for --optimiser muon, found {torch.__version__}; try adamw")


def _muon(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = torch.optim.Muon(
        groups, lr=1.0, momentum=MOMENTUM, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    return optimizer


def learning_rate(step: int, *, total: int, warmup: int, peak: float, minimum: float) -> float:
    """The learning rate of a step, from 0: peak/warmup at the first, peak after the warm-up, minimum at the last.

    total, warmup: steps. The cosine is Loshchilov & Hutter 2017, eq. 5, without restarts. Raises InputError when the
    step or the warm-up lies outside the total.
    """
    if not 0 <= step < total or not 0 <= warmup <= total:
        raise InputError(f"expected 0 <= step < {total} and 0 <= warm-up <= {total}, found {step} and {warmup}")
    if step < warmup:
        return peak * (step + 1) / warmup
    span = max(total - warmup - 1, 1)
    return minimum + 0.5 * (peak - minimum) * (1 + math.cos(math.pi * (step - warmup) / span))


class Average:
    """Averaged parameters and buffers of a module, by name.

    decay: weight of the old average at each update; min(decay, (1 + n) / (10 + n)) after n updates, so that the initial
    weights are soon forgotten.
    """

    def __init__(self, module: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.tensors = {name: value.detach().clone() for name, value in module.state_dict().items()}

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
        """The module with the averaged weights; its own are restored on exit."""
        own = {name: value.detach().clone() for name, value in module.state_dict().items()}
        copy_into(module, self.tensors)
        try:
            yield
        finally:
            copy_into(module, own)


@torch.no_grad()
def copy_into(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into all parameters and buffers of a module, in place."""
    for name, value in module.state_dict().items():
        value.copy_(tensors[name])
