"""Updates of the weights: forward and backward passes of a batch, and a step of the optimiser."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

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


class UpdateResult(NamedTuple):
    """The result of one update of the weights.

    loss: the loss summed over the share of this process in the batch, in nats.
    correct: the number of correct predictions of the share; 0 without classes.
    gradient_norm: the norm of the gradient of the whole batch before clipping.
    """

    loss: float
    correct: float
    gradient_norm: float


class Updates:
    """A model with its optimiser and the average of its weights, between two updates.

    step: the number of updates done.
    model: the module that is trained, averaged and saved.
    wrapped: the module that is run, for several processes or compiled. It contains `model`, and
        may have further outputs for the objective.
    """

    def __init__(self, task: Task, accelerator: Accelerator, *, compiled: bool = False) -> None:
        self.task = task
        self.accelerator = accelerator
        self.step = 0
        # Which module is run and which is trained, by case:
        #   labels: both are the network
        #   distillation: the network is trained inside the module that is run, a student
        #   pretraining: the objective's new module around the network is run and trained
        #   a head of a `whole` model: both are the network, which is the head on features
        network = task.model.module
        run_module = network
        if task.whole is None:
            with seeded(task.seed):  # the new parts of an objective are random
                run_module = task.objective.module(task.model)
        self.model = network
        if task.pretraining is not None:  # its new parts are trained as well
            self.model = run_module
        # the names of the network's blocks within self.model
        path = _path_of(network, self.model)
        prefix = f"{path}." if path else ""
        blocks = [f"{prefix}{block}" for block in task.model.anatomy.blocks]
        self.average: Average | None = None
        if task.recipe.average:
            self.average = Average(self.model, decay=task.recipe.average)
        self.optimiser = Optimiser(self.model, task.recipe, blocks=blocks)
        wrapped = run_module
        if accelerator.num_processes > 1:  # they average their gradients
            wrapped = accelerator.prepare_model(run_module)
        self.wrapped: nn.Module = torch.compile(wrapped) if compiled else wrapped  # type: ignore[assignment]

    def apply(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        watchers: Sequence[GradientWatcher] = (),
    ) -> UpdateResult:
        """Update the weights from the share of this process in a batch.

        Raises NonFiniteError, before the weights change, when loss or gradient is NaN or infinite.

        batch_size: the number of images in the batch over all processes.
        watchers: receive the gradients.
        """
        task = self.task
        recipe = self.task.recipe
        objective = self.task.objective
        accelerator = self.accelerator
        pretraining = task.pretraining
        epoch = self.step // task.steps_per_epoch
        images, targets = task.mixed(images, labels, step=self.step)
        loss_and_correct = torch.zeros(2, device=images.device)
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
            loss_and_correct[0] += loss.detach()
            logits = objective.logits(outputs)
            if logits is not None:
                labels_of_part = part_targets
                if part_targets.ndim == 2:  # shares of the classes
                    labels_of_part = part_targets.argmax(1)
                loss_and_correct[1] += (logits.detach().argmax(1) == labels_of_part).sum()
        for watcher in watchers:
            watcher.on_gradients(self.model)
        largest_norm = recipe.clip or math.inf  # 0: no clipping
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), largest_norm)
        # copied to the host in one transfer
        results = torch.cat((loss_and_correct, norm.detach()[None])).tolist()
        result = UpdateResult(*results)
        if not math.isfinite(result.loss + result.gradient_norm):
            mean_loss = result.loss / len(labels)
            raise self._not_finite(f"loss {mean_loss:g}, gradient norm {result.gradient_norm:g}")
        self.optimiser.set_rate(task.learning_rate(self.step))
        self.optimiser.step()
        if self.average is not None:
            self.average.update(self.model)
        self.step += 1
        if pretraining is not None:
            pretraining.updated(self.step / task.steps, task.processes)
        return result

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, to test and save them."""
        if self.average is None:
            return nullcontext()
        return self.average.applied(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that are needed to resume: model/..., average/..., optimiser/..."""
        average = {}
        if self.average is not None:
            average = self.average.tensors
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


def _path_of(part: nn.Module, module: nn.Module) -> str:
    """Return the name of a part of a module, as in `get_submodule`; "" for the module itself."""
    path: str = next(name for name, candidate in module.named_modules() if candidate is part)
    return path


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
