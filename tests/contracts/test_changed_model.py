"""A function gives the same for an intervention as for a model that is really changed.

Interventions are `intervene`, a user's hook, and another forward put into a module.
"""

import copy
from collections.abc import Iterator
from functools import cache
from zlib import crc32

import pytest
import torch

from tests.contracts.entries import ENTRIES, batch_of, shared
from tests.kit.changed import changed_places, intervened, is_output, kind_of, really_changed
from vitlens import Model
from vitlens.errors import UnsupportedError

INSIDE = ("queries", "keys", "values", "scores", "heads", "head", "weights")
Case = tuple[str, str]  # a place and a way to change it


def functions() -> list[str]:
    """Return the entries with numbers to compare; of attacks that share code, the first."""
    first_by_kind: dict[str, str] = {}
    for name, entry in ENTRIES.items():
        if entry.read is not None:
            first_by_kind.setdefault(entry.shares if name.startswith("attack/") else name, name)
    return list(first_by_kind.values())


def is_comparable(name: str, on: str, kind: str) -> bool:
    """Return True if the results of the model with interventions and the changed one must agree."""
    # there, the module takes what the place holds, and changes it then
    if kind in (
        "input",
        "patches",
    ):
        reads_place = name.startswith(("capture", "patch", "replay"))
        return not reads_place and on != "odd"  # whose CAM reads the norm of what enters the block
    # there, what computes the place is changed
    return not (kind in INSIDE and name.startswith("capture"))


def cases(name: str, on: str) -> Iterator[Case]:
    for place in changed_places(shared(on)):
        if is_comparable(name, on, kind_of(shared(on), place)):
            ways = (
                ("intervene", "hook", "forward") if is_output(shared(on), place) else ("intervene",)
            )
            yield from ((place, way) for way in ways)


@cache
def on_device(on: str, device: str) -> Model:
    return shared(on) if device == "cpu" else copy.deepcopy(shared(on)).to(device)


@cache
def really(on: str, place: str, device: str) -> Model:
    return really_changed(on_device(on, device), place)


def differs(name: str, on: str, place: str, way: str, device: str = "cpu") -> str:
    """Return a description of how the two results differ, or "" if they are equal.

    They are the function's result for the model with interventions and for the changed model.
    """
    entry = ENTRIES[name]
    model = on_device(on, device)
    batch = batch_of(model).to(device)
    expected = actual = torch.zeros(())
    reason = other = ""
    try:
        expected = entry.tensor(really(on, place, device), batch).float()
    except UnsupportedError as error:
        reason = type(error).__name__
    with intervened(model, place, way):
        try:
            actual = entry.tensor(model, batch).float()
        except UnsupportedError as error:
            other = type(error).__name__
    if reason or other:
        return "" if reason == other else f"{place} by {way}: {reason or other} of one alone"
    scale = max(expected.nan_to_num().abs().max().item(), 1e-2) if expected.numel() else 0.0
    same = torch.allclose(actual, expected, atol=1e-4 * scale, rtol=1e-3, equal_nan=True)
    return (
        ""
        if same
        else f"{place} by {way}: differs by {(actual - expected).abs().max():.1e} of {scale:.1e}"
    )


@pytest.mark.parametrize("name", functions())
def test_a_function_sees_what_is_changed(name: str) -> None:
    """At a place, on a model and in a way by the function's name."""
    turn = crc32(name.encode())
    on = ENTRIES[name].models[turn % len(ENTRIES[name].models)]
    of_model = list(cases(name, on))
    assert not differs(name, on, *of_model[turn % len(of_model)])


@pytest.mark.parametrize("name", ["explain/occlusion", "ablate", "replay"])
def test_what_is_computed_more_quickly_sees_a_change_of_every_place(name: str) -> None:
    chosen = [place for place, way in cases(name, "ours") if way == "intervene"]
    for place in chosen:
        assert differs(name, "ours", place, "intervene") == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "on"), [(name, on) for name in functions() for on in ENTRIES[name].models]
)
def test_every_function_sees_a_change_of_every_place_in_every_way(name: str, on: str) -> None:
    for place, way in cases(name, on):
        assert differs(name, on, place, way) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
@pytest.mark.parametrize(
    ("name", "on"), [(name, on) for name in functions() for on in ENTRIES[name].models]
)
def test_every_function_sees_a_change_of_every_place_on_cuda(
    name: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With convolutions in all 24 bits, as on the CPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    chosen = [place for place, way in cases(name, on) if way == "intervene"]
    for place in chosen:
        assert differs(name, on, place, "intervene", "cuda") == ""
