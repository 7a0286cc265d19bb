"""What a frozen model's head reads of each image, computed once; training the head on it takes seconds an epoch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.devices import autocast, evaluating
from vitlens.errors import UnsupportedError
from vitlens.files import write_bytes
from vitlens.lens.hooks import Arguments, watching
from vitlens.models.model import Anatomy, Model
from vitlens.models.new_head import classifiers
from vitlens.processes import Processes
from vitlens.shapes import Images, Logits
from vitlens.training.feed import portions
from vitlens.training.task import Task

FOLDER = "features"
_TOLERANCE = 1e-3  # of logits: another order of the same sums; a head that is not the last step is far off

Read = Float[Tensor, "batch heads dim"]  # what each classifier reads; one head, or two of a distilled model
Cached = Float[Tensor, "views images heads dim"]
CachedTest = Float[Tensor, "1 test_images heads dim"]


class HeadOnly(nn.Module):
    """A model's classifiers alone, sharing their parameters with it: what they read -> logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = nn.ModuleList([model.module.get_submodule(name) for name in classifiers(model.module)])

    def forward(self, features: Read) -> Logits:
        """Logits (batch, classes); of a distilled model, the mean of its two heads."""
        return torch.stack([head(features[:, place]) for place, head in enumerate(self.heads)]).mean(0)


class FromFeatures:
    """The objective of a head on cached features: cross-entropy with the labels; "images" are what the head reads."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        self.facts = facts  # which backbone, how many views

    def module(self, model: Model) -> nn.Module:
        """The head of a model that is nothing else (see head_alone)."""
        return model.module

    def logits(self, outputs: Logits) -> Logits:
        """The outputs."""
        return outputs

    def loss(self, outputs: Logits, targets: Tensor, images: Read, *, smoothing: float) -> Tensor:  # noqa: ARG002
        """Cross-entropy in nats, summed over the images."""
        return F.cross_entropy(outputs.float(), targets, label_smoothing=smoothing, reduction="sum")

    def identity(self) -> Mapping[str, object]:
        """The backbone that does not change."""
        return {"frozen": self.facts}


def head_alone(model: Model) -> Model:
    """A model whose network is the head of this one, sharing its parameters: to be run on features, not on images."""
    return Model(
        HeadOnly(model),
        alias=model.alias,
        anatomy=Anatomy("other", ()),
        preprocessing=model.preprocessing,
        classes=model.classes,
        provenance=model.provenance,
        architecture=model.architecture,
    )


@torch.no_grad()
def read_features(model: Model, images: Images, *, precision: str = "fp32") -> Read:
    """What the classifiers read of these images: fp32, on the model's device.

    Raises UnsupportedError where the classifiers alone do not give the model's logits.
    """
    with _classifier_inputs(model) as inputs, evaluating(model), autocast(model.device, precision):
        logits = model(images).float()
    if any(part.ndim != 2 for part in inputs) or len(inputs) != len(classifiers(model.module)):
        shapes = ", ".join(str(tuple(part.shape)) for part in inputs) or "nothing"
        raise UnsupportedError(
            f"expected a head of {model.alias} that reads one vector an image, found {shapes}; train it with "
            "--train-last 1 in place of --freeze-backbone"
        )
    features = torch.stack([part.float() for part in inputs], 1)
    with evaluating(model), autocast(model.device, precision):
        alone = HeadOnly(model)(features).float()
    if not torch.allclose(alone, logits, rtol=_TOLERANCE if precision == "fp32" else 0.05, atol=_TOLERANCE):
        raise UnsupportedError(
            f"expected the head of {model.alias} to be its last step, found logits that differ by "
            f"{(alone - logits).abs().max():.2g}; train it with --train-last 1 in place of --freeze-backbone"
        )
    return features


def cached_features(
    model: Model,
    count: int,
    shown: Callable[[int, Sequence[Tensor]], Iterator[Images]],
    processes: Processes,
    *,
    views: int = 1,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Cached:
    """What the head reads of every image in each of its views, on the CPU; each process computes its share.

    shown: (view, batches of indices) -> their images in [0, 1] on the model's device, one batch after another;
    batch_size: images at a time (None: chosen to fit); advance: called with the number of images just done, each
    view counted.
    """
    mine = torch.arange(processes.index, count, processes.count)
    batches = mine.split(batch_size or fitting_batch_size(model))
    gathered = []
    for view in range(views):
        parts = []
        for images in shown(view, batches):
            parts.append(read_features(model, images, precision=precision).cpu())
            advance(len(images))
        gathered.append(processes.gathered(torch.cat(parts)))
    return torch.stack(gathered)


def save_features(folder: Path, name: str, features: Cached, about: Mapping[str, object]) -> None:
    """Write features and what identifies them into a run's folder, so that a killed run need not compute them again."""
    write_bytes(_file(folder, name), save({"features": features}, metadata={"about": _identity(about)}))


