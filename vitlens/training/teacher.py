"""The teacher of a distillation: a trained model, frozen, whose answers stand in the order of the data's classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitlens.analysis.answers.classes import match_classes
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError, NonFiniteError
from vitlens.models.identity import fingerprint
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits


class Teacher:
    """What a trained model says of a student's images; the model itself resizes them to its own input size.

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
        """What decides its answers."""
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
