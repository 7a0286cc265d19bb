"""The most probable classes of an image, as a row; free of torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from vitlens.display import shortened, visible
from vitlens.record import col
from vitlens.report.prose import Marked, listed, say

TOP: Final = 5  # classes of an image


@dataclass(frozen=True)
class PredictionRow:
    """The five most probable classes of one image, the most probable first; str() makes one line.

    image: its file, or its number from 0; label: the true class, None where it is not known; None where the model has
    fewer classes.
    """

    image: str = col("image")
    class_1: str = col("prediction")
    probability_1: float = col("probability", unit="fraction")
    label: str | None = col("label", default=None)
    class_2: str | None = col("next", default=None)
    probability_2: float | None = col("probability of the next", unit="fraction", default=None)
    class_3: str | None = col("third", default=None)
    probability_3: float | None = col("probability of the third", unit="fraction", default=None)
    class_4: str | None = col("fourth", default=None)
    probability_4: float | None = col("probability of the fourth", unit="fraction", default=None)
    class_5: str | None = col("fifth", default=None)
    probability_5: float | None = col("probability of the fifth", unit="fraction", default=None)

    @classmethod
    def of(
        cls, image: str, classes: Sequence[str], probabilities: Sequence[float], label: str | None = None
    ) -> "PredictionRow":
        """Return a row of one to five classes."""
        (first, share), *others = zip(classes, probabilities, strict=True)
        return cls(image, first, share, label, *(cell for pair in others for cell in pair))  # type: ignore[arg-type]

    @property
    def top_classes(self) -> tuple[tuple[str, float], ...]:
        """Return the classes with their probabilities."""
        pairs = [(getattr(self, f"class_{rank}"), getattr(self, f"probability_{rank}")) for rank in range(1, TOP + 1)]
        return tuple((name, share) for name, share in pairs if name is not None)

    @property
    def correct(self) -> bool | None:
        """Return whether the most probable class is the label; None where that is not known."""
        return None if self.label is None else self.class_1 == self.label

    def __str__(self) -> str:
        named = (f"{_shown(name)} {100 * share:.1f} %" for name, share in self.top_classes)
        truth = "" if self.label is None else f" (label: {_shown(self.label)})"
        return f"{_shown(self.image)}: {', '.join(named)}{truth}"


def by_file_name(rows: Sequence[PredictionRow]) -> list[PredictionRow]:
    """Return the rows with their files' names, and with the whole path where two files share a name."""
    names = Counter(Path(row.image).name for row in rows)
    return [replace(row, image=name) if names[name := Path(row.image).name] == 1 else row for row in rows]


def _shown(name: str) -> str:
    return shortened(visible(name))


def for_images(predicted: Counter[str]) -> Marked:
    """Return how many images have each prediction: "tabby for 3, lynx for 2 and others for 7"."""
    most = predicted.most_common(TOP)
    parts = [say("{{ name }} for {{ k }}", name=name, k=count) for name, count in most]
    rest = predicted.total() - sum(count for _, count in most)
    return listed([*parts, *([f"others for {rest}"] if rest else [])])
