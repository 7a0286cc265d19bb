"""The training loop: epochs of steps, each followed by a test and a checkpoint.

The result depends only on (model, data, recipe, seed, number of processes). Orders, augmentation
and dropout derive from (seed, epoch, step), so a killed run resumes exactly from its checkpoint.
Several processes take shares of the same global batches; their averaged gradients equal those of
one process, except for batch normalisation, whose statistics are per process (over smaller
batches), and dropout, drawn per process.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.data.split import Split
from vitlens.devices import as_device
from vitlens.errors import InputError, argument
from vitlens.inputs import takes_splits
from vitlens.models import saved
from vitlens.models.model import Model
from vitlens.processes import accelerated, is_first_process, peer_errors
from vitlens.training import checkpoint
from vitlens.training.checkpoint import Facts
from vitlens.training.distill import Objective, StandardObjective
from vitlens.training.feed import decoding_errors, portions, process_share
from vitlens.training.finetune import partly_trainable
from vitlens.training.metrics import (
    EpochMetrics,
    GradientWatcher,
    Progress,
    StepMetrics,
    Tested,
    TrainingResult,
    Watcher,
    best_of,
    write_metrics,
)
from vitlens.training.optimiser import copy_into, copy_of
from vitlens.training.recipe import Recipe
from vitlens.training.speed import (
    choose_compiling,
    choose_precision,
    fast_attention,
    gradient_checkpointing,
)
from vitlens.training.task import Task, require_fitting
from vitlens.training.updates import UpdateResult, Updates, add_prefix, remove_prefix

BEST_FILE: Final = "best.safetensors"
# seconds, between the checkpoints of a training on features, whose epochs are short
CHECKPOINT_INTERVAL = 5.0
PROGRESS_INTERVAL = 0.1  # seconds
_LEAST_SECONDS: Final = 1e-9  # keeps a speed finite

# takes an epoch and the keys of the share of each batch of this process; yields inputs and labels
# on the device
Batches: TypeAlias = Callable[[int, Sequence[Tensor]], Iterator[tuple[Tensor, Tensor]]]
Test: TypeAlias = Callable[[], Tested]  # over all processes


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

    directory: gets metrics.jsonl, model.safetensors (those weights), best.safetensors and
        checkpoint/, each written atomically.
    resume: continue from its checkpoint, or start where there is none.
    checkpoint_every: steps between checkpoints within an epoch (None: one at each epoch's end).
    keep_every: epochs between kept copies of the weights, kept/epoch-NNNN.safetensors in half
        precision, the first one before training (None: none).
    objective: the loss (None: cross-entropy with the labels).
    train_last: train only the last K blocks and the layers after them (0: the head; None:
        everything).
    precision, compiling: see speed.
    recompute: the blocks' activations in the backward pass, to save memory.
    watchers: called at every step and epoch in the first process, and closed at the end.

    Raises InputError when data, model and checkpoint do not match, and RunError when another
    process has ended. Raises NonFiniteError when the loss becomes NaN or infinite; the files keep
    the last good weights. Raises StorageError when the disk is full; the previous checkpoint
    survives.
    """
    checkpoint.require_interval(keep_every)
    task = Task(
        model=model,
        train=train,
        test=test,
        recipe=recipe,
        directory=directory,
        seed=seed,
        device=device,
        precision=precision,
        resume=resume,
        checkpoint_every=checkpoint_every,
        keep_every=keep_every,
        objective=objective or StandardObjective(),
        train_last=train_last,
        compiling=compiling,
        recompute=recompute,
        watchers=watchers,
        on_progress=on_progress,
    )
    return train_on_images(task)


def train_on_images(task: Task) -> TrainingResult:
    """Train a model on its images; see `fit`."""
    with running(task) as (task, accelerator, precision_note):
        model = task.model
        device = task.processes.device
        compiled, compiling_note = choose_compiling(device, task.compiling, steps=task.steps)
        if model.anatomy.family == "cnn":  # the memory layout in which convolutions are fast
            model.module.to(memory_format=torch.channels_last)
        with gradient_checkpointing(model, on=task.recompute), fast_attention(model, device):
            updates = Updates(task, accelerator, compiled=compiled)
            training = Training(
                task, updates, partial(_augmented_images, task), partial(_test_images, task)
            )
            return training.run(notes=(precision_note, compiling_note))


