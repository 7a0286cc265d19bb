"""The objective of a training: cross-entropy with the labels, and distillation from a teacher.

The distillation (DeiT, Touvron 2021) adds the distance from a teacher's logits on the same pixels.
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

# the teacher's share of the loss in Touvron 2021: eq. 3 (hard) gives both terms one half; section 5
# takes tau = 3 and lambda = 0.1 for the soft form
WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({"soft": 0.1, "hard": 0.5})
TEMPERATURE: Final = 3.0
MAX_CACHED_LOGITS: Final = 100_000_000  # numbers: 400 MB
# settings of the recipe that make every view different
_AUGMENTATIONS = ("crop_padding", "randaugment", "erasing", "mixup", "cutmix")
_MOST_LISTED: Final = 5  # classes in a message


@dataclass(frozen=True)
class Distillation:
    """Settings of the distillation of a student; raises InputError for invalid ones.

    kind: "soft" or "hard".
    weight: the teacher's share of the loss.
    temperature: the temperature of the soft form.
    token: whether a separate token and head learn from the teacher. The other head then learns only
        from the labels.
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

        - "soft": KL(softmax(teacher / temperature) || softmax(student / temperature))
          x temperature^2 (Hinton 2015; Touvron 2021, eq. 2, second term).
        - "hard": cross-entropy with the teacher's prediction (eq. 3, second term).
        """
        if self.kind == "hard":
            return F.cross_entropy(student, teacher.argmax(-1), reduction="none")
        target = (teacher / self.temperature).log_softmax(-1)
        predicted = (student / self.temperature).log_softmax(-1)
        return self.temperature**2 * (target.exp() * (target - predicted)).sum(-1)


@runtime_checkable
class Objective(Protocol):
    """The objective of a training: the module that is run, and the loss of its output."""

    def module(self, model: Model) -> nn.Module:
        """Return the module that is run (wrapped for several processes): images -> outputs."""
        ...

    def logits(self, outputs: Any) -> Tensor | None:
        """Return the logits (batch, classes), for the accuracy; None without classes."""
        ...

    def loss(self, outputs: Any, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:
        """Return the loss summed over the images.

        targets: labels (batch,) or shares of the classes (batch, classes).
        smoothing: the share of a target that is spread over all classes.
        """
        ...

    def identity(self) -> Mapping[str, object]:
        """Return further settings that must be the same in a resumed run.

        Model, data and recipe must be the same, too.
        """
        ...


@dataclass(frozen=True)
class StandardObjective:
    """The cross-entropy with the labels and, with a teacher, its share of the loss.

    teacher: a function from the augmented and mixed images to the teacher's logits. With None,
        there are only labels.
    how: the settings of the distillation.
    about: further settings that must be the same in a resumed run.
    """

    teacher: Callable[[Images], Logits] | None = None
    how: Distillation = field(default_factory=Distillation)
    about: Mapping[str, object] = field(default_factory=dict)

    def module(self, model: Model) -> nn.Module:
        """Return the model, or the student with both outputs."""
        if self.teacher is None:
            return model
        return Student(model, token=self.how.token)

    def logits(self, outputs: Any) -> Logits:
        """Return the outputs; of two heads their mean, as in the model itself."""
        logits: Logits = outputs
        if self.teacher is not None:
            logits = torch.stack(outputs).mean(0)
        return logits

    def loss(self, outputs: Any, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:
        """Return (1 - weight) x label loss + weight x distillation loss, in nats.

        The teacher's logits are not smoothed.
        """
        if self.teacher is None:
            return F.cross_entropy(
                outputs.float(), targets, label_smoothing=smoothing, reduction="sum"
            )
        for_labels, for_teacher = outputs
        label_loss = F.cross_entropy(
            for_labels.float(), targets, label_smoothing=smoothing, reduction="none"
        )
        distillation_loss = self.how.loss(for_teacher.float(), self.teacher(images))
        weight = self.how.weight
        return ((1 - weight) * label_loss + weight * distillation_loss).sum()

    def identity(self) -> Mapping[str, object]:
        """Return the settings that must be the same in a resumed run."""
        return self.about


class Student(nn.Module):
    """A model with two outputs: logits for the labels, and logits for the teacher.

    Raises UnsupportedError for a model without a distillation token.

    token: use the two heads of a distilled ViT. Otherwise, the same logits are returned twice.
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
        """Return logits for the labels and for the teacher.

        images: (batch, 3, height, width) in [0, 1].
        """
        if not self.token:
            logits = self.model(images)
            return logits, logits
        model: Any = self.model.module  # ours, or timm's
        # (batch, tokens, dim): CLS, the distillation token, then all others
        tokens = model.forward_features(self.model.prepare(images))
        return model.head(tokens[:, 0]), model.head_dist(tokens[:, 1])


