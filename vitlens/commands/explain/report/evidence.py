"""The sections of the evidence beyond the league: other substrates and stability, and what the comparisons can see."""

from collections.abc import Iterator
from typing import Final

from vitlens.analysis.faithfulness.cascade import SIMILAR
from vitlens.analysis.faithfulness.steadiness import DISTURBANCES, FAR, JUMPY
from vitlens.commands.explain.evidence_record import (
    IMPUTED,
    POWER,
    SHIFTS,
    STABILITY,
    STEADY,
    SUBSTRATE_AGREEMENTS,
    SUBSTRATE_GAP,
    SUBSTRATES,
    SWAPPED,
    StabilityRow,
    SubstrateAgreementRow,
    SwappedPairRow,
)
from vitlens.commands.explain.report.league import League
from vitlens.commands.shared.maps.findings import listed
from vitlens.commands.shared.maps.judged import in_three_decimals
from vitlens.commands.shared.maps.rows import INSERTION, ROAD
from vitlens.report.document import Cell, Section, Sentence, Table
from vitlens.report.numbers import number
from vitlens.uncertainty import LEVEL
from vitlens.uncertainty import POWER as SEEN

_ROWS: Final = 12  # of a section's table
_CHECK_WORDS: Final = {"road": ROAD, "gap": INSERTION, "roc_auc": "ROC-AUC", "pointing": "the pointing game"}


def power_sentences(league: League) -> Iterator[Sentence]:
    """The smallest difference between two methods that this number of images can show."""
    rows = [row for row in league.record.rows(POWER) if row.model == league.alias]
    if not rows:
        return
    of = ", ".join(f"{number(row.detectable, 2)} in {_CHECK_WORDS.get(row.check, row.check)}" for row in rows)
    first = rows[0]
    sources = f" ({first.groups:,} independent sources)" if first.groups < first.n else ""
    yield Sentence(
        f"With {first.n:,} images{sources} a true difference from the best method under {of} cannot be seen: a paired "
        f"test at {100 * LEVEL:.0f} % finds it with a probability below {100 * SEEN:.0f} %.",
        (*rows, first.n, 100 * LEVEL, 100 * SEEN),
    )


def evidence_sections(league: League) -> Iterator[Section]:
    """The sections of the evidence that was measured."""
    yield from _substrates(league)
    yield from _stability(league)


def _substrates(league: League) -> Iterator[Section]:
    """Whether the ranking of the methods depends on what replaces a removed patch."""
    agreements = [row for row in league.record.rows(SUBSTRATE_AGREEMENTS) if row.model == league.alias]
    if not agreements:
        return
    swapped = [row for row in league.record.rows(SWAPPED) if row.model == league.alias]
    words = (
        "Insertion − deletion with each replacement of the removed patches, on the same images; imputed: ROAD, LeRF − "
        "MoRF at 20 to 80 % removed. A pair of methods changes places where the paired difference is above 0 with one "
        "replacement and below 0 with another, each at the interval that all pairs require. SRG (Blücher 2024): LeRF − "
        "MoRF of the target's logit, in logits, where a probability saturates."
    )
    sentences = (_substrate_answer(league, agreements, swapped), Sentence(words, says="method"))
    yield Section(f"What replaces a removed patch{league.of}", sentences, (_substrate_table(league),), leading=True)


def _substrate_answer(
    league: League, agreements: list[SubstrateAgreementRow], swapped: list[SwappedPairRow]
) -> Sentence:
    least = min(agreements, key=lambda row: row.tau)
    span = agreement_words(least)
    backing = (*agreements, *swapped, len(agreements))
    if not swapped:
        return Sentence(
            f"No two of {least.methods} methods are shown to change places for **{league.alias}** when removed patches "
            f"are replaced otherwise ({span}; {least.n:,} images).",
            backing,
        )
    pairs = list(dict.fromkeys((row.better, row.worse, row.first, row.second) for row in swapped))
    named = "; ".join(
        f"{better} is above {worse} with {first} and below it with {second}"
        for better, worse, first, second in pairs[:2]
    )
    return Sentence(
        f"**The ranking of the methods for {league.alias} depends on what replaces a removed patch**: {named} "
        f"({len(pairs)} such change{'s' if len(pairs) > 1 else ''} of places; {span}). A verdict on these methods "
        "holds for its replacement only.",
        (*backing, len(pairs)),
    )