def load_features(folder: Path, name: str, about: Mapping[str, object]) -> Cached | None:
    """The features that a run wrote, or None where there are none, or none of just this."""
    with suppress(OSError, SafetensorError), safe_open(str(_file(folder, name)), framework="pt") as file:
        if (file.metadata() or {}).get("about") == _identity(about):
            kept: Tensor = file.get_tensor("features")
            return kept
    return None


def delete_features(folder: Path) -> None:
    """Delete the written features, when the run is complete."""
    for file in (folder / FOLDER).glob("*.safetensors"):
        file.unlink()
    with suppress(OSError):
        (folder / FOLDER).rmdir()


class FrozenFeatures:
    """The features of both parts of the data: computed, or read where a killed run had written them.

    views: of each training image; advance: called with the number of images just read.
    """

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
        kept = load_features(task.directory, part, about)
        everywhere = processes.total(torch.tensor(float(kept is not None))) == processes.count
        if kept is not None and everywhere and self._fits(kept, part):
            return kept
        features = cached_features(
            self.model,
            len(task.train if part == "train" else task.test),
            self._augmented if part == "train" and self.views > 1 else lambda _, batches: self._plain(part, batches),
            processes,
            views=self.views if part == "train" else 1,
            precision=self.precision,
            advance=self.advance,
        )
        if processes.is_first:
            save_features(task.directory, part, features, about)
        return features

    def _fits(self, kept: Tensor, part: str) -> bool:
        """Whether a file's features have the shape of these, (views, images, heads, dim), and are finite."""
        task, heads = self.task, list(self.task.model.module.modules())
        widths = {module.in_features for module in heads if isinstance(module, nn.Linear)}
        count = len(task.train if part == "train" else task.test)
        views = self.views if part == "train" else 1
        alike = kept.ndim == 4 and kept.dtype == torch.float32 and kept.shape[:2] == (views, count)
        return alike and {kept.shape[3]} == widths and bool(kept.isfinite().all())

    def _plain(self, part: str, batches: Sequence[Tensor]) -> Iterator[Images]:
        source = (self.task.train if part == "train" else self.task.test).source
        for portion in portions(source, batches, pin=self.task.device.type == "cuda"):
            yield portion.pixels.to(self.task.device, non_blocking=True).float().div_(255)

    def _augmented(self, view: int, batches: Sequence[Tensor]) -> Iterator[Images]:
        """The images of epoch `view` in a training without a cache."""
        for portion in portions(self.task.source(view), batches, pin=self.task.device.type == "cuda"):
            yield self.task.augmented(portion, view)


@contextmanager
def _classifier_inputs(model: Model) -> Iterator[list[Tensor]]:
    """What each classifier is given while the context lasts, in the order of their calls."""
    inputs: list[Tensor] = []

    def before(_name: str, arguments: Arguments) -> None:
        inputs.append(arguments[0])

    with watching(model.module, classifiers(model.module), before=before):
        yield inputs


def _file(folder: Path, name: str) -> Path:
    return folder / FOLDER / f"{name}.safetensors"


def _identity(about: Mapping[str, object]) -> str:
    return json.dumps(about, sort_keys=True)
