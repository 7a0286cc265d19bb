"""Training a head on a frozen backbone: the head's input for each image is computed once and cached.

The loop is that of `fit`, on features in place of images.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.files import write_bytes
from vitlens.models.anatomy import Anatomy
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Model
from vitlens.models.rebuild import classifiers
from vitlens.models.saved import fingerprint
from vitlens.processes import accelerated
from vitlens.shapes import Images, Logits
from vitlens.training.feed import decoding_errors, portions
from vitlens.training.finetune import partly_trainable
from vitlens.training.loop import Training, Updates
from vitlens.training.metrics import Progress, TrainingResult, Watcher
from vitlens.training.recipe import Recipe
from vitlens.training.speed import choose
from vitlens.training.task import LabelObjective, Task, require_fitting

FOLDER: Final = "features"
_TOLERANCE: Final = 1e-3  # of logits: rounding; a head that is not the last step differs by far more
_LAST: Final = "train it with --train-last 1 in place of --freeze-backbone"

HeadInputs = Float[Tensor, "batch heads dim"]  # of each classifier: one, or the two of a distilled model
Cached = Float[Tensor, "views images heads dim"]


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
    chosen = choose(processes.device, precision=precision, compiling="off", steps=1)
    model.to(processes.device)
    head = Model(  # sharing the model's parameters; it is run on features, not on images
        HeadOnly(model),
        alias=model.alias,
        anatomy=Anatomy("other", ()),
        preprocessing=model.preprocessing,
        classes=model.classes,
        provenance=model.provenance,
        architecture=model.architecture,
    )
    objective = LabelObjective(frozen={"backbone": fingerprint(model.module), "views": views})
    # the head is trained in fp32: its steps are cheap
    task = Task(
        head, train, test, recipe, directory, seed, processes, objective=objective, watchers=watchers,
        on_progress=on_progress,
    )  # fmt: skip
    devices = [processes.device] if processes.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), partly_trainable(model, last=0), decoding_errors():
        with reading or nullcontext(lambda _: None) as advance:
            trained = cached_features(model, task, "train", chosen.precision, advance, views=views)
            tested = cached_features(model, task, "test", chosen.precision, advance)
        training = Training(task, Updates(task, accelerator), _Features(task, trained, tested), whole=model)
        shown = "unchanged" if views == 1 else f"in {views} augmented views"
        megabytes = (trained.nbytes + tested.nbytes) / 1e6
        note = f"the backbone frozen and its features computed once (images {shown}, {megabytes:.1f} MB)"
        result = training.run(resume=resume, notes=(*chosen.notes[:1], note))
    if processes.is_first:
        for file in (directory / FOLDER).glob("*.safetensors"):
            file.unlink()
        with suppress(OSError):
            (directory / FOLDER).rmdir()
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


class HeadOnly(nn.Module):
    """A model's classifiers, sharing their parameters with it: their inputs -> logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = nn.ModuleList([model.module.get_submodule(name) for name in classifiers(model)])

    def forward(self, features: HeadInputs) -> Logits:
        """Logits (batch, classes); of a distilled model, the mean of its two heads."""
        return torch.stack([head(features[:, index]) for index, head in enumerate(self.heads)]).mean(0)


class _Features:
    """The inputs of a task's head: train (views, images, heads, dim) and test (1, images, heads, dim)."""

    def __init__(self, task: Task, train: Cached, test: Cached) -> None:
        self.task, self.train, self.images = task, train.to(task.device), test[0].to(task.device)

    def batches(self, epoch: int, shares: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The features of one view and their labels; the epochs take the views in turn."""
        features = self.train[epoch % len(self.train)]
        for share in shares:
            yield features[share.to(features.device)], self.task.labels(share)

    @torch.inference_mode()
    def test(self) -> tuple[float, float]:
        """Mean loss (nats) and accuracy (fraction) on the test images; every process evaluates all of them."""
        assert self.task.test.labels is not None
        labels = self.task.test.labels.cpu().long()
        with autocast(self.task.device, self.task.precision):
            logits = self.task.model.module(self.images).float().cpu()
        return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()


@torch.no_grad()
def read_features(model: Model, images: Images, *, precision: str = "fp32") -> HeadInputs:
    """The classifiers' inputs for these images: fp32, on the model's device.

    Raises UnsupportedError where the classifiers, run on them, do not give the model's logits.
    """
    names, inputs = classifiers(model), list[Tensor]()

    def before(_name: str, arguments: Arguments) -> None:
        inputs.append(arguments[0])

    with evaluating(model), autocast(model.device, precision):
        with watching(model.module, names, before=before):
            logits = model(images).float()
        if any(part.ndim != 2 for part in inputs) or len(inputs) != len(names):
            shapes = ", ".join(str(tuple(part.shape)) for part in inputs) or "nothing"
            raise UnsupportedError(
                f"expected a head of {model.alias} that reads one vector per image, found {shapes}; {_LAST}"
            )
        features = torch.stack([part.float() for part in inputs], 1)
        alone = HeadOnly(model)(features).float()
    if not torch.allclose(alone, logits, rtol=_TOLERANCE if precision == "fp32" else 0.05, atol=_TOLERANCE):
        raise UnsupportedError(
            f"expected the head of {model.alias} to be its last step, found logits that differ by "
            f"{(alone - logits).abs().max():.2g}; {_LAST}"
        )
    return features


def cached_features(
    model: Model, task: Task, part: str, precision: str, advance: Callable[[int], object], *, views: int = 1
) -> Cached:
    """The head's inputs for every image of "train" or "test", on the CPU; each process computes its share.

    Several views are augmented as the first epochs of a training without a cache would augment them. A killed run has
    written them into its folder, with their identity: from there they are read. advance: called with the number of
    images just done, each view counted.
    """
    split, processes = task.train if part == "train" else task.test, task.processes
    file = task.directory / FOLDER / f"{part}.safetensors"
    about = json.dumps({"part": part, "precision": precision, **task.identity()}, sort_keys=True)
    written: Cached | None = None
    with suppress(OSError, SafetensorError), safe_open(str(file), framework="pt") as stored:
        written = stored.get_tensor("features") if (stored.metadata() or {}).get("about") == about else None
    if written is not None:
        heads: Any = task.model.module.heads
        form = (views, len(split), len(heads), getattr(heads[0], "in_features", 0))
        if written.shape != form or written.dtype != torch.float32 or not written.isfinite().all():
            written = None  # damaged
    in_all_processes = processes.total(torch.tensor(float(written is not None))) == processes.count
    if written is not None and in_all_processes:
        return written
    batches = torch.arange(processes.index, len(split), processes.count).split(fitting_batch_size(model))
    by_view = []
    for view in range(views):
        found = []
        source = split.source if views == 1 else task.source(view)
        for portion in portions(source, batches, pin=task.device.type == "cuda"):
            plain = portion.pixels.to(task.device, non_blocking=True).float().div_(255) if views == 1 else None
            images = task.augmented(portion, view) if plain is None else plain
            found.append(read_features(model, images, precision=precision).cpu())
            advance(len(images))
        by_view.append(processes.gathered(torch.cat(found)))
    features: Cached = torch.stack(by_view)
    if processes.is_first:
        write_bytes(file, save({"features": features}, metadata={"about": about}))
    return features
