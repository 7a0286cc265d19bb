"""Distillation (Touvron 2021, DeiT): a student learns from labels and from a teacher's logits on the same pixels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.answers.classes import match_classes
from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError, NonFiniteError, UnknownNameError, UnsupportedError
from vitlens.models.identity import fingerprint
from vitlens.models.model import Model
from vitlens.names import DISTILL_KINDS
from vitlens.shapes import Images, Logits
from vitlens.training.feed import portions
from vitlens.training.recipe import Recipe

PerImage = Float[Tensor, " batch"]
Loss = Callable[..., PerImage]  # (*, student, teacher, temperature) -> nats


def soft(*, student: Logits, teacher: Logits, temperature: float) -> PerImage:
    """Divergence of the student's softened prediction from the teacher's, times temperature^2, in nats.

    KL(softmax(teacher / temperature) || softmax(student / temperature)): Hinton 2015; Touvron 2021, eq. 2, second term.
    """
    target, predicted = ((logits / temperature).log_softmax(-1) for logits in (teacher, student))
    return temperature**2 * (target.exp() * (target - predicted)).sum(-1)


def hard(*, student: Logits, teacher: Logits, temperature: float = 1.0) -> PerImage:  # noqa: ARG001  a label has none
    """Cross-entropy with the teacher's prediction as the label, in nats: Touvron 2021, eq. 3, second term."""
    return F.cross_entropy(student, teacher.argmax(-1), reduction="none")


LOSSES: Final[Mapping[str, Loss]] = MappingProxyType({"soft": soft, "hard": hard})
# Touvron 2021: eq. 3 halves the two terms; for the soft form section 5 takes tau = 3 and lambda = 0.1
WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({"soft": 0.1, "hard": 0.5})
TEMPERATURE: Final = 3.0


@dataclass(frozen=True)
class Distillation:
    """How a student learns from a teacher; raises InputError for what cannot be run.

    kind: "soft" or "hard"; weight: the teacher's share of the loss; temperature: of the soft form; token: whether a
    token and head of their own learn from the teacher (the other head then learns from the labels alone).
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


def distilled(*, labelled: PerImage, student: Logits, teacher: Logits, how: Distillation) -> PerImage:
    """The whole loss of each image: (1 - weight) of the labels' loss, weight of the teacher's; nats."""
    distillation = LOSSES[how.kind](student=student, teacher=teacher, temperature=how.temperature)
    return (1 - how.weight) * labelled + how.weight * distillation


class Student(nn.Module):
    """A model with two outputs: logits that learn from the labels, and logits that learn from the teacher.

    token: the two heads of a distilled ViT, else the same logits twice. Raises UnsupportedError where the model has
    no such token.
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
    """Whether it is a ViT with a distillation token and a head that reads it."""
    layout = model.anatomy.layout
    return layout is not None and "distillation" in layout.prefix and hasattr(model.module, "head_dist")


class Distilled:
    """The objective of a distillation: labels and a teacher, which is given the same augmented (and mixed) images."""

    def __init__(self, teacher: Callable[[Images], Logits], how: Distillation, *, identity: Mapping[str, object]):
        self.teacher, self.how, self._identity = teacher, how, identity

    def module(self, model: Model) -> nn.Module:
        """The student with both its outputs."""
        return Student(model, token=self.how.token)

    def logits(self, outputs: tuple[Logits, Logits]) -> Logits:
        """The mean of both heads, as in the model itself."""
        return torch.stack(outputs).mean(0)

    def loss(self, outputs: tuple[Logits, Logits], targets: Tensor, images: Images, *, smoothing: float) -> Tensor:
        """The loss summed over the images, in nats; the labels are smoothed, the teacher's logits are not."""
        for_labels, for_teacher = (logits.float() for logits in outputs)
        labelled = F.cross_entropy(for_labels, targets, label_smoothing=smoothing, reduction="none")
        return distilled(labelled=labelled, student=for_teacher, teacher=self.teacher(images), how=self.how).sum()

    def identity(self) -> Mapping[str, object]:
        """The teacher, and the form of the loss."""
        return {"distillation": self._identity}


