"""Where a forward pass uses each parameter, and where the randomization check counts it."""

from contextlib import ExitStack

import torch
from torch import Tensor

from tests.kit.tiny import images
from vitlens import Model
from vitlens.analysis.faithfulness.sanity import cascade


def new_at_each_stage(model: Model) -> dict[str, set[str]]:
    """Return the parameters that a stage randomises and the stages before do not."""
    changed = dict[str, set[str]]()
    before = set[str]()
    for title, names in cascade(model).items():
        changed[title] = set(names) - before
        before |= set(names)
    return changed


def used_behind(model: Model) -> set[str]:
    """Return the parameters on which the logits depend, and the last block's output does not."""
    return {
        name
        for name, (first, last, logits) in _effects(model).items()
        if logits and not last and not first
    }


def used_before(model: Model) -> set[str]:
    """Return the parameters on which the first block's input depends."""
    return {name for name, (first, _, _) in _effects(model).items() if first}


@torch.no_grad()
def _effects(model: Model) -> dict[str, tuple[bool, bool, bool]]:
    """Return which of first input, last output and logits each parameter changes."""
    plain = _seen(model)
    effects = {}
    for name, parameter in model.module.named_parameters():
        value = parameter.clone()
        parameter.mul_(1.5).add_(torch.linspace(-0.1, 0.2, value.numel()).view_as(value))
        effects[name] = tuple(not torch.equal(*pair) for pair in zip(_seen(model), plain))
        parameter.copy_(value)
    return effects


def _seen(model: Model) -> tuple[Tensor, ...]:
    captured: dict[str, Tensor] = {}
    first = model.module.get_submodule(model.anatomy.blocks[0])
    last = model.module.get_submodule(model.anatomy.blocks[-1])
    with ExitStack() as stack:
        stack.enter_context(
            first.register_forward_pre_hook(lambda _m, args: captured.update(first=args[0].clone()))
        )
        stack.enter_context(
            last.register_forward_hook(lambda _m, _a, output: captured.update(last=output.clone()))
        )
        logits = model(images(model.input_size))
    return captured["first"], captured["last"], logits
