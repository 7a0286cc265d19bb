"""One list of checks for every function of a model and every method's entry (entries.py).

A check that an entry does not pass stands in the entry's `exempt`, with the reason.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import isfunction, signature
from itertools import islice
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

import vitlens
from tests.contracts.entries import (
    ELSEWHERE,
    ENTRIES,
    HEADLESS,
    MODELS,
    Entry,
    batch_of,
    cover,
    headless,
    shared,
)
from tests.kit.marks import slow_if
from tests.kit.select import values_of
from vitlens import Model
from vitlens.errors import DataError, InputError, UnsupportedError

CHECKS = {
    "nested",
    "repeated",
    "each image alone",
    "other numbers",
    "refused pixels",
    "float64",
    "without a classifier",
}
QUICK = pytest.mark.parametrize(
    ("name", "on"),
    [slow_if(not quick, name, on) for name, on, quick in cover()],
)


class BrokenError(Exception):
    """Raised in the middle of a forward or backward pass."""


class Break:
    """A pre-hook that raises at its n-th call; counts its calls."""

    def __init__(self, error: type[BaseException], after: int) -> None:
        self.error = error
        self.after = after
        self.calls = 0

    def __call__(self, _module: nn.Module, _inputs: object) -> None:
        self.calls += 1
        if self.calls == self.after:
            raise self.error


def unsettled(model: Model) -> Model:
    """Put parts into training mode, request some gradients and set one."""
    leaves = (module for module in model.modules() if not any(True for _ in module.children()))
    for module in islice(leaves, 0, None, 3):
        module.training = not isinstance(module, nn.BatchNorm2d)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    return model


def state_of(model: Model) -> list[object]:
    """Return all that a use of a model might forget to restore, in the model and in torch."""
    modules = []
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        forward = vars(module).get("forward")
        modules.append((name, module.training, forward, *map(list, hooks)))
    parameters = []
    for name, value in model.named_parameters():
        gradient = None if value.grad is None else value.grad.sum().item()
        parameters.append((name, value.requires_grad, value.stride(), gradient))
    values = [
        value.sum().item() for value in model.state_dict().values() if value.is_floating_point()
    ]
    flags = [
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.mha.get_fastpath_enabled(),
    ]
    return [modules, parameters, values, flags, len(_get_current_function_mode_stack())]


def of_check(
    check: str, *, reads: bool = True, per_image: bool = False, of: str = "all"
) -> pytest.MarkDecorator:
    """Parametrize a test with the entries that a check applies to.

    reads: entries with numbers to compare; per_image: entries with one row per image;
    of: "all" entries of a registry, one of each "kind" that shares code, or only "one".
    """
    assert check in CHECKS
    first_by_kind: dict[str, Entry] = {}
    for name, entry in ENTRIES.items():
        if (
            check not in entry.exempt
            and (entry.read or not reads)
            and (entry.per_image or not per_image)
        ):
            kind = (
                {"all": name, "kind": entry.shares, "one": name.partition("/")[0]}[of]
                if entry.shares
                else name
            )
            first_by_kind.setdefault(kind, entry)
    return pytest.mark.parametrize("name", values_of(first_by_kind.values(), "name"))


@cache
def own(on: str, state: str) -> Model:
    """Return the model in this state, which all checks share and none changes."""
    model = MODELS[on]()
    return {"unsettled": unsettled, "training": Model.train, "float64": Model.double}[state](model)


def takes_model(function: Callable[..., object]) -> bool:
    """Return True if a parameter is a model, or one model or several."""
    kinds = [parameter.annotation for parameter in signature(function).parameters.values()]
    return Model in kinds or any({Model, list[Model]} <= set(get_args(kind)) for kind in kinds)


def test_every_public_function_of_a_model_is_an_entry():
    functions = {name: getattr(vitlens, name) for name in vitlens.__all__}
    takes = {
        name
        for name, function in functions.items()
        if isfunction(function) and takes_model(function)
    }
    assert (
        takes | ELSEWHERE.keys() == {name.partition("/")[0] for name in ENTRIES} | ELSEWHERE.keys()
    )
    assert not ELSEWHERE.keys() & ENTRIES.keys()
    assert {check for entry in ENTRIES.values() for check in entry.exempt} <= CHECKS


def deepest(model: Model) -> nn.Module:
    """Return a layer inside the model: the last linear layer of a block, or of the model."""
    linear = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    inner = [module for name, module in linear if ".mlp." in name or ".think." in name]
    return (inner or [module for _, module in linear])[-1]


@QUICK
def test_nothing_is_left_behind(name: str, on: str) -> None:
    """Success, failures at the first and last call of a layer and in the backward pass, within
    another use; again.
    """
    model = own(on, "unsettled")
    run = ENTRIES[name].run
    batch = batch_of(model)
    before = state_of(model)
    random = torch.get_rng_state()
    run(model, batch)
    assert state_of(model) == before
    assert torch.equal(batch, batch_of(model))
    assert not batch.requires_grad
    assert torch.equal(torch.get_rng_state(), random) or "repeated" in ENTRIES[name].exempt
    calls = Break(BrokenError, 0)
    backward = list[Tensor]()
    handles = [
        deepest(model).register_forward_pre_hook(calls),
        breaks_backward(model, backward, raises=False),
    ]
    run(model, batch)
    for handle in handles:
        handle.remove()
    # how many passes it makes depends on the time that they take
    last = 1 if name == "profile" else calls.calls
    for error, after in ((BrokenError, 1), (KeyboardInterrupt, last)) if calls.calls else ():
        handle = deepest(model).register_forward_pre_hook(Break(error, after))
        fails_as_it_was(model, batch, run, error)
        handle.remove()
    assert calls.calls or name == "places"
    if backward:
        handle = breaks_backward(model, backward, raises=True)
        fails_as_it_was(model, batch, run, BrokenError)
        handle.remove()
    run(model, batch)  # and it works again
    assert state_of(model) == before


def fails_as_it_was(
    model: Model, batch: Tensor, run: Callable[[Model, Tensor], object], error: type[BaseException]
) -> None:
    before = state_of(model)
    with pytest.raises(error):
        run(model, batch)
    assert state_of(model) == before


def breaks_backward(model: Model, calls: list[Tensor], *, raises: bool) -> RemovableHandle:
    def broken(gradient: Tensor) -> None:
        calls.append(gradient)
        if raises:
            raise BrokenError

    def watch(_module: object, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(broken)

    return list(model.module.children())[-1].register_forward_hook(watch)


@of_check("nested", reads=False, of="kind")
def test_a_use_within_others_undoes_its_own_alone(name: str) -> None:
    """After success and after a failure, what is around it goes on as before."""
    entry = ENTRIES[name]
    model = shared(entry.models[0])
    batch = batch_of(model)
    before = state_of(model)
    place = next(place.name for place in vitlens.places(model) if place.changeable)
    with (
        vitlens.intervene(model, {place: torch.neg}),
        vitlens.intervene(model, {place: lambda value: 2 * value}),
    ):
        around = state_of(model)
        expected = answers(model, batch)
        entry.run(model, batch)
        assert state_of(model) == around
        assert torch.equal(answers(model, batch), expected)
        calls = Break(BrokenError, 1)
        handle = deepest(model).register_forward_pre_hook(calls)
        with suppress(BrokenError):
            entry.run(model, batch)
        assert calls.calls or name == "places"
        handle.remove()
        assert torch.equal(answers(model, batch), expected)
    assert state_of(model) == before


@torch.no_grad()
def answers(model: Model, batch: Tensor) -> Tensor:
    return model(batch)


@of_check("repeated", reads=False, of="kind")
def test_a_module_in_training_mode_is_measured_in_evaluation_mode(name: str) -> None:
    """Twice the same, for all its dropout; its batch statistics unchanged, and in training mode
    again.
    """
    entry = ENTRIES[name]
    model = own(entry.models[0], "training")
    before = {key: value.clone() for key, value in model.named_buffers()}
    first = entry.run(model, batch_of(model))
    second = entry.run(model, batch_of(model))
    assert not differences(first, second)
    for key, value in model.named_buffers():
        assert torch.equal(value, before[key])
    for module in model.modules():
        assert module.training


def differences(first: object, second: object, where: str = "") -> list[str]:
    """Return the places where two results differ in a number or a word."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return [] if torch.equal(first.nan_to_num(nan=-7), second.nan_to_num(nan=-7)) else [where]
    if is_dataclass(first):
        pairs = [
            (field.name, getattr(first, field.name), getattr(second, field.name))
            for field in fields(first)
        ]
    elif isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = [(str(key), value, second[key]) for key, value in first.items()]
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = [
            (str(number), *pair) for number, pair in enumerate(zip(first, second, strict=True))
        ]
    else:
        comparable = isinstance(first, str | int | float) and first == first
        return [where] if comparable and first != second else []
    return [place for name, one, two in pairs for place in differences(one, two, f"{where}.{name}")]


