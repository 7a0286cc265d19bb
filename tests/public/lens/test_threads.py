"""One user of a model at a time: threads wait for each other, and leave the model as it was."""

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

import vitlens
from tests.kit.tiny import images, ours
from vitlens.errors import LensError

LABELS = torch.tensor([0, 1, 2])


def together(*functions: Callable[[], object]) -> list[object]:
    """Run each function in a thread and return what they return or raise."""
    results: list[object] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def run(number: int, function: Callable[[], object]) -> None:
        start.wait()
        try:
            results[number] = function()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_forward_pass_waits_until_another_thread_has_left_its_changes():
    model = ours()
    batch = images(model.input_size, batch=3)
    inside = threading.Event()
    leave = threading.Event()
    with torch.no_grad():
        expected = model(batch)

    def intervene() -> torch.Tensor:
        with vitlens.intervene(model, {"blocks.1.mlp": "zero"}), torch.no_grad():
            inside.set()
            leave.wait()
            return model(batch)

    def forward() -> torch.Tensor:
        inside.wait()
        threading.Timer(0.05, leave.set).start()
        with torch.no_grad():
            return model(batch)

    changed, plain = together(intervene, forward)
    assert torch.equal(plain, expected)
    assert not torch.allclose(changed, expected)


FUNCTIONS: dict[str, Callable[[vitlens.Model, torch.Tensor], torch.Tensor]] = {
    "ablate": lambda model, batch: vitlens.ablate(model, batch, LABELS, replace="zero").delta_loss,
    "rollout": vitlens.rollout,
    "relevance": vitlens.relevance,
    "occlusion": lambda model, batch: vitlens.explain(
        model, batch, method="occlusion", targets=LABELS
    ),
    "forward": lambda model, batch: model(batch).detach(),
}


@pytest.mark.parametrize(
    ("first", "second"), [*pairwise(FUNCTIONS), ("ablate", "ablate"), ("rollout", "rollout")]
)
def test_two_functions_on_one_model_give_what_each_gives_alone(first, second):
    model = ours()
    batches = [images(model.input_size, batch=3, seed=seed) for seed in (1, 2)]
    pairs = list(zip((first, second), batches))
    alone = [FUNCTIONS[name](ours(), batch) for name, batch in pairs]
    modules = [set(vars(module)) for module in model.modules()]
    tasks = [
        lambda name=name, batch=batch: [FUNCTIONS[name](model, batch) for _ in range(3)]
        for name, batch in pairs
    ]
    for result, expected in zip(together(*tasks), alone):
        assert isinstance(result, list), result
        for value in result:
            assert torch.equal(value, expected)
    assert [set(vars(module)) for module in model.modules()] == modules


def test_two_threads_that_would_wait_for_each_other_are_told():
    """Each has changed a model that the other one runs: one of them is refused, and the other goes
    on.
    """
    models = ours(), ours()
    both = threading.Barrier(2)

    def cross(first: vitlens.Model, second: vitlens.Model) -> torch.Tensor:
        with vitlens.intervene(first, {"blocks.0.mlp": "zero"}), torch.no_grad():
            both.wait()
            return second(images(second.input_size))

    results = together(lambda: cross(*models), lambda: cross(*reversed(models)))
    assert sorted(isinstance(result, LensError) for result in results) == [False, True]
    assert models[0](images(models[0].input_size)).isfinite().all()


def test_contexts_of_one_thread_nest_and_an_exception_gives_the_turn_back():
    model = ours()
    batch = images(model.input_size)
    with (
        pytest.raises(KeyError),
        vitlens.intervene(model, {"blocks.0": "zero"}),
        vitlens.replay(model, batch),
    ):
        raise KeyError
    (logits,) = together(lambda: model(batch))
    assert torch.equal(logits, model(batch))
