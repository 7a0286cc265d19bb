"""Distillation (Touvron 2021, DeiT): a student learns from labels and from a teacher's logits on the same pixels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.evaluation.classes import match_classes
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.saved import fingerprint
from vitlens.names import DISTILL_KINDS
from vitlens.shapes import Images, Logits
from vitlens.training.feed import portions
from vitlens.training.recipe import Recipe

PerImage = Float[Tensor, " batch"]
Loss = Callable[..., PerImage]  # (*, student, teacher, temperature) -> nats


def soft(*, student: Logits, teacher: Logits, temperature: float) -> PerImage:
    """KL divergence of the student's softened prediction from the teacher's, times temperature^2, in nats.

    KL(softmax(teacher / temperature) || softmax(student / temperature)): Hinton 2015; Touvron 2021, eq. 2, second term.
    """
    target, predicted = ((logits / temperature).log_softmax(-1) for logits in (teacher, student))
    return temperature**2 * (target.exp() * (target - predicted)).sum(-1)


def hard(*, student: Logits, teacher: Logits, temperature: float = 1.0) -> PerImage:  # noqa: ARG001  unused
    """Cross-entropy with the teacher's prediction as the label, in nats: Touvron 2021, eq. 3, second term."""
    return F.cross_entropy(student, teacher.argmax(-1), reduction="none")


LOSSES: Final[Mapping[str, Loss]] = MappingProxyType({"soft": soft, "hard": hard})
# Touvron 2021: eq. 3 halves the two terms; for the soft form section 5 takes tau = 3 and lambda = 0.1
WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({"soft": 0.1, "hard": 0.5})
TEMPERATURE: Final = 3.0


@dataclass(frozen=True)
class Distillation:
    """How a student learns from a teacher; raises InputError for invalid settings.

    kind: "soft" or "hard"; weight: the teacher's share of the loss; temperature: of the soft form; token: whether a
    separate token and head learn from the teacher (the other head then learns only from the labels).
    """

    kind: str = "hard"
    weight: float = WEIGHTS["hard"]
    temperature: float = TEMPERATURE
    token: bool = True

    def __post_init__(self) -> None:
        if self.kind not in LOSSES:
            raise UnknownNameError("--distill value", self.kind, DISTILL_KINDS)
        if not 0 < self.weight <= 1:
            raise InputError(f"expected --distill-weight above 0 and at most 1, found {self.weight}")
        if not 0 < self.temperature < float("inf"):
            raise InputError(f"expected --temperature above 0, found {self.temperature}")


class Student(nn.Module):
    """A model with two outputs: logits that learn from the labels, and logits that learn from the teacher.

    token: use the two heads of a distilled ViT; else the same logits twice. Raises UnsupportedError where the model has
    no distillation token.
    """

    def __init__(self, model: Model, *, token: bool) -> None:
        super().__init__()
        if token and not has_distillation_token(model):
            raise UnsupportedError(
                f"expected a model with a distillation token, found {model.alias} without; add --no-distill-token"
            )
        self.model, self.token = model, token

    def forward(self, images: Images) -> tuple[Logits, Logits]:
        """Logits for the labels and logits for the teacher; images (batch, 3, height, width) in [0, 1]."""
        if not self.token:
            logits = self.model(images)
            return logits, logits
        model: Any = self.model.module  # ours, or timm's
        features = model.forward_features(self.model.prepare(images))  # CLS first, then the distillation token
        return model.head(features[:, 0]), model.head_dist(features[:, 1])


def has_distillation_token(model: Model) -> bool:
    """Whether the model is a ViT with a distillation token and its head."""
    layout = model.anatomy.layout
    return layout is not None and "distillation" in layout.prefix and hasattr(model.module, "head_dist")


class DistillationObjective:
    """The objective of a distillation: labels and a teacher, which sees the same augmented (and mixed) images."""

    def __init__(self, teacher: Callable[[Images], Logits], how: Distillation, *, identity: Mapping[str, object]):
        self.teacher, self.how, self._identity = teacher, how, identity

    def module(self, model: Model) -> nn.Module:
        """The student with both outputs."""
        return Student(model, token=self.how.token)

    def logits(self, outputs: tuple[Logits, Logits]) -> Logits:
        """The mean of both heads, as in the model itself."""
        return torch.stack(outputs).mean(0)

    def loss(self, outputs: tuple[Logits, Logits], targets: Tensor, images: Images, *, smoothing: float) -> Tensor:
        """(1 - weight) x label loss + weight x distillation loss, summed over the images, in nats.

        The labels are smoothed, the teacher's logits are not.
        """
        (for_labels, for_teacher), how = (logits.float() for logits in outputs), self.how
        labelled = F.cross_entropy(for_labels, targets, label_smoothing=smoothing, reduction="none")
        taught = LOSSES[how.kind](student=for_teacher, teacher=self.teacher(images), temperature=how.temperature)
        return ((1 - how.weight) * labelled + how.weight * taught).sum()

    def identity(self) -> Mapping[str, object]:
        """The teacher, and the settings of the loss."""
        return {"distillation": self._identity}