@of_check("each image alone", per_image=True)
def test_an_image_does_not_depend_on_its_batch_mates(name: str) -> None:
    entry = ENTRIES[name]
    for on in (entry.models[0], entry.models[-1]):
        model = shared(on)
        batch = batch_of(model)
        place = 0 if entry.draws else 1  # random numbers are drawn for an image by its place
        together = entry.tensor(model, batch).float()
        alone = entry.tensor(model, batch[place : place + 1]).float()
        # windows of an image stand together
        in_batch = together.unflatten(0, (len(batch), -1))[place]
        torch.testing.assert_close(
            alone, in_batch.view_as(alone), atol=1e-5, rtol=1e-4, equal_nan=True
        )


def first_of(entry: Entry) -> tuple[Model, Tensor]:
    model = shared(entry.models[0])
    return model, batch_of(model)


@of_check("other numbers", of="one")
def test_rounding_outside_0_to_1_is_clamped_and_float64_taken(name: str) -> None:
    model, batch = first_of(ENTRIES[name])
    batch[:, :, :4] = torch.tensor([0.0, 1.0]).repeat(batch.shape[-1] // 2)
    expected = ENTRIES[name].tensor(model, batch)
    outside = batch + 9e-5 * (2 * batch - 1).where((batch == 0) | (batch == 1), 0)
    for images in (outside, batch.double()):
        before = images.clone()
        torch.testing.assert_close(
            ENTRIES[name].tensor(model, images), expected, rtol=0, atol=0, equal_nan=True
        )
        assert torch.equal(images, before)  # the images handed in are as they were


WRONG: dict[str, Callable[[Tensor], object]] = {
    "0 to 255": lambda batch: batch * 255,
    "normalised": lambda batch: (batch - 0.5) / 0.2,
    "a little above": lambda batch: batch.clamp_min(0.5) + 6e-4,
    "whole numbers": lambda batch: (batch * 255).long(),
    "an array of floats": lambda batch: batch.numpy(),
    "an array with channels first": lambda batch: (batch * 255).byte().numpy(),
    "NaN": lambda batch: batch.where(batch < 0.9, torch.nan),
    "infinity": lambda batch: batch.where(batch < 0.9, torch.inf),
    "one image": lambda batch: batch[0],
    "channels last": lambda batch: batch.permute(0, 2, 3, 1),
    "grey": lambda batch: batch[:, :1],
    "none": lambda batch: batch[:0],
}


@of_check("refused pixels", reads=False, of="one")
def test_wrong_pixels_and_a_name_or_images_in_place_of_the_model_are_refused(name: str) -> None:
    """Pixels as `vitlens.features` refuses them, whose words are in messages.txt."""
    entry, (model, batch) = ENTRIES[name], first_of(ENTRIES[name])
    for change in WRONG.values() if entry.read else ():
        with pytest.raises(DataError) as expected:
            vitlens.features(model, change(batch))
        with pytest.raises(DataError, match=f"^{re.escape(str(expected.value))}$"):
            entry.run(model, change(batch))
    for wrong in ("vit-digits", model.module, batch):
        with pytest.raises(InputError) as raised:
            entry.run(wrong, batch)
        assert "\n" not in str(raised.value)


@of_check("float64")
def test_a_module_in_float64_gives_what_it_gives_in_float32(name: str) -> None:
    entry = ENTRIES[name]
    model, batch = first_of(entry)
    expected = entry.tensor(model, batch)
    actual = entry.tensor(own(entry.models[0], "float64"), batch)
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=1e-4, rtol=1e-3, equal_nan=True
    )


