"""How much maps tell: their information and how much of it fixed places explain, as rows, and the findings."""

from dataclasses import dataclass
from typing import Final

from vitlens.report.document import Finding
from vitlens.report.findings import Kind, finding
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import Estimate, widened

UNIFORM: Final = 0.5  # bits, below which a map is uniform; as the label of heads
FIXED: Final = 0.75  # of a map's information: beyond it, what the image itself decides is a small rest


@dataclass(frozen=True)
class InformationRow:
    """The maps of one method or layer, means over images with intervals. bits: information of a map relative to a
    uniform one; fixed: the share of it that the mean of the other images' maps explains (None for few images)."""

    maps: str
    bits: float
    bits_low: float | None
    bits_high: float | None
    fixed: float | None
    fixed_low: float | None
    fixed_high: float | None
    n: int

    @property
    def information(self) -> Estimate:
        """The bits with their interval."""
        return Estimate(self.bits, self.bits_low, self.bits_high, self.n, "bits")

    @property
    def by_place(self) -> Estimate | None:
        """The share that fixed places explain, with its interval."""
        return None if self.fixed is None else Estimate(self.fixed, self.fixed_low, self.fixed_high, self.n)


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
        f"{title} are uniform and distinguish no patches: {number(row.bits)} bits of information, fewer than "
        f"{UNIFORM}.",
        row.information,
        kind=kind,
        reference=UNIFORM,
        figure=figure,
        rows=(row, Estimate(UNIFORM, unit="bits"), *rows),
    )


def fixed_map(row: InformationRow, title: str, looks: int, *, figure: str) -> Finding | None:
    """That maps follow positions, where other images' maps are shown to explain most of their information."""
    share, low = row.by_place, None if row.by_place is None else widened(row.by_place, looks).low
    if share is None or low is None or low <= FIXED or (row.bits_low or 0.0) < UNIFORM:
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
