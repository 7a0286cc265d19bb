"""One update of the weights from one process's share of a global batch, and the state between updates."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vitlens.devices import autocast
from vitlens.errors import NonFiniteError
from vitlens.processes import peer_errors
from vitlens.training.checkpoint import Checkpoint, collect, restore
from vitlens.training.optimiser import Average, Optimiser
from vitlens.training.task import Task


class UpdateMetrics(NamedTuple):
    """One update in this process: summed loss, number of correct predictions, norm of the whole gradient."""

    loss: float
    correct: float
    norm: float


class Updates:
    """The state of a training: model, optimiser and average of the weights.

    step: updates done; average: of the weights, None where the recipe has none.
    """

    def __init__(self, task: Task, accelerator: Accelerator, *, compiled: bool = False) -> None:
        recipe, model = task.recipe, task.model.module
        self.task, self.accelerator, self.model = task, accelerator, model
        self.average = Average(model, decay=recipe.average) if recipe.average else None
        self.optimiser = Optimiser(
            model,
            kind=recipe.optimiser,
            weight_decay=recipe.weight_decay,
            betas=recipe.betas,
            layer_decay=recipe.layer_decay,
            blocks=task.model.anatomy.blocks,
        )
        self.wrapped = _wrapped(accelerator, task.objective.module(task.model), compiled)
        self.step = 0

    def apply(self, images: Tensor, labels: Tensor, *, whole: int) -> UpdateMetrics:
        """Update the weights from this process's share of a batch of `whole` images.

        Raises NonFiniteError, before the weights change, when loss or gradient is NaN or infinite.
        """
        task, recipe, accelerator = self.task, self.task.recipe, self.accelerator
        images, targets = task.mixed(images, labels, step=self.step, process=accelerator.process_index)
        sums = torch.zeros(2, device=images.device)
        parts = list(zip(images.chunk(recipe.accumulate), targets.chunk(recipe.accumulate)))
        for number, (part, part_targets) in enumerate(parts, start=1):
            synchronised = nullcontext() if number == len(parts) else accelerator.no_sync(self.wrapped)
            with synchronised, peer_errors():
                sums += self._backward(part, part_targets, accelerator.num_processes / whole)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip or math.inf)
        loss, correct, length = torch.cat((sums, norm.detach()[None])).tolist()  # one synchronisation with the device
        if not math.isfinite(loss + length):
            raise self._not_finite(f"loss {loss / len(labels):g}, gradient norm {length:g}")
        self.optimiser.set_rate(task.learning_rate(self.step))
        self.optimiser.step()
        if self.average is not None:
            self.average.update(self.model)
        self.step += 1
        return UpdateMetrics(loss, correct, length)

    def _backward(self, images: Tensor, targets: Tensor, weight: float) -> Tensor:
        """Accumulate the gradient of some images; returns their summed loss and number of correct predictions.

        weight: of the summed loss. Gradients are averaged over processes; with the weight processes / images of the
        whole batch, every image counts the same in uneven shares.
        """
        task, objective = self.task, self.task.objective
        with autocast(task.device, task.precision):
            outputs = self.wrapped(images)
        summed = objective.loss(outputs, targets, images, smoothing=task.recipe.label_smoothing)
        self.accelerator.backward(summed * weight)
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        correct = (objective.logits(outputs).detach().argmax(1) == labels).sum()
        return torch.stack((summed.detach(), correct))

    def averaged(self) -> AbstractContextManager[None]:
        """The model with the averaged weights, which are tested and saved, while the context lasts."""
        return nullcontext() if self.average is None else self.average.applied(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that are needed to resume."""
        return collect(self.model, self.optimiser, self.average)

    def require_finite(self) -> None:
        """Raise NonFiniteError for a NaN or an infinity in any tensor, before it is written to a file."""
        for name, value in self.tensors().items():
            if not value.isfinite().all():
                raise self._not_finite(f"NaN or infinity in {name}")

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        restore(checkpoint, self.model, self.optimiser, self.average)
        self.step = checkpoint.facts["step"]
        if self.average is not None:
            self.average.updates = self.step

    def _not_finite(self, values: str) -> NonFiniteError:
        """The error for values that are not finite, with what to try."""
        epoch = self.step // self.task.steps_per_epoch
        return NonFiniteError(
            f"expected a finite loss, found {values} in epoch {epoch + 1}, step {self.step + 1}; {self.task.directory} "
            f"keeps the last good weights; try --learning-rate {self.task.recipe.learning_rate / 3:.1g}"
        )


def _wrapped(accelerator: Accelerator, module: nn.Module, compiled: bool) -> nn.Module:
    """The module as it is run: compiled where enabled, with gradients averaged over all processes."""
    wrapped: nn.Module = module if accelerator.num_processes == 1 else accelerator.prepare_model(module)
    return torch.compile(wrapped) if compiled else wrapped  # type: ignore[return-value]
