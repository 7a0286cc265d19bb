"""One update of the weights from one process's share of a global batch, and all the state that updates leave."""

import math

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import autocast
from vitlens.errors import NonFiniteError
from vitlens.training.average import Average
from vitlens.training.checkpoint import Checkpoint, collect, restore
from vitlens.training.feed import derive
from vitlens.training.optimiser import adamw
from vitlens.training.task import Task


class Updates:
    """The weights in training: model, optimizer and average after so many steps.

    step: updates done; average: of the weights, None where the recipe keeps none.
    """

    def __init__(self, task: Task, accelerator: Accelerator) -> None:
        recipe, model = task.recipe, task.specimen.model
        self.task, self.accelerator, self.model = task, accelerator, model
        self.average = Average(model, decay=recipe.average) if recipe.average else None
        self.optimizer = adamw(
            model, learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=recipe.betas
        )
        self.wrapped = _wrapped(accelerator, task.specimen)
        self.step = 0

    def apply(self, images: Tensor, labels: Tensor, *, whole: int) -> tuple[float, float]:
        """Learn from this process's share of a batch of `whole` images; its summed loss and its number of right ones.

        Raises NonFiniteError, before the weights change, when loss or gradient is NaN or infinite.
        """
        task, recipe, accelerator = self.task, self.task.recipe, self.accelerator
        torch.manual_seed(derive(task.seed, self.step, accelerator.process_index))  # dropout's
        for group in self.optimizer.param_groups:
            group["lr"] = task.learning_rate(self.step)
        with autocast(task.device, task.precision):
            logits = self.wrapped(images).float()
        summed = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing, reduction="sum")
        # gradients are averaged over processes: scaled so, uneven shares weigh by their images
        accelerator.backward(summed * accelerator.num_processes / whole)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip or math.inf)
        correct = (logits.detach().argmax(1) == labels).sum()
        loss, right, length = torch.stack((summed.detach(), correct, norm.detach())).tolist()  # one wait for the device
        if not math.isfinite(loss + length):
            raise self._broken(f"loss {loss / len(labels):g}, gradient norm {length:g}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.model)
        self.step += 1
        return loss, right

    def tensors(self) -> dict[str, Tensor]:
        """All that must be kept to go on from here."""
        return collect(self.model, self.optimizer, self.average)

    def require_finite(self) -> None:
        """Raise NonFiniteError when the last updates left a NaN or an infinity, before it reaches a file."""
        for name, value in self.tensors().items():
            if not value.isfinite().all():
                raise self._broken(f"NaN or infinity in {name}")

    def take_up(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        restore(checkpoint, self.model, self.optimizer, self.average)
        self.step = checkpoint.facts["step"]
        if self.average is not None:
            self.average.updates = self.step

    def _broken(self, found: str) -> NonFiniteError:
        """What to say, and what to try, when numbers are no longer finite."""
        epoch = self.step // self.task.steps_per_epoch
        return NonFiniteError(
            f"expected a finite loss, found {found} in epoch {epoch + 1}, step {self.step + 1}; {self.task.directory} "
            f"keeps the last good weights; try --learning-rate {self.task.recipe.learning_rate / 3:.1g}"
        )


def _wrapped(accelerator: Accelerator, module: nn.Module) -> nn.Module:
    """The module whose backward averages gradients over all processes; the module itself when there is one."""
    if accelerator.num_processes == 1:
        return module
    wrapped: nn.Module = accelerator.prepare_model(module)
    return wrapped