@contextmanager
def running(task: Task) -> Iterator[tuple[Task, Accelerator, str]]:
    """Yield a task with its process, precision and device chosen, and its accelerator.

    The third value is a note on the precision. Inside, the trained part of the model has gradients.
    On exit the modes and gradient flags of the model and the random state of torch are as before,
    and the watchers closed. Raises what `fit` raises for data that do not fit the model.
    """
    with ExitStack() as stack:
        if is_first_process():  # only this process calls the watchers
            for watcher in task.watchers:
                stack.callback(watcher.close)
        accelerator, processes = accelerated(as_device(task.device))
        if task.pretraining is None:
            require_fitting(task.model, task.train, task.test)
        else:
            # the smallest number of images that pass through the model together
            part_size = task.batch_size // processes.count // task.recipe.accumulate
            task.pretraining.require(task.model, task.recipe, part_size)
        if task.batch_size < processes.count:
            raise InputError(
                f"expected {argument('batch_size')} of at least {processes.count}, one per "
                f"process, found {task.batch_size}"
            )
        precision, note = choose_precision(processes.device, task.precision)
        task = replace(task, processes=processes, precision=precision)
        task.model.to(processes.device)
        devices = [processes.device] if processes.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(partly_trainable(task.model, last=task.train_last))
        stack.enter_context(decoding_errors())
        yield task, accelerator, note


