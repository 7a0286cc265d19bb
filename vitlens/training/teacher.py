"""The teacher of a distillation: a trained specimen, frozen, whose answers stand in the order of the data's classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitlens.analysis.reading import match_classes
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError, NonFiniteError
from vitlens.models.fingerprint import fingerprint
from vitlens.models.specimen import Specimen
from vitlens.shapes import Images, Logits


class Teacher:
    """What a trained specimen says of a student's images; the specimen itself resizes them to its own input size.

    classes: the data's; precision: "fp32" or "bf16". Raises InputError when its classes are others than these.
    """

    def __init__(self, specimen: Specimen, *, classes: Sequence[str], precision: str = "fp32") -> None:
        self.specimen, self.precision = specimen, precision
        self.columns = _columns(specimen, classes)

    @torch.no_grad()
    def __call__(self, images: Images) -> Logits:
        """Logits (batch, classes) in fp32. Raises NonFiniteError for a NaN or an infinity."""
        with evaluating(self.specimen), autocast(images.device, self.precision):
            logits: Tensor = self.specimen(images).float()[:, self.columns]
        if not logits.isfinite().all():
            raise NonFiniteError(
                f"expected finite logits from the teacher {self.specimen.alias}, found NaN or infinity; "
                "check its weights, or run with --precision fp32"
            )
        return logits

    def identity(self) -> dict[str, object]:
        """What decides its answers."""
        return {
            "architecture": self.specimen.architecture,
            "input": list(self.specimen.input_size),
            "sha256": fingerprint(self.specimen.model),
        }


def _columns(specimen: Specimen, classes: Sequence[str]) -> list[int]:
    """Which of its logits stands for which class of the data."""
    specimen.require_classifier()
    try:
        columns, known = match_classes(specimen.classes, classes)
    except InputError as error:
        raise InputError(f"the teacher {specimen.alias} knows other classes than the data: {error}") from error
    more = known[len(classes) :]
    if more:
        some = ", ".join(map(repr, more[:5])) + (f" and {len(more) - 5} more" if len(more) > 5 else "")
        raise InputError(
            f"expected a teacher of the data's {len(classes)} classes, found {specimen.alias} with {len(known)}; only "
            f"in the teacher: {some}; train one on this data first: vitlens train {specimen.alias} --data DATA"
        )
    return columns
