"""Objective: what training makes small, from what the model answers."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.models.model import Model


@runtime_checkable
class Objective(Protocol):
    """What a step asks of the model, and what it makes of the answer."""

    def asked(self, model: Model) -> nn.Module:
        """The module that is run (and wrapped for several processes): images -> answers."""
        ...

    def logits(self, answers: Any) -> Tensor:
        """What counts as the prediction (batch, classes)."""
        ...

    def loss(self, answers: Any, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:
        """Loss summed over the images; targets: labels (batch,) or shares of the classes (batch, classes)."""
        ...

    def identity(self) -> Mapping[str, object]:
        """What a checkpoint must share with the run that goes on from it, besides model, data and recipe."""
        ...


class FromLabels:
    """Cross-entropy of the logits with the labels."""

    def asked(self, model: Model) -> nn.Module:
        """The model itself."""
        return model

    def logits(self, answers: Tensor) -> Tensor:
        """The answers."""
        return answers

    def loss(self, answers: Tensor, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:  # noqa: ARG002 - a teacher sees the images
        """Cross-entropy in nats, summed over the images."""
        return F.cross_entropy(answers.float(), targets, label_smoothing=smoothing, reduction="sum")

    def identity(self) -> Mapping[str, object]:
        """Nothing more."""
        return {}