def agreement_words(least: SubstrateAgreementRow) -> str:
    """How far the rankings with two substrates agree, of the two that agree least."""
    if least.methods > 2:
        return f"the rankings agree least with {least.first} and {least.second}: Kendall's τ {least.tau:.2f}"
    if least.tau > 0:
        return "their order is the same with every replacement"
    return f"the mean of one is higher with {least.first}, of the other with {least.second}"


def _substrate_table(league: League) -> Table:
    """The best methods and the baselines with every substrate."""
    rows = [row for row in league.record.rows(SUBSTRATES) if row.model == league.alias]
    names = list(dict.fromkeys(row.substrate for row in rows))
    shown = [row.method for row in league.methods][: _ROWS - len(league.baselines)] + list(league.baselines)
    metrics = league.record.metrics
    cells: list[tuple[Cell, ...]] = [
        (
            method,
            *(
                in_three_decimals(metrics.get(SUBSTRATE_GAP(model=league.alias, substrate=name, method=method)))
                for name in names
            ),
            in_three_decimals(league.estimate("relevance_gain", method)),
        )
        for method in shown
    ]
    more = f", the {len(shown) - len(league.baselines)} best of {len(league.methods)} methods"
    extent = more if len(league.methods) > _ROWS - len(league.baselines) else ""
    titles = ["imputed (ROAD)" if name == IMPUTED else name for name in names]
    return Table(f"Insertion − deletion by replacement{extent}", ("method", *titles, "SRG, logits"), tuple(cells))


def _stability(league: League) -> Iterator[Section]:
    """Whether maps follow shifts of the images."""
    rows = [row for row in league.record.rows(STABILITY) if row.model == league.alias]
    overall = [row for row in rows if row.disturbance == SHIFTS]
    if not overall:
        return
    words = (
        "Each image is shifted right and down by 1/4, 1/2 and 1 px (bilinear), and flipped; the new map is compared "
        "with the old one, moved in the same way: rank correlation, and whether the top point lies more than "
        f"{number(100 * FAR)} % of a side from its place. Flagged: maps whose top point jumps on more than "
        f"{100 * JUMPY:.0f} % of the images at any shift, or whose correlation is below {SIMILAR} (by the interval). "
        "A flip is shown, not judged."
    )
    sentences = (_stability_answer(league, overall), Sentence(words, says="method"))
    yield Section(f"Stability of the maps{league.of}", sentences, (_stability_table(league, overall),), leading=True)


def _stability_answer(league: League, overall: list[StabilityRow]) -> Sentence:
    by_state = {state: [row.method for row in overall if row.state == state] for state in ("jumps", "steady")}
    images = max(row.n for row in overall)
    words = (
        f"When {images} images are shifted by at most one pixel, the maps of **{listed(by_state['jumps'])}** for "
        f"{league.alias} jump: the place that they point at is not a property of the image"
        if by_state["jumps"]
        else f"When {images} images are shifted by at most one pixel, no map for {league.alias} is shown to jump"
    )
    others = f"; those of {listed(by_state['steady'])} are shown to follow" if by_state["steady"] else ""
    return Sentence(f"{words}{others}.", (*overall, images))


def _stability_table(league: League, overall: list[StabilityRow]) -> Table:
    """Every method: its state, and correlation and jumps over the shifts; the correlation under the flip."""

    def of(score: str, disturbance: str, method: str) -> Cell:
        name = STEADY(model=league.alias, score=score, disturbance=disturbance, method=method)
        return in_three_decimals(league.record.metrics.get(name))

    flips = [name for name, disturbance in DISTURBANCES.items() if disturbance.flip]
    order = {row.method: place for place, row in enumerate(league.rows)}
    shown = sorted(overall, key=lambda row: order.get(row.method, len(order)))[:_ROWS]
    rows: list[tuple[Cell, ...]] = [
        (
            row.method,
            row.state,
            of("correlation", SHIFTS, row.method),
            of("jumped", SHIFTS, row.method),
            *(of("correlation", flip, row.method) for flip in flips),
        )
        for row in shown
    ]
    titles = ("method", "state", "correlation, shifts", "top point jumps", *(f"correlation, {name}" for name in flips))
    extent = f", the {_ROWS} best of {len(overall)} methods" if len(overall) > _ROWS else ""
    return Table(f"Maps of shifted images against shifted maps{extent}", titles, tuple(rows))
