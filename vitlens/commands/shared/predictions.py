"""The most probable classes of an image, as a row; free of torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vitlens.display import shorten, visible
from vitlens.record import col
from vitlens.report.claims import Claim
from vitlens.report.prose import Marked, listed, say

TOP: Final = 5  # classes of an image


@dataclass(frozen=True)
class PredictionRow:
    """The five most probable classes of one image, the most probable first; str() makes one line.

    image: its file, or its number from 0.
    label: the true class, None if it is not known.

    A model with fewer classes leaves the last ones None.
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
        cls,
        image: str,
        classes: Sequence[str],
        probabilities: Sequence[float],
        label: str | None = None,
    ) -> "PredictionRow":
        """Return a row of one to five classes."""
        cells: dict[str, Any] = {}
        for rank, (name, probability) in enumerate(
            zip(classes, probabilities, strict=True), start=1
        ):
            cells[f"class_{rank}"] = name
            cells[f"probability_{rank}"] = probability
        return cls(image=image, label=label, **cells)

    @property
    def top_classes(self) -> tuple[tuple[str, float], ...]:
        """Return the classes with their probabilities."""
        classes = []
        for rank in range(1, TOP + 1):
            name = getattr(self, f"class_{rank}")
            if name is not None:
                classes.append((name, getattr(self, f"probability_{rank}")))
        return tuple(classes)

    @property
    def correct(self) -> bool | None:
        """Return True if the most probable class is the label, None if the label is not known."""
        if self.label is None:
            return None
        return self.class_1 == self.label

    def __str__(self) -> str:
        classes = []
        for name, probability in self.top_classes:
            classes.append(f"{_printable(name)} {100 * probability:.1f} %")
        line = f"{_printable(self.image)}: {', '.join(classes)}"
        if self.label is not None:
            line += f" (label: {_printable(self.label)})"
        return line


def by_file_name(rows: Sequence[PredictionRow]) -> list[PredictionRow]:
    """Return the rows with file names in place of paths; files that share a name keep the path."""
    names = [Path(row.image).name for row in rows]
    counts = Counter(names)
    renamed = []
    for row, name in zip(rows, names):
        renamed.append(replace(row, image=name) if counts[name] == 1 else row)
    return renamed


def _printable(name: str) -> str:
    return shorten(visible(name))


def count_predictions(rows: Sequence[PredictionRow]) -> Counter[str]:
    """Return how many images have each prediction."""
    return Counter(row.class_1 for row in rows)


def predicted_classes(rows: Sequence[PredictionRow], alias: str, *, place: str = "") -> Claim:
    """Return the claim that counts the images of each predicted class.

    place: the figure that shows the images.
    """
    counts = count_predictions(rows)
    return Claim(
        "prediction",
        alias,
        say(
            "Of {{ n }} images, **{{ alias }}** predicts class {{ classes }}.",
            n=len(rows),
            alias=alias,
            classes=for_images(counts),
        ),
        title=say(
            "{{ alias }} predicts {{ count }} class{{ 'es' if count > 1 }} for {{ n }} images",
            alias=alias,
            count=len(counts),
            n=len(rows),
        ),
        kind="answer",
        place=place,
    )


def for_images(predictions: Counter[str]) -> Marked:
    """Return predictions in words: "tabby for 3, lynx for 2 and others for 7".

    predictions: the number of images by predicted class.
    """
    parts: list[str] = []
    other_images = predictions.total()
    for name, count in predictions.most_common(TOP):
        parts.append(say("{{ name }} for {{ count }}", name=name, count=count))
        other_images -= count
    if other_images:
        parts.append(f"others for {other_images}")
    return listed(parts)