@of_check("without a classifier", reads=False)
def test_what_needs_a_class_is_refused_without_a_classifier_and_nothing_else(name: str) -> None:
    entry = ENTRIES[name]
    model = headless()
    if not entry.needs_class:
        entry.run(model, batch_of(model))
        return
    with pytest.raises(UnsupportedError, match=f"vitlens train {HEADLESS} --freeze-backbone"):
        entry.run(model, batch_of(model))


def test_reference_images_and_the_other_run_are_checked_too_and_the_forward_of_the_model_is_free():
    model, batch = first_of(ENTRIES["patch"])
    place = vitlens.places(model).names[0]
    with pytest.raises(DataError), vitlens.intervene(model, {place: "mean"}, reference=batch * 255):
        pytest.fail("it was not refused")
    with pytest.raises(DataError):
        vitlens.patch(model, batch, batch * 255, place)
    with vitlens.replay(model, batch) as replay, pytest.raises(DataError):
        replay.run([{place: "mean"}], reference=batch * 255)
    # integrated gradients and attacks leave the range on purpose
    assert model(batch * 255).isfinite().all()


def test_training_takes_splits_alone():
    """Its two parts are given by name and part, so that no image is in both."""
    for images in (batch_of(shared("odd")), "photos/", np.zeros((2, 8, 8, 3), np.uint8)):
        with pytest.raises(DataError, match="load_data"):
            vitlens.train(shared("odd"), images, images, recipe=None, directory=None)
