"""What a training minimises: the cross-entropy with the labels and, in a distillation (Touvron
2021, DeiT), the distance from a teacher's logits on the same pixels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.classes import match_classes
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import (
    InputError,
    NonFiniteError,
    UnknownNameError,
    UnsupportedError,
    argument,
    by_caller,
)
from vitlens.models.model import Model
from vitlens.models.saved import fingerprint
from vitlens.names import DISTILL_KINDS
from vitlens.shapes import Images, Logits
from vitlens.training.feed import portions
from vitlens.training.recipe import Recipe

# Touvron 2021: eq. 3 halves the two terms; for the soft form section 5 takes tau = 3 and lambda =
# 0.1
WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({"soft": 0.1, "hard": 0.5})
TEMPERATURE: Final = 3.0
MAX_CACHED_LOGITS: Final = 100_000_000  # numbers: 400 MB
_AUGMENTATIONS = (
    "crop_padding",
    "randaugment",
    "erasing",
    "mixup",
    "cutmix",
)  # each makes every view different


@dataclass(frozen=True)
class Distillation:
    """How a student learns from a teacher; raises InputError for invalid settings.

    kind: "soft" or "hard"; weight: the teacher's share of the loss; temperature: of the soft form;
    token: whether a separate token and head learn from the teacher (the other head then learns only
    from the labels).
    """

    kind: str = "hard"
    weight: float = WEIGHTS["hard"]
    temperature: float = TEMPERATURE
    token: bool = True

    def __post_init__(self) -> None:
        if self.kind not in DISTILL_KINDS:
            raise UnknownNameError(
                by_caller(python="kind of distillation", command="--distill value"),
                self.kind,
                DISTILL_KINDS,
            )
        if not 0 < self.weight <= 1:
            raise InputError(
                f"expected {argument('weight', flag='distill-weight')} above 0 and at most 1, "
                f"found {self.weight}"
            )
        if not 0 < self.temperature < float("inf"):
            raise InputError(
                f"expected {argument('temperature')} above 0, found {self.temperature}"
            )

    def loss(self, student: Logits, teacher: Logits) -> Float[Tensor, " batch"]:
        """Return each image's distance of the student's prediction from the teacher's, in nats.

        soft: KL(softmax(teacher / temperature) || softmax(student / temperature)) x temperature^2
        (Hinton 2015; Touvron 2021, eq. 2, second term); hard: cross-entropy with the teacher's
        prediction (eq. 3, second term).
        """
        if self.kind == "hard":
            return F.cross_entropy(student, teacher.argmax(-1), reduction="none")
        target, predicted = (
            (logits / self.temperature).log_softmax(-1) for logits in (teacher, student)
        )
        return self.temperature**2 * (target.exp() * (target - predicted)).sum(-1)


@runtime_checkable
class Objective(Protocol):
    """The objective of a training: the module that is run, and the loss of its output."""

    def module(self, model: Model) -> nn.Module:
        """Return the module that is run (wrapped for several processes): images -> outputs."""
        ...

    def logits(self, outputs: Any) -> Tensor | None:
        """Return the logits (batch, classes), for the accuracy; None where no classes are
        predicted.
        """
        ...

    def loss(self, outputs: Any, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:
        """Loss summed over the images; targets: labels (batch,) or shares of the classes (batch,
        classes).
        """
        ...

    def identity(self) -> Mapping[str, object]:
        """Return what must be the same in a resumed run, besides model, data and recipe."""
        ...


@dataclass(frozen=True)
class StandardObjective:
    """The cross-entropy with the labels, and a teacher's share of the loss where there is one.

    teacher: images -> logits, of the same augmented (and mixed) images, None: the labels alone;
    how: it is learned from; about: what must be the same in a resumed run, besides model, data and
    recipe.
    """

    teacher: Callable[[Images], Logits] | None = None
    how: Distillation = field(default_factory=Distillation)
    about: Mapping[str, object] = field(default_factory=dict)

    def module(self, model: Model) -> nn.Module:
        """Return the model, or the student with both outputs."""
        return model if self.teacher is None else Student(model, token=self.how.token)

    def logits(self, outputs: Any) -> Logits:
        """Return the outputs; of two heads their mean, as in the model itself."""
        return outputs if self.teacher is None else torch.stack(outputs).mean(0)

    def loss(self, outputs: Any, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:
        """(1 - weight) x label loss + weight x distillation loss, in nats; the teacher's logits are
        not smoothed.
        """
        if self.teacher is None:
            return F.cross_entropy(
                outputs.float(), targets, label_smoothing=smoothing, reduction="sum"
            )
        for_labels, for_teacher = (logits.float() for logits in outputs)
        labelled = F.cross_entropy(for_labels, targets, label_smoothing=smoothing, reduction="none")
        taught = self.how.loss(for_teacher, self.teacher(images))
        return ((1 - self.how.weight) * labelled + self.how.weight * taught).sum()

    def identity(self) -> Mapping[str, object]:
        """Return what it was told."""
        return self.about


class Student(nn.Module):
    """A model with two outputs: logits that learn from the labels, and logits that learn from the
    teacher.

    token: use the two heads of a distilled ViT; else the same logits twice. Raises UnsupportedError
    where the model has no distillation token.
    """

    def __init__(self, model: Model, *, token: bool) -> None:
        super().__init__()
        if token and not has_distillation_token(model):
            raise UnsupportedError(
                f"expected a model with a distillation token, found {model.alias} without; add "
                f"{by_caller(python='token=False', command='--no-distill-token')}"
            )
        self.model = model
        self.token = token

    def forward(self, images: Images) -> tuple[Logits, Logits]:
        """Logits for the labels and logits for the teacher; images (batch, 3, height, width) in [0,
        1].
        """
        if not self.token:
            logits = self.model(images)
            return logits, logits
        model: Any = self.model.module  # ours, or timm's
        features = model.forward_features(
            self.model.prepare(images)
        )  # CLS first, then the distillation token
        return model.head(features[:, 0]), model.head_dist(features[:, 1])


def has_distillation_token(model: Model) -> bool:
    """Return True if the model is a ViT with a distillation token and its head."""
    layout = model.anatomy.layout
    return (
        layout is not None
        and "distillation" in layout.prefix
        and hasattr(model.module, "head_dist")
    )


class Teacher:
    """A trained model's logits for a student's images, in the order of the data's classes; images
    are resized.

    Those of images that it was told to remember come from memory. classes: the data's; precision:
    "fp32" or "bf16". Raises InputError when the model has other classes.
    """

    def __init__(self, model: Model, *, classes: Sequence[str], precision: str = "fp32") -> None:
        model.require_classifier()
        self.model = model
        self.precision = precision
        try:
            self.columns, union = match_classes(model.classes, classes)
        except InputError as error:
            raise InputError(
                f"the teacher {model.alias} has other classes than the data: {error}"
            ) from error
        extra = union[len(classes) :]
        if extra:
            named = ", ".join(map(repr, extra[:5])) + (
                f" and {len(extra) - 5} more" if len(extra) > 5 else ""
            )
            raise InputError(
                f"expected a teacher of the data's {len(classes)} classes, found {model.alias} "
                f"with {len(union)}; only in the teacher: {named}; train one on this data first: "
                f"vitlens train {model.alias} --data DATA"
            )
        self._multipliers = torch.zeros(0, dtype=torch.int64)  # of the hash
        self._hashes = torch.zeros(0, dtype=torch.int64)  # of the remembered images, sorted
        self._logits = torch.zeros(0, 0)

    def __call__(self, images: Images) -> Logits:
        """Logits (batch, classes) in fp32. Raises NonFiniteError for a NaN or an infinity."""
        if not len(self._hashes):
            return self._run(images)
        hashes = self._hash(images)
        index = torch.searchsorted(self._hashes, hashes).clamp_max(len(self._hashes) - 1)
        logits = self._logits[index]
        new = self._hashes[index] != hashes
        if new.any():
            logits[new] = self._run(images[new])
        return logits

    @torch.no_grad()
    def _run(self, images: Images) -> Logits:
        with evaluating(self.model), autocast(images.device, self.precision):
            logits: Tensor = self.model(images).float()[:, self.columns]
        if not logits.isfinite().all():
            raise NonFiniteError(
                f"expected finite logits from the teacher {self.model.alias}, found NaN or "
                "infinity; "
                f"check its weights, or run with {argument('precision', 'fp32')}"
            )
        return logits

    def remember(
        self, split: Split, *, mirrored: bool, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        """Compute the logits of every image and, where mirrored, of its mirror image, in a fixed
        order.

        advance: called with the number of images just done.
        """
        hashes = []
        logits = []
        device = self.model.device
        batches = torch.arange(len(split)).split(fitting_batch_size(self.model))
        for pixels, _ in portions(split.source, batches, pin=device.type == "cuda"):
            images = pixels.to(device, non_blocking=True).float().div_(255)
            for view in (images, images.flip(-1))[: 1 + mirrored]:
                hashes.append(self._hash(view))
                logits.append(self._run(view))
                advance(len(view))
        order = torch.cat(hashes).argsort()
        self._hashes = torch.cat(hashes)[order]
        self._logits = torch.cat(logits)[order]

    def _hash(self, images: Images) -> Int[Tensor, " batch"]:
        """Return the bits of each image times fixed random numbers, summed modulo 2^64 (multilinear
        hashing).
        """
        bits = images.contiguous().view(torch.int32).flatten(1)
        if len(self._multipliers) != bits.shape[1] or self._multipliers.device != bits.device:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(-(2**63), 2**63 - 1, (bits.shape[1],), generator=generator)
            self._multipliers = drawn.to(bits.device)
        return (bits.long() * self._multipliers).sum(1)

    def identity(self) -> dict[str, object]:
        """Return what determines its logits."""
        architecture = self.model.architecture
        size = list(self.model.input_size)
        return {
            "architecture": architecture,
            "input": size,
            "sha256": fingerprint(self.model.module),
        }


def cacheable_views(recipe: Recipe, split: Split) -> int:
    """Return the number of views of each image whose logits are worth caching: 1, 2 with mirroring,
    0 for no caching.

    Caching is worthwhile when no augmentation but mirroring is used, the data is not rendered anew,
    and each view occurs more than once.
    """
    views = 1 + recipe.flip
    augmented = (
        any(getattr(recipe, name) for name in _AUGMENTATIONS)
        or split.epoch(1).source is not split.source
    )
    fits = views * len(split) * len(split.classes) <= MAX_CACHED_LOGITS
    return views if not augmented and recipe.epochs > views and fits else 0
