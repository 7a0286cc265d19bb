"""Training a head on a frozen backbone, whose features are computed once and cached.

Orders, steps and tests are those of `fit`. An epoch takes less time than writing a file, so checkpoints are written at
intervals of time, and the whole model once, at the end.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.models import saved
from vitlens.models.identity import fingerprint
from vitlens.models.model import Model
from vitlens.models.weights import require_fitting as require_fitting_weights
from vitlens.processes import Processes, accelerated
from vitlens.training.bookkeeping import BEST_FILE, Bookkeeping, Clock
from vitlens.training.checkpoint import Checkpoint, read_checkpoint, storage_errors, write_checkpoint
from vitlens.training.feed import epoch_batches, process_share
from vitlens.training.finetune import partly_trainable
from vitlens.training.frozen import Cached, CachedTest, FeatureObjective, FrozenFeatures, delete_features, head_alone
from vitlens.training.metrics import (
    Progress,
    StepMetrics,
    TrainingResult,
    Watcher,
    append_metrics,
    rewrite_metrics,
    watched,
)
from vitlens.training.optimiser import copy_into
from vitlens.training.recipe import Recipe
from vitlens.training.speed import choose
from vitlens.training.task import Task, require_fitting
from vitlens.training.update import Updates

CHECKPOINT_INTERVAL = 5.0  # seconds


def fit_head(
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
    views: int = 1,
    watchers: Sequence[Watcher] = (),
    on_progress: Callable[[Progress], None] | None = None,
    reading: AbstractContextManager[Callable[[int], object]] | None = None,
) -> TrainingResult:
    """Train a model's head on the cached features of its frozen backbone.

    The steps are those of `fit` with only the classifier trainable: same orders, same gradients. views: of each
    training image, augmented by the recipe and cached, of which each epoch uses one, in turn (1: the unchanged image);
    directory: as in `fit`, except that weights are written only at the end; during the run it also holds the features,
    so that a killed run need not compute them again; reading: entered while they are computed, its value called with
    the number of images just read. Raises what `fit` raises, UnsupportedError for a head that is not the model's last
    step, InputError for a recipe whose images cannot be cached.
    """
    require_fitting(model, train, test)
    require_cacheable(recipe, views=views)
    accelerator, processes = accelerated(torch.device(device))
    device, clock = processes.device, Clock()
    if min(recipe.batch_size, len(train)) < processes.count:
        raise InputError(f"expected --batch-size of at least {processes.count}, found {recipe.batch_size}")
    chosen = choose(device, precision=precision, compiling="off", steps=1)
    model.to(device)
    objective = FeatureObjective({"backbone": fingerprint(model.module), "views": views})
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), partly_trainable(model, last=0):
        # the head is trained in fp32: its steps are cheap
        task = Task(head_alone(model), train, test, recipe, directory, seed, device, "fp32", None, None, objective)
        with reading or nullcontext(lambda _: None) as advance:
            cache = FrozenFeatures(model, task, processes, views, chosen.precision, advance)
            parts = cache.of("train"), cache.of("test")
        with watched(watchers if processes.is_first else ()) as active:
            training = _HeadTraining(
                model, task, Updates(task, accelerator), processes, clock, *parts,
                watchers=active, on_progress=on_progress,
            )  # fmt: skip
            training.begin(resume=resume)
            result = training.run(notes=(*chosen.notes[:1], _note(*parts)))
    if processes.is_first:
        delete_features(directory)
    return result


def require_cacheable(recipe: Recipe, *, views: int) -> None:
    """Raise InputError for a recipe whose features cannot be computed once and cached."""
    if views < 1:
        raise InputError(f"expected --cached-views at least 1, found {views}")
    for name, none in (("mixup", 0), ("cutmix", 0), ("views", 1)):
        if getattr(recipe, name) > none:
            raise InputError(
                f"expected features that are computed once with --freeze-backbone, found a recipe with {name} "
                f"{getattr(recipe, name)}; add --set {name}={none}, or train with --train-last 1"
            )
    changing = [name for name in ("crop_padding", "flip", "randaugment", "erasing") if getattr(recipe, name)]
    if changing and views == 1:
        raise InputError(
            f"expected unchanged images with --freeze-backbone, found a recipe with {', '.join(changing)}; "
            "add --cached-views 4 to cache four views of each image, or disable the augmentation"
        )


class _HeadTraining:
    """One run of the loop over features in one process.

    model: the whole model; task: of its head (see head_alone); train (views, images, heads, dim) and test (1, images,
    heads, dim): the head's inputs for each image; clock: started before they were computed; watchers, on_progress: see
    `fit`.
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        updates: Updates,
        processes: Processes,
        clock: Clock,
        train: Cached,
        test: CachedTest,
        *,
        watchers: Sequence[Watcher],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.model, self.task, self.updates, self.processes = model, task, updates, processes
        self.watchers = watchers
        self.train, self.test = train.to(task.device), test[0].to(task.device)
        self.books = Bookkeeping(task, processes, clock, on_progress)
        self.best: dict[str, Tensor] = {}
        self.last_checkpoint = 0.0

    def begin(self, *, resume: bool) -> None:
        """Continue from the checkpoint, or write the first one."""
        checkpoint = read_checkpoint(self.task.directory) if resume else None
        self.processes.total(torch.zeros(1))  # no process writes before all have read
        if checkpoint is not None:
            self.books.resume(checkpoint)
            self.updates.resume(checkpoint)
            self.best = {
                name.removeprefix("best/"): value.to(self.task.device)
                for name, value in checkpoint.tensors.items()
                if name.startswith("best/")
            }
            if self.best:
                require_fitting_weights(self.task.model.module, self.best, where="the checkpoint's best head")
        if self.processes.is_first:
            rewrite_metrics(self.task.directory, self.books.standing.history)
        self._write_checkpoint()

    def run(self, *, notes: tuple[str, ...]) -> TrainingResult:
        """All remaining epochs; then the whole model is written with the best and with the last head."""
        while self.updates.step < self.task.steps:
            self._epoch()
        self._write_checkpoint()
        head, directory = self.task.model.module, self.task.directory
        last = self.updates.average.tensors if self.updates.average is not None else head.state_dict()
        last = {name: value.clone() for name, value in last.items()}
        for name, tensors in (
            (BEST_FILE, self.best or last),
            (saved.WEIGHTS_FILE, last),
        ):  # in this order, so that the model ends with the last weights
            copy_into(head, tensors)
            if self.processes.is_first:
                with storage_errors(directory / name):
                    saved.save(self.model, directory / name)
        return self.books.result(notes)

    def _epoch(self) -> None:
        task, clock = self.task, self.books.clock
        epoch = self.updates.step // task.steps_per_epoch
        clock.begin_epoch()
        features = self.train[epoch % len(self.train)]
        sums = torch.zeros(4, dtype=torch.float64)  # loss, correct predictions, images, gradient norms / processes
        for batch in epoch_batches(len(task.train), task.recipe.batch_size, seed=task.seed, epoch=epoch):
            share = process_share(batch, self.processes.index, self.processes.count).to(task.device)
            update = self.updates.apply(features[share], task.labels(share), whole=len(batch))
            norm = update.norm / self.processes.count  # the same in all of them
            sums += torch.tensor((update.loss, update.correct, len(share), norm), dtype=torch.float64)
            clock.count(len(batch))
            for watcher in self.watchers:
                step = self.updates.step
                rate, loss = task.learning_rate(step - 1), update.loss / max(len(share), 1)
                watcher.on_step(StepMetrics(step, epoch, loss, rate, update.norm, clock.rate()))
        self._end_epoch(epoch, self.processes.total(sums).tolist())

    def _end_epoch(self, epoch: int, sums: list[float]) -> None:
        """Test if due, and record the epoch."""
        task, books = self.task, self.books
        books.clock.pause()
        with self.updates.averaged():
            tested = self._test() if books.is_due(epoch) else (None, None)
            metrics = books.end_epoch(epoch, self.updates.step, sums, tested)
            if books.standing.best_epoch == epoch:
                self.best = {name: value.clone() for name, value in task.model.module.state_dict().items()}
            for watcher in self.watchers:
                watcher.on_epoch(metrics, self.model)
        if self.processes.is_first:
            append_metrics(task.directory, metrics)
        if time.perf_counter() - self.last_checkpoint > CHECKPOINT_INTERVAL:
            self._write_checkpoint()
        last = self.updates.step == task.steps
        books.report(epoch, metrics.step, metrics.train_loss, metrics.train_accuracy, now=last)

    @torch.inference_mode()
    def _test(self) -> tuple[float, float]:
        """Mean loss (nats) and accuracy (fraction) on the test images; every process evaluates all of them."""
        labels = self.task.test.labels
        assert labels is not None
        with autocast(self.task.device, self.task.precision):
            logits = self.task.model.module(self.test).float().cpu()
        labels = labels.cpu().long()
        return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()

    def _write_checkpoint(self) -> None:
        self.last_checkpoint = time.perf_counter()
        if not self.processes.is_first:
            return
        self.updates.require_finite()
        best = {f"best/{name}": value for name, value in self.best.items()}
        facts = self.books.facts(self.updates.step)
        write_checkpoint(self.task.directory, Checkpoint({**self.updates.tensors(), **best}, facts))


def _note(train: Cached, test: CachedTest) -> str:
    views = "unchanged" if len(train) == 1 else f"in {len(train)} augmented views"
    megabytes = (train.nbytes + test.nbytes) / 1e6
    return f"the backbone frozen and its features computed once (images {views}, {megabytes:.1f} MB)"
