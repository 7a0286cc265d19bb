"""What is kept for a model: found once, on the unchanged model, dropped on request and with the model, never an
exception."""

import gc
import weakref
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor

import vitlens
from tests.lens.tiny import images, ours
from vitlens.lens.libra import libra_gradients
from vitlens.lens.observe import observing
from vitlens.models.hooks import Memo, forget, once_per_model, per_model, watching
from vitlens.models.model import Model

CALLS: list[tuple[str, int]] = []
SEEN: list[object] = []
CHANGED = {
    "heads": lambda model: vitlens.intervene(model, {"blocks.0.head.*": "zero"}),
    "queries": lambda model: vitlens.intervene(model, {"blocks.0.attention.queries": "zero"}),
    "mlp": lambda model: vitlens.intervene(model, {"blocks.1.mlp": lambda mlp: 0.5 * mlp}),
    "removed": lambda model: vitlens.intervene(model, {"blocks.1": "remove"}),
    "knocked out": lambda model: vitlens.intervene(model, {"blocks.*.attention.weights": vitlens.KnockOut(keys="cls")}),
    "several": lambda model: vitlens.intervene(
        model,
        {
            "blocks.0.head.1": "zero",
            "blocks.0.attention.weights": vitlens.KnockOut(keys=0),
            "blocks.0.mlp": "zero",
            "blocks.1": "remove",
        },
    ),
    "gradients": libra_gradients,
}
WATCHED = {
    "observed": lambda model: observing(model, SEEN.append),
    "watched": lambda model: watching(model.module, ["patch_embed"], lambda *call: SEEN.append(call)),
}


def logits_and_gradient(model: Model) -> tuple[Tensor, Tensor]:
    """Of the first class, with respect to the pixels."""
    pixels = images((32, 48)).requires_grad_()
    logits = model(pixels)
    return logits.detach(), torch.autograd.grad(logits[:, 0].sum(), pixels)[0]


@per_model
def counted(model: Model, factor: int = 1) -> int:
    """How often it was called, times a factor."""
    CALLS.append((model.alias, factor))
    if factor < 0:
        raise ValueError("a negative factor")
    return len(CALLS) * factor


@pytest.fixture(autouse=True)
def nothing_kept():
    CALLS.clear()


def test_a_value_is_found_once_for_each_model_and_argument():
    one, two = ours(), ours()
    assert [counted(one), counted(one), counted(two), counted(one)] == [1, 1, 2, 1]
    assert [counted(one, 10), counted(one, 10), counted(one)] == [30, 30, 1]
    assert len(CALLS) == 3


def test_none_is_a_value_too():
    memo, model, found = Memo[None](), ours(), []
    for _ in range(2):
        memo.get(model, lambda: found.append(1))
    assert found == [1]


def test_an_exception_is_not_kept():
    model = ours()
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            counted(model, -1)
    assert len(CALLS) == 2


def test_a_model_is_freed_with_its_values():
    model = ours()
    counted(model)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_forgetting_a_model_leaves_the_others():
    one, two = ours(), ours()
    counted(one), counted(two)
    forget(one)
    counted(one), counted(two)
    assert len(CALLS) == 3


def test_threads_that_ask_at_once_get_the_same_value():
    memo, model, both, got = Memo[object](), ours(), Barrier(2), []

    def find() -> object:
        both.wait(timeout=10)  # neither has a value when the other begins
        return object()

    threads = [Thread(target=lambda: got.append(memo.get(model, find))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    assert got[0] is got[1]


def test_once_per_model_takes_the_first_arguments():
    calls: list[str] = []

    @once_per_model
    def depth(model: Model, extra: int = 0) -> int:
        calls.append(model.alias)
        return len(model.anatomy.blocks) + extra

    first, second = ours(), ours(depth=1)
    assert [depth(first), depth(second), depth(first, extra=5), depth(second)] == [2, 1, 2, 1]
    assert len(calls) == 2
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("change", CHANGED)
def test_a_value_is_that_of_the_unchanged_model(change):
    model, memo = ours(), Memo[tuple[Tensor, Tensor]]()
    clean = logits_and_gradient(model)
    with CHANGED[change](model):
        changed = logits_and_gradient(model)
        kept = memo.get(model, lambda: logits_and_gradient(model))
        again = logits_and_gradient(model)
    assert not all(map(torch.equal, changed, clean)), "nothing was changed"
    assert all(map(torch.equal, kept, clean))
    assert all(map(torch.equal, again, changed)), "the change is no longer in force"


@pytest.mark.parametrize("watch", WATCHED)
def test_who_watches_a_model_does_not_see_what_a_value_takes(watch):
    model, memo = ours(), Memo[object]()
    SEEN.clear()
    with WATCHED[watch](model):
        memo.get(model, lambda: logits_and_gradient(model))
        assert not SEEN
        logits_and_gradient(model)
        assert SEEN


@pytest.mark.parametrize("outer", CHANGED)
@pytest.mark.parametrize("inner", CHANGED)
def test_a_value_may_change_the_model_to_find_out(outer, inner):
    """The changes of the computation are in force in it, but not in the values that it asks for, nor afterwards."""
    model, memo = ours(), Memo[object]()
    clean = logits_and_gradient(model)

    def compute() -> tuple[Tensor, Tensor]:
        with CHANGED[inner](model):
            found = logits_and_gradient(model)
            nested = memo.get(model, lambda: logits_and_gradient(model), key="nested")
            assert all(map(torch.equal, nested, clean))
            assert all(map(torch.equal, logits_and_gradient(model), found))
            return found

    alone = compute()
    forget(model)
    with CHANGED[outer](model):
        changed = logits_and_gradient(model)
        kept = memo.get(model, compute)
        assert all(map(torch.equal, logits_and_gradient(model), changed))
    assert all(map(torch.equal, kept, alone))
    assert all(map(torch.equal, logits_and_gradient(model), clean))
