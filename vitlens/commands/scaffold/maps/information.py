"""How much maps tell: their information and how much of it fixed places explain, as rows, and the findings."""

from dataclasses import dataclass
from typing import Final

from vitlens.record import col
from vitlens.report.document import Finding
from vitlens.report.findings import Kind, finding
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import Estimate, widened

UNIFORM: Final = 0.5  # bits, below which a map is uniform; as the label of heads
FIXED: Final = 0.75  # of a map's information: beyond it, what the image itself decides is a small rest


@dataclass(frozen=True)
class InformationRow:
    """The maps of one method or layer, means over images. information: of a map relative to a uniform one; by_place:
    the share of it that the mean of the other images' maps explains, None for few images."""

    maps: str = col("maps")
    information: Estimate = col("information", term="how far a map is from a uniform one, in bits")
    by_place: Estimate | None = col("the same in other images", default=None)


def is_uniform(row: InformationRow, looks: int) -> bool:
    """Whether maps are shown to be uniform, as one of so many looks: their information is below UNIFORM."""
    high = widened(row.information, looks).high
    return high is not None and high < UNIFORM


def uniform_map(
    row: InformationRow,
    title: str,
    looks: int,
    *,
    figure: str,
    kind: Kind = "hidden fault",
    rows: tuple[object, ...] = (),
) -> Finding | None:
    """That maps are uniform, where their information is shown to be below UNIFORM; rows: that back the title."""
    if not is_uniform(row, looks):
        return None
    return finding(
        f"{title} are uniform and distinguish no patches: {number(row.information.value)} bits of information, fewer "
        f"than {UNIFORM}.",
        row.information,
        kind=kind,
        reference=UNIFORM,
        figure=figure,
        rows=(row, Estimate(UNIFORM, unit="bits"), *rows),
    )


def fixed_map(row: InformationRow, title: str, looks: int, *, figure: str) -> Finding | None:
    """That maps follow positions, where other images' maps are shown to explain most of their information."""
    share, low = row.by_place, None if row.by_place is None else widened(row.by_place, looks).low
    if share is None or low is None or low <= FIXED or (row.information.low or 0.0) < UNIFORM:
        return None
    return finding(
        f"{title} are nearly the same for every image: the mean map of the other images explains "
        f"{in_words(Estimate(share.value))} of the information in a map.",
        share,
        kind="hidden fault",
        reference=FIXED,
        figure=figure,
        rows=(row,),
    )