def _augmented_images(
    task: Task, epoch: int, shares: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the augmented images of each batch with their labels: the Batches of `Training`."""
    pin = task.processes.device.type == "cuda"
    for pixels, keys in portions(task.source(epoch), shares, pin=pin):
        yield task.augmented(pixels, keys, epoch), task.targets(keys)


def _test_images(task: Task) -> Tested:
    """Return the loss and accuracy on the test images; each process computes its share.

    Raises NonFiniteError for a logit that is not finite.
    """
    model = task.model
    split = task.test
    processes = task.processes
    if task.pretraining is not None:
        return task.pretraining.tested(
            precision=task.precision,
            seed=task.seed,
            batch_size=task.batch_size,
            processes=processes,
        )
    if processes.count > 1:  # batch statistics differ between processes
        for buffer in model.buffers():
            with peer_errors():
                broadcast(buffer, from_process=0)
    indices = process_share(torch.arange(len(split)), processes.index, processes.count)
    sums = torch.zeros(2, dtype=torch.float64)
    if len(indices):  # with fewer images than processes, some have none
        part = split.pick(indices)
        assert part.labels is not None
        logits = predicted_logits(model, part, precision=task.precision)
        labels = part.labels.cpu().long()
        sums[0] = F.cross_entropy(logits, labels, reduction="sum")
        sums[1] = (logits.argmax(1) == labels).sum()
    loss, accuracy = (processes.total(sums) / len(split)).tolist()
    return Tested(loss, accuracy)


class Training:
    """One run of the loop in one process.

    batches: yields the inputs and labels of an epoch's batches.
    test: returns the result of a test of the current weights.

    Where only a head is trained, an epoch takes less time than writing a file: checkpoints are then
    written at intervals of time, and the weights of the whole model once, at the end.
    """

    def __init__(self, task: Task, updates: Updates, batches: Batches, test: Test) -> None:
        self.task = task
        self.updates = updates
        self.batches = batches
        self.test = test
        self.watchers = task.watchers if task.processes.is_first else ()
        self.gradient_watchers = [
            watcher for watcher in self.watchers if isinstance(watcher, GradientWatcher)
        ]
        self.history: tuple[EpochMetrics, ...] = ()
        # Sums over this epoch: loss, correct predictions, images, and gradient norms divided by the
        # number of processes. They are of this process. After a resume, the first process has those
        # of all from before.
        self.sums = torch.zeros(4, dtype=torch.float64)
        self.best: dict[str, Tensor] = {}  # weights of the head in its best epoch
        self.earlier_seconds = 0.0  # of earlier runs of this training
        # of training in this run: images of all processes, and seconds without tests and files
        self.images = 0
        self.seconds = 0.0
        # times of time.perf_counter
        self.last_report = 0.0
        self.last_checkpoint = 0.0

    def run(self, *, notes: tuple[str, ...]) -> TrainingResult:
        """Run all epochs that remain and return the result.

        notes: on how it is computed, in words.
        """
        task = self.task
        average = self.updates.average
        self._begin()
        while self.updates.step < task.steps:
            self._epoch()
        if average is not None:
            copy_into(self.updates.model, average.tensors)
        if task.pretraining is not None:
            exported = task.exported
            if not exported.has_classifier:
                # a teacher in self-distillation: the caller's model gets the weights that are saved
                copy_into(task.model.module, exported.module.state_dict())
        if task.whole is not None:
            self._save_heads(task.whole)
        last_epoch = self.history[-1]
        best = best_of(self.history)
        result = TrainingResult(
            history=self.history,
            accuracy=last_epoch.test_accuracy,
            best_accuracy=None,
            best_epoch=None,
            seconds=last_epoch.seconds,
            weights=task.directory / saved.WEIGHTS_FILE,
            best_weights=None,
            notes=notes,
        )
        if best is not None:
            result = replace(
                result,
                best_accuracy=best.test_accuracy,
                best_epoch=best.epoch,
                best_weights=task.directory / BEST_FILE,
            )
        return result

    def _save_heads(self, whole: Model) -> None:
        """Save the whole model with the best head and with the last head, which it keeps."""
        task = self.task
        head = task.model.module
        last = copy_of(head)
        best = self.best or last  # without a test, there is no best one
        for name, tensors in ((BEST_FILE, best), (saved.WEIGHTS_FILE, last)):
            copy_into(head, tensors)
            if task.processes.is_first:
                saved.save(whole, task.directory / name)

    def _begin(self) -> None:
        """Continue from the checkpoint, or write the first one."""
        task = self.task
        folder = self.task.directory
        resumed = None
        if task.resume:
            resumed = checkpoint.read_checkpoint(folder)
        with peer_errors():
            self.updates.accelerator.wait_for_everyone()  # no process writes before all have read
        last_kept = -1  # no weights of another training stay, not even those of epoch 0
        if resumed is not None:
            facts, tensors = resumed
            self._resume(facts, tensors)
            last_kept = len(self.history)
        if task.processes.is_first:
            write_metrics(folder, self.history)
            checkpoint.delete_kept_after(folder, last_kept)
            if resumed is None and task.keep_every:
                checkpoint.keep_weights(folder, task.exported, epochs=0)
        if resumed is None:
            self._write_checkpoint()

    def _require_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise InputError for tensors of a checkpoint that are not those of this training."""
        expected = self.updates.tensors() | {"sums": self.sums}
        if any(name.startswith("optimiser/") for name in tensors):  # none before the first step
            expected |= add_prefix("optimiser/", self.updates.optimiser.expected())
        if any(name.startswith("best/") for name in tensors):
            expected |= add_prefix("best/", self.task.model.module.state_dict())
        wrong = sorted(tensors.keys() ^ expected.keys())
        for name in sorted(tensors.keys() & expected.keys()):
            value = tensors[name]
            model_value = expected[name]
            has_form = (
                value.shape == model_value.shape
                and value.is_floating_point() == model_value.is_floating_point()
            )
            if not has_form or not value.isfinite().all():
                wrong.append(name)
        if wrong:
            raise InputError(
                f"expected a checkpoint of this model, found {len(wrong)} other tensors (first "
                f"{wrong[0][:80]!r}); train anew in another folder"
            )

    def _resume(self, facts: Facts, tensors: dict[str, Tensor]) -> None:
        """Continue from a checkpoint.

        Raises InputError when it belongs to another run, or is damaged.
        """
        task = self.task
        epochs_done = facts.step // self.task.steps_per_epoch
        facts.require_same(task.identity(), task.directory)
        self._require_tensors(tensors)
        lacks_last_test = False
        if facts.history and facts.step >= task.steps:
            lacks_last_test = facts.history[-1].test_loss is None
        has_other_history = len(facts.history) != epochs_done
        is_damaged = facts.step > task.steps or has_other_history or lacks_last_test
        if is_damaged:
            raise InputError(
                f"expected the checkpoint in {task.directory} to hold {epochs_done} epochs, at "
                f"most {task.recipe.epochs}, found {len(facts.history)}; train anew in another "
                "folder"
            )
        self.history = facts.history
        self.earlier_seconds = facts.seconds
        self.updates.resume(tensors, facts.step)
        self.best = {
            name: value.to(task.processes.device)
            for name, value in remove_prefix("best/", tensors).items()
        }
        # a checkpoint has the sums of all processes, which are added up again at the epoch's end
        if task.processes.is_first:
            self.sums.copy_(tensors["sums"])

    def _epoch(self) -> None:
        """Run the steps that remain of an epoch, and its end."""
        task = self.task
        updates = self.updates
        epoch, steps_done = divmod(updates.step, task.steps_per_epoch)
        images_before = self.images
        seconds_before = self.seconds
        step_began = time.perf_counter()
        for inputs, labels in self.batches(epoch, task.shares(epoch)[steps_done:]):
            is_last_step = (updates.step + 1) % task.steps_per_epoch == 0
            watchers = self.gradient_watchers if is_last_step else ()
            result = updates.apply(inputs, labels, batch_size=task.batch_size, watchers=watchers)
            self._add(result, images=len(labels))
            self.images += task.batch_size
            self.seconds += time.perf_counter() - step_began
            metrics = StepMetrics(
                step=updates.step,
                epoch=epoch,
                loss=result.loss / max(len(labels), 1),
                learning_rate=task.learning_rate(updates.step - 1),
                gradient_norm=result.gradient_norm,
                images_per_second=self.images / max(self.seconds, _LEAST_SECONDS),
            )
            for watcher in self.watchers:
                watcher.on_step(metrics)
            self._report(epoch)
            is_due = task.checkpoint_every and updates.step % task.checkpoint_every == 0
            if is_due and not is_last_step:  # the last step writes its checkpoint after the test
                self._write_checkpoint()
            step_began = time.perf_counter()
        seconds = max(self.seconds - seconds_before, _LEAST_SECONDS)
        self._end_epoch(epoch, images_per_second=(self.images - images_before) / seconds)

    def _add(self, result: UpdateResult, *, images: int) -> None:
        """Add an update on these images to the sums over the epoch."""
        # the norm is the same in all processes, and the sums of all are added
        share_of_norm = result.gradient_norm / self.task.processes.count
        values = (result.loss, result.correct, images, share_of_norm)
        self.sums += torch.tensor(values, dtype=torch.float64)

    def _end_epoch(self, epoch: int, *, images_per_second: float) -> None:
        """Test if due, record the epoch and save its weights."""
        task = self.task
        step = self.updates.step
        epochs_done = epoch + 1
        self.updates.require_finite()
        loss, correct, images, norms = task.processes.total(self.sums).tolist()
        is_last_epoch = epochs_done == task.recipe.epochs
        is_test_due = is_last_epoch or epochs_done % task.recipe.evaluate_every == 0
        with self.updates.averaged():
            tested = self.test() if is_test_due else None
            model = task.exported
            metrics = EpochMetrics(
                epoch=epoch,
                step=step,
                images=step * task.batch_size,
                learning_rate=task.learning_rate(step - 1),
                train_loss=loss / images,
                train_accuracy=None if task.pretraining else correct / images,
                test_loss=None,
                test_accuracy=None,
                seconds=self._elapsed(),
                images_per_second=images_per_second,
                gradient_norm=norms / task.steps_per_epoch,
            )
            if tested is not None:
                metrics = replace(
                    metrics,
                    test_loss=tested.loss,
                    test_accuracy=tested.accuracy,
                    measures=dict(tested.measures),
                )
            self.history = (*self.history, metrics)
            is_best = best_of(self.history) is metrics
            if task.processes.is_first:
                write_metrics(task.directory, self.history)
                if task.keep_every and epochs_done % task.keep_every == 0:
                    checkpoint.keep_weights(task.directory, model, epochs=epochs_done)
                if task.whole is None:
                    saved.save(model, task.directory / saved.WEIGHTS_FILE)
                    if is_best:
                        saved.save(model, task.directory / BEST_FILE)
                if task.pretraining is not None:
                    task.pretraining.write_parts(task.directory)
            if task.whole is not None and is_best:
                self.best = copy_of(task.model.module)
            for watcher in self.watchers:
                watcher.on_epoch(metrics, model)
        self._report(epoch, now=True)
        self.sums.zero_()
        is_recent = time.perf_counter() - self.last_checkpoint < CHECKPOINT_INTERVAL
        if task.whole is None or not is_recent or step == task.steps:
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        self.last_checkpoint = time.perf_counter()
        sums = self.task.processes.total(self.sums)  # collective: every process calls it
        if self.task.processes.is_first:
            self.updates.require_finite()
            tensors = {**self.updates.tensors(), **add_prefix("best/", self.best), "sums": sums}
            facts = Facts(self.task.identity(), self.updates.step, self._elapsed(), self.history)
            checkpoint.write_checkpoint(self.task.directory, facts, tensors)

    def _elapsed(self) -> float:
        """Return the seconds of all runs of this training, tests included."""
        return self.earlier_seconds + time.perf_counter() - self.task.began

    def _report(self, epoch: int, *, now: bool = False) -> None:
        """Call on_progress in the first process, now or when PROGRESS_INTERVAL has passed."""
        task = self.task
        step = self.updates.step
        clock = time.perf_counter()
        if task.on_progress is None or not task.processes.is_first:
            return
        is_recent = clock - self.last_report < PROGRESS_INTERVAL
        if is_recent and not now:
            return
        self.last_report = clock
        loss, correct, images, _ = self.sums.tolist()
        test_accuracy = None  # of the last test
        for metrics in self.history:
            if metrics.test_accuracy is not None:
                test_accuracy = metrics.test_accuracy
        seconds_per_image = (clock - task.began) / max(self.images, 1)
        progress = Progress(
            epoch=epoch,
            epochs=task.recipe.epochs,
            step=step,
            steps=task.steps,
            loss=loss / max(images, 1),  # a process may have no images yet
            accuracy=None if task.pretraining else correct / max(images, 1),
            test_accuracy=test_accuracy,
            images_per_second=self.images / max(self.seconds, _LEAST_SECONDS),
            seconds_left=(task.steps - step) * task.batch_size * seconds_per_image,
        )
        task.on_progress(progress)
