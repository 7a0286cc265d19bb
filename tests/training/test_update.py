"""Shares of a batch, whatever their sizes, give the gradient of the whole batch."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from tests.training.tiny import tiny_model, tiny_recipe, tiny_split
from vitlens.errors import NonFiniteError
from vitlens.training.feed import process_share
from vitlens.training.loop import Updates
from vitlens.training.task import Task

SPLIT = tiny_split("train", 7)


def task(**changes: object) -> Task:
    model = tiny_model(drop_path=0.0, dropout=0.0)
    model.train().requires_grad_(True)
    recipe = tiny_recipe(batch_size=7, **changes)
    return Task(model, SPLIT, SPLIT, recipe, Path("run"))


class OneOfSeveral(Accelerator):
    """One of several processes for accelerate; it keeps the gradients that would be averaged."""

    num_processes = 1
    process_index = 0

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.gradients: dict[str, torch.Tensor] = {}

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        named = self.model.named_parameters()
        self.gradients = {name: value.grad.clone() for name, value in named if value.grad is not None}


def learned(processes: int, process: int, **changes: object) -> tuple[dict[str, torch.Tensor], float, float]:
    """One process's gradients, loss and number of correct predictions."""
    job = task(**changes)
    accelerator = OneOfSeveral(job.model)
    updates = Updates(job, accelerator)
    accelerator.num_processes, accelerator.process_index = processes, process
    mine = process_share(torch.arange(7), process, processes)
    loss, right, norm = updates.apply(SPLIT.source.read(mine).float() / 255, job.labels(mine), whole=7)
    assert processes > 1 or norm == pytest.approx(_norm(accelerator.gradients), rel=1e-5)
    return accelerator.gradients, loss, right


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_averaged_shares_are_the_whole(processes: int) -> None:
    whole, loss, right = learned(1, 0)
    parts = [learned(processes, process) for process in range(processes)]
    for name, expected in whole.items():
        mean = torch.stack([part[0][name] for part in parts]).mean(0)
        assert torch.allclose(mean, expected, rtol=1e-4, atol=1e-6), name
    assert sum(part[1] for part in parts) == pytest.approx(loss, rel=1e-5)
    assert sum(part[2] for part in parts) == right


@pytest.mark.parametrize("parts", [2, 3, 7, 9])
def test_gradients_of_parts_add_up_to_the_whole_batch(parts: int) -> None:
    """Nine parts of seven images: no more than there are."""
    whole, loss, right = learned(1, 0)
    accumulated, again, correct = learned(1, 0, accumulate=parts)
    assert all(torch.allclose(accumulated[name], expected, rtol=1e-4, atol=1e-6) for name, expected in whole.items())
    assert (again, correct) == (pytest.approx(loss, rel=1e-5), right)


def test_a_number_that_is_not_finite_is_refused_before_the_weights_change() -> None:
    job = task()
    updates = Updates(job, OneOfSeveral(job.model))
    before = {name: value.clone() for name, value in job.model.module.state_dict().items()}
    images = SPLIT.source.read(torch.arange(7)).float()
    with pytest.raises(NonFiniteError, match="epoch 1, step 1; run keeps the last good weights"):
        updates.apply(images * float("nan"), job.labels(torch.arange(7)), whole=7)
    assert all(torch.equal(value, before[name]) for name, value in job.model.module.state_dict().items())
    with torch.no_grad():
        job.model.module.get_parameter("head.bias").fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"NaN or infinity in model/head\.bias"):
        updates.require_finite()
