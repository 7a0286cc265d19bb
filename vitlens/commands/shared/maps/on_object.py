"""Whether maps lie on the objects, beside maps that ignore the image: rows, findings and their table; free of torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.record import col
from vitlens.records import TableOf
from vitlens.report.document import Cell, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate, Side, beyond

ATTENTION, ROLLOUT, HEAD = "attention", "rollout", "head"  # maps of a layer: its mean, the rollout up to it, a head's
METHOD: Final = (
    "The baseline is the best of four maps that ignore the image: a uniform one, a Gaussian at the centre, the mean "
    "mask of the other images, and the map of another image. Differences from it are paired over images; in the "
    "pointing game they are at least as uncertain as those of independent rates."
)


@dataclass(frozen=True)
class OnObjectRow:
    """Where maps lie on objects with known masks, means over images.

    score: pointing (their maximum lies on the object), mass (the share of their mass), roc_auc; baseline: which map
    that ignores the image has the greatest mean; difference: paired, of shares in percentage points. layer, head: of
    the maps, where they are of one.
    """

    model: str = col("model")
    maps: str = col("maps")
    score: str = col("score")
    estimate: Estimate = col("on the object", better="higher")
    baseline: str = col("best map that ignores the image")
    of_baseline: Estimate = col("its score")
    difference: Estimate = col("difference", better="higher")
    layer: int | None = col("layer", default=None)
    head: int | None = col("head", default=None)

    @property
    def side(self) -> Side:
        """Whether the maps are shown to exceed the baseline, or to stay below it."""
        return beyond(self.difference, 0.0)

    @property
    def chance_words(self) -> str:
        """The baseline and its score."""
        return f"{self.baseline} ({in_words(self.of_baseline)})"


ON_OBJECT = TableOf("on_object", OnObjectRow, optional=True)


def mass_of(rows: Sequence[OnObjectRow], kind: str) -> list[OnObjectRow]:
    """The rows of the mass of one kind of map, by layer."""
    return [row for row in rows if row.score == "mass" and row.maps == kind]


def on_object_table(
    title: str, rows: Sequence[OnObjectRow], columns: Mapping[str, Callable[[OnObjectRow], Cell]], score: str
) -> Table:
    """Scores of maps beside their baseline; columns: those that say which maps, score: the title of the score."""
    more: dict[str, Callable[[OnObjectRow], Cell]] = {
        score: lambda row: row.estimate,
        "baseline": lambda row: row.baseline,
        "its score": lambda row: row.of_baseline,
        "difference": lambda row: row.difference,
    }
    return Table.of(title, rows, {**columns, **more})
