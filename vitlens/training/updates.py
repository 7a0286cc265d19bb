"""Updates of the weights: forward and backward passes of a batch, and a step of the optimiser."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vitlens.devices import autocast
from vitlens.errors import NonFiniteError, argument
from vitlens.models.rebuild import seeded
from vitlens.processes import peer_errors
from vitlens.training.metrics import GradientWatcher
from vitlens.training.optimiser import Average, Optimiser
from vitlens.training.task import Task


class Updates:
    """Model, optimiser and average of the weights between updates; step: updates done."""

    def __init__(self, task: Task, accelerator: Accelerator, *, compiled: bool = False) -> None:
        self.task = task
        self.accelerator = accelerator
        self.step = 0
        inner = task.model.module
        module = inner  # a head that takes features
        if task.whole is None:
            with seeded(task.seed):  # the new parts of an objective are random
                module = task.objective.module(task.model)
        # trained, averaged and saved
        self.model = inner if task.pretraining is None else module
        name = next(name for name, part in self.model.named_modules() if part is inner)
        prefix = f"{name}." if name else ""
        blocks = [f"{prefix}{block}" for block in task.model.anatomy.blocks]
        self.average: Average | None = None
        if task.recipe.average:
            self.average = Average(self.model, decay=task.recipe.average)
        self.optimiser = Optimiser(self.model, task.recipe, blocks=blocks)
        # several processes average their gradients
        wrapped = module if accelerator.num_processes == 1 else accelerator.prepare_model(module)
        self.wrapped: nn.Module = torch.compile(wrapped) if compiled else wrapped  # type: ignore[assignment]

    def apply(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        watchers: Sequence[GradientWatcher] = (),
    ) -> tuple[float, float, float]:
        """Update the weights from the share of this process in a batch.

        watchers: receive the gradients. Returns the summed loss and the number of correct
        predictions of the share, and the norm of the gradient of the batch. Raises NonFiniteError,
        before the weights change, when loss or gradient is NaN or infinite.
        """
        task = self.task
        recipe = self.task.recipe
        objective = self.task.objective
        accelerator = self.accelerator
        pretraining = task.pretraining
        epoch = self.step // task.steps_per_epoch
        images, targets = task.mixed(images, labels, step=self.step)
        sums = torch.zeros(2, device=images.device)
        parts = list(zip(images.chunk(recipe.accumulate), targets.chunk(recipe.accumulate)))
        for number, (part, part_targets) in enumerate(parts, start=1):
            is_last = number == len(parts)
            synchronisation = nullcontext() if is_last else accelerator.no_sync(self.wrapped)
            with synchronisation, peer_errors():
                inputs: tuple[Tensor, ...] = (part,)
                if pretraining is not None:
                    inputs = pretraining.inputs(part, part_targets, seed=task.seed, epoch=epoch)
                with autocast(images.device, task.precision):
                    outputs = self.wrapped(*inputs)
                loss = objective.loss(outputs, part_targets, part, smoothing=recipe.label_smoothing)
                # gradients are averaged over processes; by this factor every image counts the same
                # in uneven shares
                accelerator.backward(loss * (accelerator.num_processes / batch_size))
            sums[0] += loss.detach()
            logits = objective.logits(outputs)
            if logits is not None:
                hard = part_targets if part_targets.ndim == 1 else part_targets.argmax(1)
                sums[1] += (logits.detach().argmax(1) == hard).sum()
        for watcher in watchers:
            watcher.on_gradients(self.model)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip or math.inf)
        # copied to the host in one transfer
        summed, correct, length = torch.cat((sums, norm.detach()[None])).tolist()
        if not math.isfinite(summed + length):
            raise self._not_finite(f"loss {summed / len(labels):g}, gradient norm {length:g}")
        self.optimiser.set_rate(task.learning_rate(self.step))
        self.optimiser.step()
        if self.average is not None:
            self.average.update(self.model)
        self.step += 1
        if pretraining is not None:
            pretraining.updated(self.step / task.steps, task.processes)
        return summed, correct, length

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, to test and save them."""
        return nullcontext() if self.average is None else self.average.applied(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that are needed to resume: model/..., average/..., optimiser/..."""
        average = {} if self.average is None else self.average.tensors
        return {
            **add_prefix("model/", self.model.state_dict()),
            **add_prefix("average/", average),
            **add_prefix("optimiser/", self.optimiser.tensors()),
        }

    def require_finite(self) -> None:
        """Raise NonFiniteError for a NaN or an infinity in any tensor.

        Called before the tensors are written to a file.
        """
        for name, value in self.tensors().items():
            if not value.isfinite().all():
                raise self._not_finite(f"NaN or infinity in {name}")

    @torch.no_grad()
    def resume(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Continue from the tensors after a step."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])
        self.optimiser.restore(remove_prefix("optimiser/", tensors))
        self.step = step
        if self.average is not None:
            self.average.updates = step

    def _not_finite(self, values: str) -> NonFiniteError:
        epoch = self.step // self.task.steps_per_epoch
        lower = argument("learning_rate", float(f"{self.task.recipe.learning_rate / 3:.1g}"))
        return NonFiniteError(
            f"expected a finite loss, found {values} in epoch {epoch + 1}, step {self.step + 1}; "
            f"{self.task.directory} keeps the last good weights; try {lower}"
        )


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under names with a prefix."""
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def remove_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, under names without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