def has_distillation_token(model: Model) -> bool:
    """Return True if the model is a ViT with a distillation token and its head."""
    layout = model.anatomy.layout
    if layout is None or "distillation" not in layout.prefix:
        return False
    return hasattr(model.module, "head_dist")


class Teacher:
    """A trained model that computes logits for a student's images, in the order of its classes.

    Images are resized to the teacher's size. The logits of remembered images are not computed
    again. Raises InputError for a model with other classes.

    classes: the classes of the data.
    precision: "fp32" or "bf16".
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
        extra = union[len(classes) :]  # the union begins with the classes of the data
        if extra:
            listed = ", ".join(map(repr, extra[:_MOST_LISTED]))
            if len(extra) > _MOST_LISTED:
                listed += f" and {len(extra) - _MOST_LISTED} more"
            raise InputError(
                f"expected a teacher of the data's {len(classes)} classes, found {model.alias} "
                f"with {len(union)}; only in the teacher: {listed}; train one on this data first: "
                f"vitlens train {model.alias} --data DATA"
            )
        self._multipliers = torch.zeros(0, dtype=torch.int64)  # the random numbers of the hash
        # the hashes of the remembered images, sorted, and their logits
        self._hashes = torch.zeros(0, dtype=torch.int64)
        self._logits = torch.zeros(0, 0)

    def __call__(self, images: Images) -> Logits:
        """Return logits (batch, classes) in fp32. Raises NonFiniteError for a NaN or infinity."""
        if not len(self._hashes):
            return self._run(images)
        hashes = self._hash(images)
        # the place of each image among the remembered ones, or of the next larger hash
        index = torch.searchsorted(self._hashes, hashes).clamp_max(len(self._hashes) - 1)
        logits = self._logits[index]
        # an equal hash: a remembered image; else a new one
        is_new = self._hashes[index] != hashes
        if is_new.any():
            logits[is_new] = self._run(images[is_new])
        return logits

    @torch.no_grad()
    def _run(self, images: Images) -> Logits:
        with evaluating(self.model), autocast(images.device, self.precision):
            logits: Tensor = self.model(images).float()[:, self.columns]
        if not logits.isfinite().all():
            raise NonFiniteError(
                f"expected finite logits from the teacher {self.model.alias}, found NaN or "
                f"infinity; check its weights, or run with {argument('precision', 'fp32')}"
            )
        return logits

    def remember(
        self, split: Split, *, mirrored: bool, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        """Compute and remember the logits of every image.

        mirrored: compute also the logits of every mirror image.
        advance: called with the number of images just done.
        """
        hashes = []
        logits = []
        device = self.model.device
        batches = torch.arange(len(split)).split(fitting_batch_size(self.model))
        for pixels, _ in portions(split.source, batches, pin=device.type == "cuda"):
            images = pixels.to(device, non_blocking=True).float().div_(255)
            views = [images]
            if mirrored:
                views.append(images.flip(-1))
            for view in views:
                hashes.append(self._hash(view))
                logits.append(self._run(view))
                advance(len(view))
        all_hashes = torch.cat(hashes)
        order = all_hashes.argsort()
        self._hashes = all_hashes[order]
        self._logits = torch.cat(logits)[order]

    def _hash(self, images: Images) -> Int[Tensor, " batch"]:
        """Return a multilinear hash: bits times fixed random numbers, summed modulo 2^64."""
        bits = images.contiguous().view(torch.int32).flatten(1)  # of float32, (batch, values)
        if len(self._multipliers) != bits.shape[1] or self._multipliers.device != bits.device:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(-(2**63), 2**63 - 1, (bits.shape[1],), generator=generator)
            self._multipliers = drawn.to(bits.device)
        return (bits.long() * self._multipliers).sum(1)

    def identity(self) -> dict[str, object]:
        """Return the settings and weights that determine the logits."""
        return {
            "architecture": self.model.architecture,
            "input": list(self.model.input_size),
            "sha256": fingerprint(self.model.module),
        }


def cacheable_views(recipe: Recipe, split: Split) -> int:
    """Return how many views of each image are worth caching: 0, 1 or, with mirroring, 2.

    Caching is worthwhile if mirroring is the only augmentation, if the data is not rendered again
    in each epoch, and if each view occurs more than once. The logits must also fit in memory.
    """
    views = 2 if recipe.flip else 1
    is_augmented = any(getattr(recipe, name) for name in _AUGMENTATIONS)
    is_rendered = split.epoch(1).source is not split.source
    if is_augmented or is_rendered or recipe.epochs <= views:
        return 0
    logits = views * len(split) * len(split.classes)
    if logits > MAX_CACHED_LOGITS:
        return 0
    return views
