"""Values stored for a model: computed once, on the unchanged model, and dropped with it."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.tiny import images, ours
from vitlens.models.hooks import watching
from vitlens.models.memo import Memo, State, once_per_model, per_model

CHANGED = {
    "queries": {"blocks.0.attention.queries": "zero"},
    "mlp": {"blocks.1.mlp": lambda mlp: 0.5 * mlp},
    "several": {
        "blocks.0.head.1": "zero",
        "blocks.0.attention.weights": vitlens.KnockOut(keys=0),
        "blocks.1": "remove",
    },
}


def logits_and_gradient(model: vitlens.Model) -> tuple[Tensor, Tensor]:
    """Return the logit of the first class and its gradient with respect to the pixels."""
    pixels = images((32, 48)).requires_grad_()
    logits = model(pixels)
    return logits.detach(), torch.autograd.grad(logits[:, 0].sum(), pixels)[0]


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, one, other))


def touch(model: vitlens.Model) -> None:
    """Change a weight, to the same value."""
    with torch.no_grad():
        next(model.parameters()).mul_(1.0)


def test_a_value_is_computed_once_for_each_model_and_argument_and_no_exception_is_kept():
    calls: list[int] = []

    @per_model
    def counted(_model: vitlens.Model, factor: int = 1) -> int:
        calls.append(factor)
        if factor < 0:
            raise ValueError("a negative factor")
        return len(calls) * factor

    one = ours()
    two = ours()
    assert [counted(one), counted(one), counted(two), counted(one)] == [1, 1, 2, 1]
    assert [counted(one, 10), counted(one, factor=10), counted(one, 10)] == [30, 40, 30]
    touch(one)
    assert [counted(two), counted(one)] == [2, 5]
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            counted(one, -1)
    assert len(calls) == 7


@pytest.mark.parametrize("count", [513, 1000, 1535, 2047, 100_000])
def test_a_change_of_data_of_a_512th_or_more_is_seen_anywhere(count):
    """torch counts no changes of `.data`."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(count))
    before = State(module)
    assert State(module).equals(before)
    step = -(-count // 512)
    for start in (0, count // 2, count - step):
        module.weight.data[start : start + step] = 0
        assert not State(module).equals(before), start
        module.weight.data[start : start + step] = 1
    assert State(module).equals(before)


def test_none_is_a_value_the_first_arguments_hold_and_a_model_is_freed_with_its_values():
    @once_per_model
    def depth(model: vitlens.Model, extra: int = 0) -> int:
        return len(model.anatomy.blocks) + extra

    memo = Memo()
    calls = []
    first = ours()
    second = ours(depth=1)
    for _ in range(2):
        memo.get(first, lambda: calls.append(1))
    assert (calls, memo.peek(first), memo.peek(first, key="other")) == ([1], None, None)
    assert [depth(first), depth(second), depth(first, extra=5), depth(second)] == [2, 1, 2, 1]
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("outer", "inner"), [("queries", "mlp"), ("mlp", "several"), ("several", "queries")]
)
def test_a_value_is_that_of_the_unchanged_model_and_may_change_it_to_find_out(outer, inner):
    """The changes of the computation are in force in it, but not in the values that it asks for,
    nor afterwards.
    """
    model = ours()
    memo = Memo()
    clean = logits_and_gradient(model)

    def compute() -> tuple[Tensor, Tensor]:
        with vitlens.intervene(model, CHANGED[inner]):
            values = logits_and_gradient(model)
            assert same(memo.get(model, lambda: logits_and_gradient(model), key="nested"), clean)
            assert same(logits_and_gradient(model), values)
            return values

    alone = compute()
    touch(model)
    with vitlens.intervene(model, CHANGED[outer]):
        changed = logits_and_gradient(model)
        assert same(memo.get(model, lambda: logits_and_gradient(model), key="plain"), clean)
        value = memo.get(model, compute)
        assert same(logits_and_gradient(model), changed)
    assert not same(changed, clean)
    assert not same(alone, clean)
    assert same(value, alone)
    assert same(logits_and_gradient(model), clean)


def test_who_watches_a_model_does_not_see_what_a_value_takes():
    model = ours()
    memo = Memo()
    seen = []
    keep = watching(
        model.module,
        ["patch_embed"],
        lambda *_: seen.append("after"),
        before=lambda *_: seen.append("in"),
    )
    with keep:
        memo.get(model, lambda: logits_and_gradient(model))
        assert not seen
        model(images((32, 48)))
    model(images((32, 48)))
    assert seen == ["in", "after"]


def test_a_module_that_raises_is_reported_where_that_is_asked_for():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    seen = []
    for always in (False, True):
        with (
            watching(module, ["0"], lambda *call: seen.append(call), always=always),
            pytest.raises(RuntimeError),
        ):
            module(torch.rand(1, 3))
    assert [(name, output) for name, _, output in seen] == [("0", None)]
