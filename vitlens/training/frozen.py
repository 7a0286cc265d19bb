"""What a frozen model's head reads of each image, computed once: training the head on it costs seconds an epoch."""

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
from vitlens.models.model import Anatomy, Model
from vitlens.models.new_head import classifiers
from vitlens.processes import Processes
from vitlens.shapes import Images, Logits

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

    def asked(self, model: Model) -> nn.Module:
        """The head of a model that is nothing else (see head_alone)."""
        return model.module

    def logits(self, answers: Logits) -> Logits:
        """The answers."""
        return answers

    def loss(self, answers: Logits, targets: Tensor, images: Read, *, smoothing: float) -> Tensor:  # noqa: ARG002
        """Cross-entropy in nats, summed over the images."""
        return F.cross_entropy(answers.float(), targets, label_smoothing=smoothing, reduction="sum")

    def identity(self) -> Mapping[str, object]:
        """The backbone that does not change."""
        return {"frozen": self.facts}


def head_alone(model: Model) -> Model:
    """A model whose model is the head of this one, sharing its parameters: to be run on features, not on images."""
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
    with _listening(model) as heard, evaluating(model), autocast(model.device, precision):
        logits = model(images).float()
    if any(part.ndim != 2 for part in heard) or len(heard) != len(classifiers(model.module)):
        shapes = ", ".join(str(tuple(part.shape)) for part in heard) or "nothing"
        raise UnsupportedError(
            f"expected a head of {model.alias} that reads one vector an image, found {shapes}; train it with "
            "--train-last 1 in place of --freeze-backbone"
        )
    features = torch.stack([part.float() for part in heard], 1)
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
    batch_size: images at a time (None: chosen to fit); advance: told the number of images just done, each view counted.
    """
    mine = torch.arange(processes.index, count, processes.count)
    batches = mine.split(batch_size or fitting_batch_size(model))
    found = []
    for view in range(views):
        parts = []
        for images in shown(view, batches):
            parts.append(read_features(model, images, precision=precision).cpu())
            advance(len(images))
        found.append(processes.gathered(torch.cat(parts)))
    return torch.stack(found)


def keep_features(folder: Path, name: str, features: Cached, about: Mapping[str, object]) -> None:
    """Write features into a run's folder, with what they are of, so that a killed run need not compute them again."""
    write_bytes(_file(folder, name), save({"features": features}, metadata={"about": _said(about)}))


def recall_features(folder: Path, name: str, about: Mapping[str, object]) -> Cached | None:
    """The features that a run wrote, or None where there are none, or none of just this."""
    with suppress(OSError, SafetensorError), safe_open(str(_file(folder, name)), framework="pt") as file:
        if (file.metadata() or {}).get("about") == _said(about):
            kept: Tensor = file.get_tensor("features")
            return kept
    return None


def forget_features(folder: Path) -> None:
    """Take the written features away: the run is through."""
    for file in (folder / FOLDER).glob("*.safetensors"):
        file.unlink()
    with suppress(OSError):
        (folder / FOLDER).rmdir()


@contextmanager
def _listening(model: Model) -> Iterator[list[Tensor]]:
    """What each classifier is given while the block runs, in the classifiers' order."""
    heard: list[Tensor] = []

    def hear(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        heard.append(inputs[0])

    heads = [model.module.get_submodule(name) for name in classifiers(model.module)]
    handles = [head.register_forward_pre_hook(hear) for head in heads]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _file(folder: Path, name: str) -> Path:
    return folder / FOLDER / f"{name}.safetensors"


def _said(about: Mapping[str, object]) -> str:
    return json.dumps(about, sort_keys=True)
