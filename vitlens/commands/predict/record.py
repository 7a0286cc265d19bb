"""The rows and arrays that `vitlens predict` writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.display import shortened, visible
from vitlens.records import ArraysOf, Contents, Pixels, TableOf, UntrustedName

TOP: Final = 5  # classes of an image


@dataclass(frozen=True)
class PredictionRow:
    """The five most probable classes of one image, the most probable first; str() makes one line.

    image: its file, or its number from 0; label: the true class, None where it is not known; probabilities: fractions;
    None where the model has fewer classes.
    """

    image: UntrustedName
    label: UntrustedName | None
    class_1: UntrustedName
    probability_1: float
    class_2: UntrustedName | None = None
    probability_2: float | None = None
    class_3: UntrustedName | None = None
    probability_3: float | None = None
    class_4: UntrustedName | None = None
    probability_4: float | None = None
    class_5: UntrustedName | None = None
    probability_5: float | None = None

    @classmethod
    def of(
        cls, image: str, classes: Sequence[str], probabilities: Sequence[float], label: str | None = None
    ) -> "PredictionRow":
        """A row of one to five classes."""
        cells = [cell for pair in zip(classes, probabilities, strict=True) for cell in pair]
        return cls(image, label, *cells)  # type: ignore[arg-type]

    @property
    def top_classes(self) -> tuple[tuple[str, float], ...]:
        """The classes with their probabilities."""
        pairs = (
            (self.class_1, self.probability_1),
            (self.class_2, self.probability_2),
            (self.class_3, self.probability_3),
            (self.class_4, self.probability_4),
            (self.class_5, self.probability_5),
        )
        return tuple((name, share) for name, share in pairs if name is not None and share is not None)

    def __str__(self) -> str:
        named = (f"{_shown(name)} {100 * share:.1f} %" for name, share in self.top_classes)
        truth = "" if self.label is None else f" (label: {_shown(self.label)})"
        return f"{_shown(self.image)}: {', '.join(named)}{truth}"


def _shown(name: str) -> str:
    return shortened(visible(name))


@dataclass(frozen=True)
class FirstImages:
    """The pixels of the first images."""

    pixels: Pixels


PREDICTIONS = TableOf("predictions", PredictionRow)
IMAGES = ArraysOf("images", FirstImages)

RECORD = Contents(tables=(PREDICTIONS,), arrays=(IMAGES,))
