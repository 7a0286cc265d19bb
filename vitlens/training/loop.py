"""The training loop: epochs of steps, each followed by a test and a checkpoint.

The result depends only on (model, data, recipe, seed, number of processes). Orders, augmentation and dropout derive
from (seed, epoch, step), so a killed run resumes exactly from its checkpoint.
Several processes take shares of the same global batches; their averaged gradients equal those of one process, except
for batch normalisation, whose statistics are per process (over smaller batches), and dropout, drawn per process.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.data.split import Split, takes_splits
from vitlens.devices import autocast
from vitlens.errors import InputError, NonFiniteError
from vitlens.models import saved
from vitlens.models.model import Model
from vitlens.models.weights import require_fitting as require_fitting_weights
from vitlens.processes import accelerated, peer_errors
from vitlens.training.checkpoint import (
    Checkpoint,
    Facts,
    below,
    delete_kept_after,
    keep_weights,
    read_checkpoint,
    require_interval,
    require_same,
    write_checkpoint,
)
from vitlens.training.feed import decoding_errors, portions, process_share
from vitlens.training.finetune import partly_trainable
from vitlens.training.metrics import (
    EpochMetrics,
    Progress,
    StepMetrics,
    TrainingResult,
    Watcher,
    best_of,
    write_metrics,
)
from vitlens.training.optimiser import Average, Optimiser, copy_into
from vitlens.training.recipe import Recipe
from vitlens.training.speed import choose, fast_attention, gradient_checkpointing
from vitlens.training.task import LabelObjective, Objective, Task, require_fitting

BEST_FILE: Final = "best.safetensors"
CHECKPOINT_INTERVAL = 5.0  # seconds, between the checkpoints of a training on features, whose epochs are short
PROGRESS_INTERVAL = 0.1  # seconds


@takes_splits
def fit(
    model: Model,
    train: Split,
    test: Split,
    *,
    recipe: Recipe,
    directory: Path,
    seed: int = 0,
    device: torch.device | str = "cpu",
    precision: str = "auto",
    resume: bool = False,
    checkpoint_every: int | None = None,
    keep_every: int | None = None,
    objective: Objective | None = None,
    train_last: int | None = None,
    compiling: str = "auto",
    recompute: bool = False,
    watchers: Sequence[Watcher] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> TrainingResult:
    """Train a model; afterwards it has the last weights (averaged ones where the recipe averages).

    directory: gets metrics.jsonl, model.safetensors (those weights), best.safetensors and checkpoint/, each written
    atomically; resume: continue from its checkpoint, or start where there is none; checkpoint_every: steps between
    checkpoints within an epoch (None: one at each epoch's end); keep_every: epochs between kept copies of the
    weights, kept/epoch-NNNN.safetensors in half precision, the first one before training (None: none); objective: the
    loss (None: cross-entropy with the labels); train_last: train only the last K blocks and the layers after them
    (0: the head; None: everything); precision, compiling: see speed.choose; recompute: the blocks' activations in the
    backward pass, to save memory; watchers: called at every step and epoch in the first process, and closed at the
    end. Raises InputError when data, model and checkpoint do not match, NonFiniteError when the loss becomes NaN or
    infinite (the files keep the last good weights), StorageError when the disk is full (the previous checkpoint
    survives), RunError when another process has ended.
    """
    require_interval(keep_every)
    require_fitting(model, train, test)
    accelerator, processes = accelerated(torch.device(device))
    task = Task(
        model, train, test, recipe, directory, seed, processes, checkpoint_every=checkpoint_every,
        keep_every=keep_every, train_last=train_last, objective=objective or LabelObjective(), watchers=watchers,
        on_progress=on_progress,
    )  # fmt: skip
    speed = choose(task.device, precision=precision, compiling=compiling, steps=task.steps)
    task = replace(task, precision=speed.precision)
    model.to(task.device)
    if model.anatomy.family == "cnn":  # the memory layout in which convolutions are fast
        model.module.to(memory_format=torch.channels_last)
    fork = torch.random.fork_rng(devices=[task.device] if task.device.type == "cuda" else [])
    computing, attention = gradient_checkpointing(model, on=recompute), fast_attention(model, task.device)
    with fork, partly_trainable(model, last=train_last), computing, attention, decoding_errors():
        training = Training(task, Updates(task, accelerator, compiled=speed.compiled), _Images(task))
        return training.run(resume=resume, notes=speed.notes)


class Examples(Protocol):
    """What a training runs on: the inputs of its model for the training and the test images."""

    def batches(self, epoch: int, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs and labels of this process's share of each batch, given by its keys, on the device."""
        ...

    def test(self) -> tuple[float, float]:
        """Mean loss (nats) and accuracy (fraction) on the test images, over all processes."""
        ...


class _Images:
    """The images of a task, augmented by its recipe."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def batches(self, epoch: int, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The augmented images and their labels."""
        for portion in portions(self.task.source(epoch), shares, pin=self.task.device.type == "cuda"):
            yield self.task.augmented(portion, epoch), self.task.labels(portion.indices)

    def test(self) -> tuple[float, float]:
        """Loss and accuracy; each process takes its share. Raises NonFiniteError for a logit that is not finite."""
        model, split, processes = self.task.model, self.task.test, self.task.processes
        for buffer in model.buffers() if processes.count > 1 else ():  # batch statistics differ between processes
            with peer_errors():
                broadcast(buffer, from_process=0)
        indices = process_share(torch.arange(len(split)), processes.index, processes.count)
        sums = torch.zeros(2, dtype=torch.float64)
        if len(indices):  # with fewer images than processes, some have none
            part = split.pick(indices)
            assert part.labels is not None
            logits, labels = predicted_logits(model, part, precision=self.task.precision), part.labels.cpu().long()
            sums[0] = F.cross_entropy(logits, labels, reduction="sum")
            sums[1] = (logits.argmax(1) == labels).sum()
        loss, accuracy = (processes.total(sums) / len(split)).tolist()
        return loss, accuracy


class Updates:
    """Model, optimiser and average of the weights between updates; step: updates done."""

    def __init__(self, task: Task, accelerator: Accelerator, *, compiled: bool = False) -> None:
        self.task, self.accelerator, self.model, self.step = task, accelerator, task.model.module, 0
        self.average = Average(self.model, decay=task.recipe.average) if task.recipe.average else None
        self.optimiser = Optimiser(self.model, task.recipe, blocks=task.model.anatomy.blocks)
        module = task.objective.module(task.model)
        # several processes average their gradients
        wrapped = module if accelerator.num_processes == 1 else accelerator.prepare_model(module)
        self.wrapped: nn.Module = torch.compile(wrapped) if compiled else wrapped  # type: ignore[assignment]

    def apply(self, images: Tensor, labels: Tensor, *, whole: int) -> tuple[float, float, float]:
        """Update the weights from this process's share of a batch of `whole` images.

        Returns its summed loss, number of correct predictions, and the norm of the whole gradient. Raises
        NonFiniteError, before the weights change, when loss or gradient is NaN or infinite.
        """
        task, recipe, objective, accelerator = self.task, self.task.recipe, self.task.objective, self.accelerator
        images, targets = task.mixed(images, labels, step=self.step)
        sums = torch.zeros(2, device=images.device)
        parts = list(zip(images.chunk(recipe.accumulate), targets.chunk(recipe.accumulate)))
        for number, (part, part_targets) in enumerate(parts, start=1):
            synchronised = nullcontext() if number == len(parts) else accelerator.no_sync(self.wrapped)
            with synchronised, peer_errors():
                with autocast(task.device, task.precision):
                    outputs = self.wrapped(part)
                loss = objective.loss(outputs, part_targets, part, smoothing=recipe.label_smoothing)
                # gradients are averaged over processes: so every image counts the same in uneven shares
                accelerator.backward(loss * (accelerator.num_processes / whole))
            hard = part_targets if part_targets.ndim == 1 else part_targets.argmax(1)
            correct = (objective.logits(outputs).detach().argmax(1) == hard).sum()
            sums += torch.stack((loss.detach(), correct))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip or math.inf)
        summed, correct, length = torch.cat((sums, norm.detach()[None])).tolist()  # one synchronisation with the device
        if not math.isfinite(summed + length):
            raise self._not_finite(f"loss {summed / len(labels):g}, gradient norm {length:g}")
        self.optimiser.set_rate(task.learning_rate(self.step))
        self.optimiser.step()
        if self.average is not None:
            self.average.update(self.model)
        self.step += 1
        return summed, correct, length

    def averaged(self) -> AbstractContextManager[None]:
        """The model with the averaged weights, which are tested and saved, while the context lasts."""
        return nullcontext() if self.average is None else self.average.applied(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that are needed to resume: model/..., average/..., optimiser/..."""
        average = {} if self.average is None else self.average.tensors
        parts = {"model": self.model.state_dict(), "average": average, "optimiser": self.optimiser.tensors()}
        return {f"{part}/{name}": value for part, own in parts.items() for name, value in own.items()}

    def require_finite(self) -> None:
        """Raise NonFiniteError for a NaN or an infinity in any tensor, before it is written to a file."""
        for name, value in self.tensors().items():
            if not value.isfinite().all():
                raise self._not_finite(f"NaN or infinity in {name}")

    def resume(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Continue from a checkpoint's tensors. Raises InputError where they are not those of this model."""
        own, state = self.tensors(), below("optimiser/", tensors)
        expected = own | {f"optimiser/{name}": like for name, like in self.optimiser.expected().items() if state}
        found = {name for name in tensors if name.startswith(("model/", "average/", "optimiser/"))}
        wrong = sorted(found ^ expected.keys())
        for name in sorted(found & expected.keys()):
            value, like = tensors[name], expected[name]
            alike = value.shape == like.shape and value.is_floating_point() == like.is_floating_point()
            if not alike or value.is_complex() or not value.isfinite().all():
                wrong.append(name)
        if wrong:
            raise InputError(
                f"expected a checkpoint of this model, found {len(wrong)} other tensors (first {wrong[0][:80]!r}); "
                "train anew in another folder"
            )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(tensors[name])
        self.optimiser.restore(state)
        self.step = step
        if self.average is not None:
            self.average.updates = step

    def _not_finite(self, values: str) -> NonFiniteError:
        """The error for values that are not finite, with what to try."""
        epoch = self.step // self.task.steps_per_epoch
        return NonFiniteError(
            f"expected a finite loss, found {values} in epoch {epoch + 1}, step {self.step + 1}; {self.task.directory} "
            f"keeps the last good weights; try --learning-rate {self.task.recipe.learning_rate / 3:.1g}"
        )


class Training:
    """One run of the loop in one process.

    whole: the model that the task's model is the head of, where that alone is trained. As such an epoch takes less
    time than writing a file, checkpoints are then written at intervals of time, and the weights once, at the end.
    """

    def __init__(self, task: Task, updates: Updates, examples: Examples, *, whole: Model | None = None) -> None:
        self.task, self.updates, self.examples, self.whole = task, updates, examples, whole
        self.processes = task.processes
        self.watchers = task.watchers if self.processes.is_first else ()
        self.history: tuple[EpochMetrics, ...] = ()
        # of this epoch, in this process: loss, correct predictions, images, gradient norms / processes
        self.sums = torch.zeros(4, dtype=torch.float64)
        self.best: dict[str, Tensor] = {}  # weights of a head
        self.earlier = 0.0  # seconds of earlier runs of this training
        self.images, self.seconds = 0, 0.0  # trained on in this run over all processes, without tests and files
        self.reported = self.last_checkpoint = 0.0  # of time.perf_counter

    def run(self, *, resume: bool, notes: tuple[str, ...]) -> TrainingResult:
        """All epochs that remain. notes: how it is computed, in words."""
        task = self.task
        with ExitStack() as stack:
            for watcher in self.watchers:
                stack.callback(watcher.close)
            self._begin(resume=resume)
            while self.updates.step < task.steps:
                self._epoch()
        if self.updates.average is not None:
            copy_into(task.model.module, self.updates.average.tensors)
        if self.whole is not None:  # with the best head, and with the last one, which it keeps
            head = task.model.module
            last = {name: value.clone() for name, value in head.state_dict().items()}
            for name, tensors in ((BEST_FILE, self.best or last), (saved.WEIGHTS_FILE, last)):
                copy_into(head, tensors)
                if self.processes.is_first:
                    saved.save(self.whole, task.directory / name)
        last_epoch, best = self.history[-1], best_of(self.history)
        assert last_epoch.test_accuracy is not None  # the last epoch is always tested
        assert best is not None
        assert best.test_accuracy is not None
        return TrainingResult(
            history=self.history,
            accuracy=last_epoch.test_accuracy,
            best_accuracy=best.test_accuracy,
            best_epoch=best.epoch,
            seconds=last_epoch.seconds,
            weights=task.directory / saved.WEIGHTS_FILE,
            best_weights=task.directory / BEST_FILE,
            notes=notes,
        )

    def _begin(self, *, resume: bool) -> None:
        """Continue from the checkpoint, or write the first one."""
        folder = self.task.directory
        checkpoint = read_checkpoint(folder) if resume else None
        with peer_errors():
            self.updates.accelerator.wait_for_everyone()  # no process writes before all have read
        if checkpoint is not None:
            self._resume(checkpoint)
        if self.processes.is_first:
            write_metrics(folder, self.history)
            delete_kept_after(folder, -1 if checkpoint is None else len(self.history))
            if checkpoint is None and self.task.keep_every:
                keep_weights(folder, self.task.model, epochs=0)
        if checkpoint is None:
            self._write_checkpoint()

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Raises InputError when it belongs to another run, or is damaged."""
        task, facts, tensors = self.task, checkpoint.facts, checkpoint.tensors
        require_same(facts.identity, task.identity(), folder=task.directory)
        done, sums = facts.step // task.steps_per_epoch, tensors.get("sums")
        tested = not facts.history or facts.step < task.steps or facts.history[-1].test_accuracy is not None
        whole = sums is not None and sums.shape == self.sums.shape and bool(sums.isfinite().all())
        if facts.step > task.steps or len(facts.history) != done or not tested or not whole:
            raise InputError(
                f"expected the checkpoint in {task.directory} to hold {done} epochs, at most {task.recipe.epochs}, and "
                f"the sums of the next, found {len(facts.history)}; train anew in another folder"
            )
        self.history, self.earlier = facts.history, facts.seconds
        self.updates.resume(tensors, facts.step)
        self.best = {name: value.to(task.device) for name, value in below("best/", tensors).items()}
        if self.best:
            require_fitting_weights(task.model.module, self.best, where="the checkpoint's best head")
        if self.processes.is_first:  # its sums include those of the others
            self.sums.copy_(tensors["sums"])

    def _epoch(self) -> None:
        """The steps that remain of an epoch, and its end."""
        task, updates = self.task, self.updates
        epoch, within = divmod(updates.step, task.steps_per_epoch)
        before, began = (self.images, self.seconds), time.perf_counter()
        for inputs, labels in self.examples.batches(epoch, task.shares(epoch)[within:]):
            loss, correct, norm = updates.apply(inputs, labels, whole=task.batch_size)
            share = norm / self.processes.count  # the norm is the same in all of them
            self.sums += torch.tensor((loss, correct, len(labels), share), dtype=torch.float64)
            self.images += task.batch_size
            self.seconds += time.perf_counter() - began
            rate, mean = task.learning_rate(updates.step - 1), loss / max(len(labels), 1)
            facts = StepMetrics(updates.step, epoch, mean, rate, norm, self.images / max(self.seconds, 1e-9))
            for watcher in self.watchers:
                watcher.on_step(facts)
            self._report(epoch)
            # the last step of an epoch writes its checkpoint after the test
            if (
                task.checkpoint_every
                and updates.step % task.checkpoint_every == 0
                and updates.step % task.steps_per_epoch
            ):
                self._write_checkpoint()
            began = time.perf_counter()
        self._end_epoch(epoch, (self.images - before[0]) / max(self.seconds - before[1], 1e-9))

    def _end_epoch(self, epoch: int, rate: float) -> None:
        """Test if due, and record the epoch. rate: its images per second."""
        task, step, recipe = self.task, self.updates.step, self.task.recipe
        self.updates.require_finite()
        loss, correct, images, norms = self.processes.total(self.sums).tolist()
        due = epoch + 1 == recipe.epochs or (epoch + 1) % recipe.evaluate_every == 0
        with self.updates.averaged():
            test_loss, test_accuracy = self.examples.test() if due else (None, None)
            metrics = EpochMetrics(
                epoch=epoch,
                step=step,
                images=step * task.batch_size,
                learning_rate=task.learning_rate(step - 1),
                train_loss=loss / images,
                train_accuracy=correct / images,
                test_loss=test_loss,
                test_accuracy=test_accuracy,
                seconds=self._elapsed(),
                images_per_second=rate,
                gradient_norm=norms / task.steps_per_epoch,
            )
            self.history = (*self.history, metrics)
            self._save_weights(metrics, best=best_of(self.history) is metrics)
            for watcher in self.watchers:
                watcher.on_epoch(metrics, self.whole or task.model)
        self._report(epoch, now=True)
        self.sums.zero_()
        recent = time.perf_counter() - self.last_checkpoint < CHECKPOINT_INTERVAL
        if self.whole is None or not recent or step == task.steps:
            self._write_checkpoint()

    def _save_weights(self, metrics: EpochMetrics, *, best: bool) -> None:
        """Write the line and the weights of an epoch; of a head, note them where they are the best."""
        task, done = self.task, metrics.epoch + 1
        if self.processes.is_first:
            write_metrics(task.directory, self.history)
            if task.keep_every and done % task.keep_every == 0:
                keep_weights(task.directory, task.model, epochs=done)
        if self.whole is not None:
            if best:
                self.best = {name: value.clone() for name, value in task.model.module.state_dict().items()}
        elif self.processes.is_first:
            for name in (saved.WEIGHTS_FILE, BEST_FILE)[: 1 + best]:
                saved.save(task.model, task.directory / name)

    def _write_checkpoint(self) -> None:
        self.last_checkpoint = time.perf_counter()
        sums = self.processes.total(self.sums)
        if self.processes.is_first:
            self.updates.require_finite()
            best = {f"best/{name}": value for name, value in self.best.items()}
            facts = Facts(self.task.identity(), self.updates.step, self._elapsed(), self.history)
            write_checkpoint(self.task.directory, Checkpoint({**self.updates.tensors(), **best, "sums": sums}, facts))

    def _elapsed(self) -> float:
        """Seconds of all runs of this training, tests included."""
        return self.earlier + time.perf_counter() - self.task.began

    def _report(self, epoch: int, *, now: bool = False) -> None:
        """Call on_progress in the first process, now or when PROGRESS_INTERVAL has passed."""
        task, step, clock = self.task, self.updates.step, time.perf_counter()
        listener = task.on_progress if self.processes.is_first else None
        if listener is None or (not now and clock - self.reported < PROGRESS_INTERVAL):
            return
        self.reported = clock
        loss, correct, images, _ = self.sums.tolist()
        tests = [metrics.test_accuracy for metrics in self.history if metrics.test_accuracy is not None]
        listener(
            Progress(
                epoch=epoch,
                epochs=task.recipe.epochs,
                step=step,
                steps=task.steps,
                loss=loss / max(images, 1),  # a process may have no images yet
                accuracy=correct / max(images, 1),
                test_accuracy=tests[-1] if tests else None,
                images_per_second=self.images / max(self.seconds, 1e-9),
                seconds_left=(task.steps - step) * task.batch_size * (clock - task.began) / max(self.images, 1),
            )
        )
