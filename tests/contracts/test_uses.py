"""Whatever is done with a model leaves it as it was: after success, after an exception, and within other uses."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from inspect import signature

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import vitlens
from tests.kit.uses import CASES, ELSEWHERE, ONCE, USES, Break, BrokenError, batch_of, state_of, unsettled
from tests.lens.tiny import CLASSES, shaken
from tests.models.handwritten import SIZE, SoftmaxViT
from vitlens.models.hooks import overridden, watching
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


UNEQUAL = ("intervene", "replay", "profile")  # contexts in which the caller runs the model; times
PUBLIC = [name for name in USES if name.partition("/")[0] in vitlens.__all__ and name not in UNEQUAL]


def in_training(*, attention: bool) -> Model:
    """A user's module as it is when built: in training mode, with much dropout and with batch statistics."""

    def build() -> nn.Module:
        if attention:
            vit = SoftmaxViT(depth=2, drop=0.5)
            vit.stem = nn.Sequential(vit.stem, nn.BatchNorm2d(vit.stem.out_channels))  # type: ignore[assignment]
            return vit
        convolutions = [nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 5))

    module = shaken(build)
    model = vitlens.wrap(module, image_size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3, classes=CLASSES, alias="training")
    return model.train()


def differences(first: object, second: object, where: str = "") -> list[str]:
    """Where two results differ in a number or a word."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return [] if torch.equal(first.nan_to_num(nan=-7), second.nan_to_num(nan=-7)) else [where]
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        pairs = [(name, getattr(first, name), getattr(second, name)) for name in names]
    elif isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = [(str(key), value, second[key]) for key, value in first.items()]
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = [(str(number), *each) for number, each in enumerate(zip(first, second, strict=True))]
    else:
        comparable = isinstance(first, str | int | float) and first == first
        return [where] if comparable and first != second else []
    return [place for name, one, two in pairs for place in differences(one, two, f"{where}.{name}")]


@pytest.mark.parametrize("use", PUBLIC)
def test_a_module_in_training_mode_is_measured_in_evaluation_mode(use: str) -> None:
    """Twice the same, its batch statistics unchanged, and in training mode again."""
    model = in_training(attention=bool({"ours", "wrapped"} & set(USES[use].models)))
    kept = {name: value.clone() for name, value in model.named_buffers()}
    first, second = (USES[use].run(model, batch_of(model)) for _ in range(2))
    assert not differences(first, second)
    assert [name for name, value in model.named_buffers() if not torch.equal(value, kept[name])] == []
    assert all(module.training for module in model.modules())
