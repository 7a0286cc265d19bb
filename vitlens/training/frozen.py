"""The input of a frozen model's head for each image, computed once and cached for training the head."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.devices import autocast, evaluating
from vitlens.errors import UnsupportedError
from vitlens.files import write_bytes
from vitlens.models.hooks import Arguments, watching
from vitlens.models.model import Anatomy, Model
from vitlens.models.rebuilt import classifiers
from vitlens.processes import Processes
from vitlens.shapes import Images, Logits
from vitlens.training.feed import portions
from vitlens.training.task import Task

FOLDER = "features"
_TOLERANCE = 1e-3  # of logits: rounding; a head that is not the last step differs by far more

HeadInputs = Float[Tensor, "batch heads dim"]  # of each classifier: one, or the two of a distilled model
Cached = Float[Tensor, "views images heads dim"]
CachedTest = Float[Tensor, "1 test_images heads dim"]


class HeadOnly(nn.Module):
    """A model's classifiers, sharing their parameters with it: their inputs -> logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = nn.ModuleList([model.module.get_submodule(name) for name in classifiers(model)])

    def forward(self, features: HeadInputs) -> Logits:
        """Logits (batch, classes); of a distilled model, the mean of its two heads."""
        return torch.stack([head(features[:, index]) for index, head in enumerate(self.heads)]).mean(0)


def head_alone(model: Model) -> Model:
    """A model whose network is the head of this one, sharing its parameters; it is run on features, not on images."""
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
def read_features(model: Model, images: Images, *, precision: str = "fp32") -> HeadInputs:
    """The classifiers' inputs for these images: fp32, on the model's device.

    Raises UnsupportedError where the classifiers, run on them, do not give the model's logits.
    """
    with _classifier_inputs(model) as inputs, evaluating(model), autocast(model.device, precision):
        logits = model(images).float()
    if any(part.ndim != 2 for part in inputs) or len(inputs) != len(classifiers(model)):
        shapes = ", ".join(str(tuple(part.shape)) for part in inputs) or "nothing"
        raise UnsupportedError(
            f"expected a head of {model.alias} that reads one vector per image, found {shapes}; train it with "
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
    images_of: Callable[[int, Sequence[Tensor]], Iterator[Images]],
    processes: Processes,
    *,
    views: int = 1,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Cached:
    """The head's inputs for every image in each of its views, on the CPU; each process computes its share.

    images_of: (view, batches of indices) -> their images in [0, 1] on the model's device, batch by batch; batch_size:
    images at a time (None: chosen to fit); advance: called with the number of images just done, each view counted.
    """
    indices = torch.arange(processes.index, count, processes.count)
    batches = indices.split(batch_size or fitting_batch_size(model))
    by_view = []
    for view in range(views):
        parts = []
        for images in images_of(view, batches):
            parts.append(read_features(model, images, precision=precision).cpu())
            advance(len(images))
        by_view.append(processes.gathered(torch.cat(parts)))
    return torch.stack(by_view)


def save_features(folder: Path, name: str, features: Cached, about: Mapping[str, object]) -> None:
    """Write features and their identity into a run's folder, so that a killed run need not compute them again."""
    write_bytes(_file(folder, name), save({"features": features}, metadata={"about": _identity(about)}))


def load_features(folder: Path, name: str, about: Mapping[str, object]) -> Cached | None:
    """The features that a run wrote, or None where there are none with this identity."""
    with suppress(OSError, SafetensorError), safe_open(str(_file(folder, name)), framework="pt") as file:
        if (file.metadata() or {}).get("about") == _identity(about):
            features: Tensor = file.get_tensor("features")
            return features
    return None


def delete_features(folder: Path) -> None:
    """Delete the written features, once the run is complete."""
    for file in (folder / FOLDER).glob("*.safetensors"):
        file.unlink()
    with suppress(OSError):
        (folder / FOLDER).rmdir()


class FrozenFeatures:
    """The features of both parts of the data: computed, or read from the folder of a killed run.

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
        """The features of "train" (in all its views) or of "test"."""
        task, processes = self.task, self.processes
        about = {"part": part, "precision": self.precision, **task.identity()}
        saved = load_features(task.directory, part, about)
        in_all_processes = processes.total(torch.tensor(float(saved is not None))) == processes.count
        if saved is not None and in_all_processes and self._fits(saved, part):
            return saved
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

    def _fits(self, features: Tensor, part: str) -> bool:
        """Whether features have the expected shape, (views, images, heads, dim), and are finite."""
        task, heads = self.task, list(self.task.model.module.modules())
        widths = {module.in_features for module in heads if isinstance(module, nn.Linear)}
        count = len(task.train if part == "train" else task.test)
        views = self.views if part == "train" else 1
        alike = features.ndim == 4 and features.dtype == torch.float32 and features.shape[:2] == (views, count)
        return alike and {features.shape[3]} == widths and bool(features.isfinite().all())

    def _plain(self, part: str, batches: Sequence[Tensor]) -> Iterator[Images]:
        source = (self.task.train if part == "train" else self.task.test).source
        for portion in portions(source, batches, pin=self.task.device.type == "cuda"):
            yield portion.pixels.to(self.task.device, non_blocking=True).float().div_(255)

    def _augmented(self, view: int, batches: Sequence[Tensor]) -> Iterator[Images]:
        """The images as epoch `view` of a training without a cache would augment them."""
        for portion in portions(self.task.source(view), batches, pin=self.task.device.type == "cuda"):
            yield self.task.augmented(portion, view)


@contextmanager
def _classifier_inputs(model: Model) -> Iterator[list[Tensor]]:
    """The inputs of the classifiers while the context lasts, in the order of their calls."""
    inputs: list[Tensor] = []

    def before(_name: str, arguments: Arguments) -> None:
        inputs.append(arguments[0])

    with watching(model.module, classifiers(model), before=before):
        yield inputs


def _file(folder: Path, name: str) -> Path:
    return folder / FOLDER / f"{name}.safetensors"


def _identity(about: Mapping[str, object]) -> str:
    return json.dumps(about, sort_keys=True)