class Teacher:
    """A trained model's logits for a student's images, in the order of the data's classes; images are resized.

    classes: the data's; precision: "fp32" or "bf16". Raises InputError when the model has other classes.
    """

    def __init__(self, model: Model, *, classes: Sequence[str], precision: str = "fp32") -> None:
        model.require_classifier()
        self.model, self.precision = model, precision
        try:
            self.columns, union = match_classes(model.classes, classes)
        except InputError as error:
            raise InputError(f"the teacher {model.alias} has other classes than the data: {error}") from error
        extra = union[len(classes) :]
        if extra:
            named = ", ".join(map(repr, extra[:5])) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            raise InputError(
                f"expected a teacher of the data's {len(classes)} classes, found {model.alias} with {len(union)}; only "
                f"in the teacher: {named}; train one on this data first: vitlens train {model.alias} --data DATA"
            )

    @torch.no_grad()
    def __call__(self, images: Images) -> Logits:
        """Logits (batch, classes) in fp32. Raises NonFiniteError for a NaN or an infinity."""
        with evaluating(self.model), autocast(images.device, self.precision):
            logits: Tensor = self.model(images).float()[:, self.columns]
        if not logits.isfinite().all():
            raise NonFiniteError(
                f"expected finite logits from the teacher {self.model.alias}, found NaN or infinity; "
                "check its weights, or run with --precision fp32"
            )
        return logits

    def identity(self) -> dict[str, object]:
        """What determines its logits."""
        return {
            "architecture": self.model.architecture,
            "input": list(self.model.input_size),
            "sha256": fingerprint(self.model.module),
        }


MAX_CACHED_LOGITS: Final = 100_000_000  # numbers: 400 MB
_AUGMENTATIONS = ("crop_padding", "randaugment", "erasing", "mixup", "cutmix")  # each makes every view different


def cacheable_views(recipe: Recipe, split: Split) -> int:
    """The number of views of each image whose logits are worth caching: 1, 2 with mirroring, 0 for no caching.

    Caching is worthwhile when no augmentation but mirroring is used, the data is not rendered anew, and each view
    occurs more than once.
    """
    views = 1 + recipe.flip
    augmented = any(getattr(recipe, name) for name in _AUGMENTATIONS) or split.epoch(1).source is not split.source
    fits = views * len(split) * len(split.classes) <= MAX_CACHED_LOGITS
    return views if not augmented and recipe.epochs > views and fits else 0


class CachedTeacher:
    """A teacher's logits, from memory where they are cached.

    An image is identified by a 64-bit hash of all its bits; for an image that is not cached the teacher is run.
    """

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.computed = 0  # images on which the teacher was run since `remember`
        self._weights: Tensor | None = None
        self._hashes = torch.zeros(0, dtype=torch.int64)  # sorted
        self._logits = torch.zeros(0, 0)

    def remember(
        self, split: Split, *, mirrored: bool, device: torch.device, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        """Cache the logits of every image and, where mirrored, of its mirror image, in a fixed order."""
        hashes, logits = [], []
        batches = torch.arange(len(split)).split(fitting_batch_size(self.teacher.model))
        for portion in portions(split.source, batches, pin=device.type == "cuda"):
            images = portion.pixels.to(device, non_blocking=True).float().div_(255)
            for view in (images, images.flip(-1))[: 1 + mirrored]:
                hashes.append(self._hash(view))
                logits.append(self.teacher(view))
                advance(len(view))
        order = torch.cat(hashes).argsort()
        self._hashes, self._logits, self.computed = torch.cat(hashes)[order], torch.cat(logits)[order], 0

    def __call__(self, images: Images) -> Logits:
        """Logits (batch, classes) in fp32."""
        if not len(self._hashes):
            return self.teacher(images)
        hashes = self._hash(images)
        index = torch.searchsorted(self._hashes, hashes).clamp_max(len(self._hashes) - 1)
        logits, new = self._logits[index], self._hashes[index] != hashes
        if new.any():
            logits[new] = self.teacher(images[new])
            self.computed += int(new.sum())
        return logits

    def _hash(self, images: Images) -> Int[Tensor, " batch"]:
        """The bits of each image times fixed random numbers, summed modulo 2^64 (multilinear hashing)."""
        bits = images.contiguous().view(torch.int32).flatten(1)
        if self._weights is None or self._weights.shape[0] != bits.shape[1] or self._weights.device != bits.device:
            generator = torch.Generator().manual_seed(0)
            weights = torch.randint(-(2**63), 2**63 - 1, (bits.shape[1],), generator=generator)
            self._weights = weights.to(bits.device)
        return (bits.long() * self._weights).sum(1)
