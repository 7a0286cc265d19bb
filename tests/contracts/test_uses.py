"""Whatever is done with a model leaves it as it was: after success, after an exception, and within other uses."""

from collections.abc import Callable
from inspect import signature

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import vitlens
from tests.contracts.uses import CASES, ELSEWHERE, ONCE, USES, Break, BrokenError, batch_of, state_of, unsettled
from vitlens.lens.hooks import overridden, watching
from vitlens.models.model import Model


@pytest.fixture(autouse=True)
def few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Square asks 50 times a step, RISE and KernelSHAP draw many masks; a few show the same."""
    monkeypatch.setattr("vitlens.attacks.scores.QUERIES", 4)


def test_every_public_function_of_a_model_is_a_use() -> None:
    listed = {name.partition("/")[0] for name in USES} | ELSEWHERE.keys()
    functions = {
        name: getattr(vitlens, name) for name in vitlens.__all__ if name not in ("Model", "__version__", "load")
    }
    of_models = {name for name, function in functions.items() if Model in _types(function)}
    assert of_models <= listed
    assert ELSEWHERE.keys() <= of_models


def _types(function: Callable[..., object]) -> list[object]:
    return [parameter.annotation for parameter in signature(function).parameters.values()]


def deepest(model: Model) -> nn.Module:
    """A layer in the middle of things: the last linear one of a block, or of the model."""
    inner = [module for name, module in model.named_modules() if ".mlp." in name and isinstance(module, nn.Linear)]
    return (inner or [module for module in model.modules() if isinstance(module, nn.Linear)])[-1]


@pytest.mark.parametrize(
    ("use", "name"),
    [pytest.param(use, name, marks=() if default else pytest.mark.slow) for use, name, default in CASES],
)
def test_nothing_is_left_behind(use: str, name: str) -> None:
    """Success, then failures at the first and last call of a layer, then success again."""
    model = unsettled(name)
    batch, run = batch_of(model), USES[use].run
    before, random = state_of(model), torch.get_rng_state()
    run(model, batch)
    assert state_of(model) == before
    assert torch.equal(batch, batch_of(model))
    assert not batch.requires_grad
    assert torch.equal(torch.get_rng_state(), random)
    calls = Break(BrokenError, 0)
    handle = deepest(model).register_forward_pre_hook(calls)
    run(model, batch)
    handle.remove()
    assert calls.calls, "the layer is never run: nothing can break in it"
    for error, after in ((BrokenError, 1), (KeyboardInterrupt, 1 if USES[use].timed else calls.calls)):
        handle = deepest(model).register_forward_pre_hook(Break(error, after))
        broken = state_of(model)
        with pytest.raises(error):
            run(model, batch)
        assert state_of(model) == broken
        handle.remove()
    run(model, batch)  # and it works again
    assert state_of(model) == before
    assert torch.equal(batch, batch_of(model))


def breaks_backward(model: Model, calls: list[Tensor], *, raises: bool) -> RemovableHandle:
    def broken(gradient: Tensor) -> None:
        calls.append(gradient)
        if raises:
            raise BrokenError

    def watch(_module: object, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(broken)

    return list(model.module.children())[-1].register_forward_hook(watch)


@pytest.mark.parametrize(("use", "name"), ONCE)
def test_nothing_is_left_behind_by_a_failure_in_the_backward_pass(use: str, name: str) -> None:
    model, calls = unsettled(name), []
    batch, run = batch_of(model), USES[use].run
    handle = breaks_backward(model, calls, raises=False)
    run(model, batch)
    handle.remove()
    if not calls:
        return  # a use without a backward pass through the classifier
    handle = breaks_backward(model, calls, raises=True)
    before = state_of(model)
    with pytest.raises(BrokenError):
        run(model, batch)
    assert state_of(model) == before
    handle.remove()


@pytest.mark.parametrize(("use", "name"), ONCE)
def test_a_use_within_another_undoes_its_own_alone(use: str, name: str) -> None:
    model = unsettled(name)
    batch, calls = batch_of(model), []
    before, blocks = state_of(model), model.anatomy.blocks
    first = model.module.get_submodule(blocks[0])
    with watching(model.module, blocks, lambda block, *_: calls.append(block)), overridden(first, lambda own: own):
        around = state_of(model)
        USES[use].run(model, batch)
        assert state_of(model) == around
        calls.clear()
        with torch.no_grad():
            model(batch)
        assert calls == list(blocks)
    assert state_of(model) == before
