"""Distillation (Touvron 2021, DeiT): a student learns from the labels and from a teacher's view of the same pixels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.model import Model
from vitlens.names import DISTILL_KINDS
from vitlens.shapes import Images, Logits

PerImage = Float[Tensor, " batch"]
Loss = Callable[..., PerImage]  # (*, student, teacher, temperature) -> nats


def soft(*, student: Logits, teacher: Logits, temperature: float) -> PerImage:
    """Divergence of the student's softened answer from the teacher's, times temperature^2, in nats.

    KL(softmax(teacher / temperature) || softmax(student / temperature)): Hinton 2015; Touvron 2021, eq. 2, second term.
    """
    wanted, said = ((logits / temperature).log_softmax(-1) for logits in (teacher, student))
    return temperature**2 * (wanted.exp() * (wanted - said)).sum(-1)


def hard(*, student: Logits, teacher: Logits, temperature: float = 1.0) -> PerImage:  # noqa: ARG001  no choice has one
    """Cross-entropy with the teacher's choice as the label, in nats: Touvron 2021, eq. 3, second term."""
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
    """The whole loss of each image: (1 - weight) of what the labels say, weight of what the teacher says; nats."""
    taught = LOSSES[how.kind](student=student, teacher=teacher, temperature=how.temperature)
    return (1 - how.weight) * labelled + how.weight * taught


class Student(nn.Module):
    """A model that answers twice: what learns from the labels, and what learns from the teacher.

    token: the two heads of a distilled ViT, else the same logits twice. Raises UnsupportedError for a token that the
    model has not.
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
    """The objective of a distillation: labels and a teacher, who sees the same augmented (and mixed) images."""

    def __init__(self, teacher: Callable[[Images], Logits], how: Distillation, *, identity: Mapping[str, object]):
        self.teacher, self.how, self._identity = teacher, how, identity

    def asked(self, model: Model) -> nn.Module:
        """The student with both its answers."""
        return Student(model, token=self.how.token)

    def logits(self, answers: tuple[Logits, Logits]) -> Logits:
        """The mean of both heads, as the model itself answers."""
        return torch.stack(answers).mean(0)

    def loss(self, answers: tuple[Logits, Logits], targets: Tensor, images: Images, *, smoothing: float) -> Tensor:
        """The loss summed over the images, in nats; smoothing is of the labels, the teacher's word stands."""
        for_labels, for_teacher = (logits.float() for logits in answers)
        labelled = F.cross_entropy(for_labels, targets, label_smoothing=smoothing, reduction="none")
        return distilled(labelled=labelled, student=for_teacher, teacher=self.teacher(images), how=self.how).sum()

    def identity(self) -> Mapping[str, object]:
        """Who teaches, and how."""
        return {"distillation": self._identity}
