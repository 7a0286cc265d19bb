"""Training a head on a frozen model: the backbone runs once, and every epoch after that costs next to nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.identity import fingerprint
from vitlens.models.model import Model
from vitlens.processes import Processes, accelerated
from vitlens.shapes import Images
from vitlens.training.clock import Clock
from vitlens.training.feed import portions
from vitlens.training.finetune import partly_trainable
from vitlens.training.frozen import (
    Cached,
    CachedTest,
    FromFeatures,
    cached_features,
    forget_features,
    head_alone,
    keep_features,
    recall_features,
)
from vitlens.training.head_loop import HeadTraining
from vitlens.training.metrics import Progress, TrainingResult
from vitlens.training.recipe import Recipe
from vitlens.training.speed import choose
from vitlens.training.task import Task, require_fitting
from vitlens.training.update import Updates
from vitlens.training.watch import Watcher, watched


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
    """Train a model's head on what the rest of it says of each image, computed once; the rest stays as it is.

    The steps are those of `fit` with the classifier alone trainable: same orders, same gradients. views: of each
    training image, augmented as the recipe says and cached, of which an epoch shows one, in turn (1: the image as it
    is); directory: as in `fit`, but that weights are written at the end alone; while the run lasts it also holds the
    features, so that a killed one need not compute them again; reading: entered while they are computed, its value
    told the number of images just read. Raises what `fit` raises, UnsupportedError for a head that is not the model's
    last step, InputError for a recipe whose images cannot be cached.
    """
    require_fitting(model, train, test)
    require_cacheable(recipe, views=views)
    accelerator, processes = accelerated(torch.device(device))
    device, clock = processes.device, Clock()
    if min(recipe.batch_size, len(train)) < processes.count:
        raise InputError(f"expected --batch-size of at least {processes.count}, found {recipe.batch_size}")
    chosen = choose(device, precision=precision, compiling="off", steps=1)
    model.to(device)
    objective = FromFeatures({"backbone": fingerprint(model.module), "views": views})
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), partly_trainable(model, last=0):
        # the head itself is trained in fp32: its steps cost nothing, and half precision would only add noise
        task = Task(head_alone(model), train, test, recipe, directory, seed, device, "fp32", None, None, objective)
        with reading or nullcontext(lambda _: None) as advance:
            ready = _Features(model, task, processes, views, chosen.precision, advance)
            parts = ready.of("train"), ready.of("test")
        with watched(watchers if processes.is_first else ()) as told:
            training = HeadTraining(
                model, task, Updates(task, accelerator), processes, clock, *parts,
                watchers=told, on_progress=on_progress,
            )  # fmt: skip
            training.begin(resume=resume)
            result = training.run(notes=(*chosen.notes[:1], _said(*parts)))
    if processes.is_first:
        forget_features(directory)
    return result


def require_cacheable(recipe: Recipe, *, views: int) -> None:
    """Raise InputError for a recipe whose images cannot be computed once and kept."""
    if views < 1:
        raise InputError(f"expected --cached-views at least 1, found {views}")
    for name, none in (("mixup", 0), ("cutmix", 0), ("views", 1)):
        if getattr(recipe, name) > none:
            raise InputError(
                f"expected images that are computed once with --freeze-backbone, found a recipe with {name} "
                f"{getattr(recipe, name)}; add --set {name}={none}, or train with --train-last 1"
            )
    changing = [name for name in ("crop_padding", "flip", "randaugment", "erasing") if getattr(recipe, name)]
    if changing and views == 1:
        raise InputError(
            f"expected images as they are with --freeze-backbone, found a recipe with {', '.join(changing)}; "
            "add --cached-views 4 to cache so many views of each, or take the augmentation out"
        )


class _Features:
    """The features of both parts of the data: computed, or read where an earlier attempt left them."""

    def __init__(
        self,
        model: Model,
        task: Task,
        processes: Processes,
        views: int,
        precision: str,
        advance: Callable[[int], object],
    ) -> None:
        self.model, self.task, self.processes, self.views = model, task, processes, views
        self.precision, self.advance = precision, advance

    def of(self, part: str) -> Cached:
        """Those of "train" (in all its views) or of "test"."""
        task, processes = self.task, self.processes
        about = {"part": part, "precision": self.precision, **task.identity()}
        found = recall_features(task.directory, part, about)
        everywhere = processes.total(torch.tensor(float(found is not None))) == processes.count
        if found is not None and everywhere and self._fits(found, part):
            return found
        made = cached_features(
            self.model,
            len(task.train if part == "train" else task.test),
            self._augmented if part == "train" and self.views > 1 else lambda _, batches: self._plain(part, batches),
            processes,
            views=self.views if part == "train" else 1,
            precision=self.precision,
            advance=self.advance,
        )
        if processes.is_first:
            keep_features(task.directory, part, made, about)
        return made

    def _fits(self, found: Tensor, part: str) -> bool:
        """Whether what a file holds is what the head reads: (views, images, heads, dim), finite."""
        task, heads = self.task, list(self.task.model.module.modules())
        widths = {module.in_features for module in heads if isinstance(module, nn.Linear)}
        count = len(task.train if part == "train" else task.test)
        views = self.views if part == "train" else 1
        alike = found.ndim == 4 and found.dtype == torch.float32 and found.shape[:2] == (views, count)
        return alike and {found.shape[3]} == widths and bool(found.isfinite().all())

    def _plain(self, part: str, batches: Sequence[Tensor]) -> Iterator[Images]:
        source = (self.task.train if part == "train" else self.task.test).source
        for portion in portions(source, batches, pin=self.task.device.type == "cuda"):
            yield portion.pixels.to(self.task.device, non_blocking=True).float().div_(255)

    def _augmented(self, view: int, batches: Sequence[Tensor]) -> Iterator[Images]:
        """As epoch `view` of a training without a cache would see them."""
        for portion in portions(self.task.source(view), batches, pin=self.task.device.type == "cuda"):
            yield self.task.augmented(portion, view)


def _said(train: Cached, test: CachedTest) -> str:
    views = "as they are" if len(train) == 1 else f"in {len(train)} augmented views"
    megabytes = (train.nbytes + test.nbytes) / 1e6
    return f"the backbone frozen and its features computed once (images {views}, {megabytes:.1f} MB)"
