"""Training a head on a frozen backbone, whose features are computed once and cached.

The loop is that of `fit`, on features in place of images.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.saved import fingerprint
from vitlens.processes import accelerated
from vitlens.training.bookkeeping import Bookkeeping, Clock
from vitlens.training.finetune import partly_trainable
from vitlens.training.frozen import Cached, CachedTest, FrozenFeatures, delete_features, head_alone
from vitlens.training.loop import Training
from vitlens.training.metrics import Progress, TrainingResult, Watcher, watched
from vitlens.training.recipe import Recipe
from vitlens.training.speed import choose
from vitlens.training.task import LabelObjective, Task, require_fitting
from vitlens.training.update import Updates


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
    objective = LabelObjective(frozen={"backbone": fingerprint(model.module), "views": views})
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), partly_trainable(model, last=0):
        # the head is trained in fp32: its steps are cheap
        task = Task(head_alone(model), train, test, recipe, directory, seed, device, "fp32", None, None, objective)
        with reading or nullcontext(lambda _: None) as advance:
            cache = FrozenFeatures(model, task, processes, views, chosen.precision, advance)
            parts = cache.of("train"), cache.of("test")
        with watched(watchers if processes.is_first else ()) as active:
            books = Bookkeeping(task, processes, clock, on_progress)
            training = Training(Updates(task, accelerator), books, _Features(task, *parts), active, whole=model)
            result = training.run(resume=resume, notes=(*chosen.notes[:1], _note(*parts)))
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


class _Features:
    """The inputs of a task's head: train (views, images, heads, dim) and test (1, images, heads, dim)."""

    def __init__(self, task: Task, train: Cached, test: CachedTest) -> None:
        self.task, self.train, self.images = task, train.to(task.device), test[0].to(task.device)

    def batches(self, epoch: int, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The features of one view and their labels; the epochs take the views in turn."""
        features = self.train[epoch % len(self.train)]
        for share in shares:
            yield features[share.to(features.device)], self.task.labels(share)

    @torch.inference_mode()
    def test(self) -> tuple[float, float]:
        """Mean loss (nats) and accuracy (fraction) on the test images; every process evaluates all of them."""
        labels = self.task.test.labels
        assert labels is not None
        with autocast(self.task.device, self.task.precision):
            logits = self.task.model.module(self.images).float().cpu()
        labels = labels.cpu().long()
        return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()


def _note(train: Cached, test: CachedTest) -> str:
    views = "unchanged" if len(train) == 1 else f"in {len(train)} augmented views"
    megabytes = (train.nbytes + test.nbytes) / 1e6
    return f"the backbone frozen and its features computed once (images {views}, {megabytes:.1f} MB)"