class Teacher:
    """A trained model's logits for a student's images, in the order of the data's classes; it resizes them itself.

    classes: the data's; precision: "fp32" or "bf16". Raises InputError when its classes are others than these.
    """

    def __init__(self, model: Model, *, classes: Sequence[str], precision: str = "fp32") -> None:
        self.model, self.precision = model, precision
        self.columns = _columns(model, classes)

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
        """What decides its logits."""
        return {
            "architecture": self.model.architecture,
            "input": list(self.model.input_size),
            "sha256": fingerprint(self.model.module),
        }


def _columns(model: Model, classes: Sequence[str]) -> list[int]:
    """Which of its logits stands for which class of the data."""
    model.require_classifier()
    try:
        columns, known = match_classes(model.classes, classes)
    except InputError as error:
        raise InputError(f"the teacher {model.alias} knows other classes than the data: {error}") from error
    more = known[len(classes) :]
    if more:
        some = ", ".join(map(repr, more[:5])) + (f" and {len(more) - 5} more" if len(more) > 5 else "")
        raise InputError(
            f"expected a teacher of the data's {len(classes)} classes, found {model.alias} with {len(known)}; only "
            f"in the teacher: {some}; train one on this data first: vitlens train {model.alias} --data DATA"
        )
    return columns


MOST: Final = 100_000_000  # numbers to remember: 400 MB
_CHANGES = ("crop_padding", "randaugment", "erasing", "mixup", "cutmix")  # each changes every view of an image


def forms_of(recipe: Recipe, split: Split) -> int:
    """How many forms of each image are worth remembering: 1, 2 where it may be mirrored, 0 where it does not pay.

    It pays when the recipe changes no pixels, the data is not drawn anew, and each form comes more than once.
    """
    forms = 1 + recipe.flip
    changes = any(getattr(recipe, name) for name in _CHANGES) or split.epoch(1).source is not split.source
    fits = forms * len(split) * len(split.classes) <= MOST
    return forms if not changes and recipe.epochs > forms and fits else 0


class Remembered:
    """A teacher's logits, from memory where the image was remembered.

    An image is recognised by a 64-bit hash of all its bits: with a single pixel changed it is a new one, for which the
    teacher itself is run.
    """

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.computed = 0  # images that the teacher was run on since `remember`
        self._weights: Tensor | None = None
        self._hashes = torch.zeros(0, dtype=torch.int64)  # sorted
        self._logits = torch.zeros(0, 0)

    def remember(
        self, split: Split, *, mirrored: bool, device: torch.device, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        """Remember the logits of every image, and of its mirror image where asked, always in the same order."""
        hashes, logits = [], []
        batches = torch.arange(len(split)).split(fitting_batch_size(self.teacher.model))
        for portion in portions(split.source, batches, pin=device.type == "cuda"):
            images = portion.pixels.to(device, non_blocking=True).float().div_(255)
            for form in (images, images.flip(-1))[: 1 + mirrored]:
                hashes.append(self._hash(form))
                logits.append(self.teacher(form))
                advance(len(form))
        order = torch.cat(hashes).argsort()
        self._hashes, self._logits, self.computed = torch.cat(hashes)[order], torch.cat(logits)[order], 0

    def __call__(self, images: Images) -> Logits:
        """Logits (batch, classes) in fp32."""
        if not len(self._hashes):
            return self.teacher(images)
        hashes = self._hash(images)
        place = torch.searchsorted(self._hashes, hashes).clamp_max(len(self._hashes) - 1)
        logits, new = self._logits[place], self._hashes[place] != hashes
        if new.any():
            logits[new] = self.teacher(images[new])
            self.computed += int(new.sum())
        return logits

    def _hash(self, images: Images) -> Int[Tensor, " batch"]:
        """The bits of each image times fixed random numbers, summed modulo 2^64 (multilinear hashing)."""
        bits = images.contiguous().view(torch.int32).flatten(1)
        if self._weights is None or self._weights.shape[0] != bits.shape[1] or self._weights.device != bits.device:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(-(2**63), 2**63 - 1, (bits.shape[1],), generator=generator)
            self._weights = drawn.to(bits.device)
        return (bits.long() * self._weights).sum(1)
