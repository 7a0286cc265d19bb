"""The self-checks: signs of a faulty attack, and of masked gradients."""

from collections.abc import Iterator
from typing import Final

from vitlens.analysis.robustness.verdict import CheckState, verdict
from vitlens.commands.attack.record import CHECKS
from vitlens.records import Record
from vitlens.report.document import Section, Sentence, Table, sentences

_STATES: Final = {
    CheckState.PASSED: "as expected",
    CheckState.INCONCLUSIVE: "inconclusive",
    CheckState.FAILED: "**no**",
}
_ORDER: Final = (CheckState.FAILED, CheckState.INCONCLUSIVE, CheckState.PASSED)
_WHY: Final = (
    "A faulty attack makes a model appear robust. The checks test properties of every sound attack and look for signs "
    "of masked gradients (Athalye 2018, Carlini 2019), on a few images that each model classifies correctly."
)


def verdict_sentences(record: Record) -> Iterator[Sentence]:
    """The result of the self-checks, model by model."""
    for alias in record.aliases:
        rows = tuple(row for row in record.rows(CHECKS) if row.model == alias)
        said = verdict([row.check for row in rows], of=f"The attacks on {alias}")
        yield Sentence(said, rows or (alias,))


def checks(record: Record) -> Section:
    """Every check of every attack on every model."""
    rows = sorted(record.rows(CHECKS), key=lambda row: _ORDER.index(row.check.state))
    table = Table.of(
        "Self-checks, those that failed or could not have failed first",
        rows,
        {
            "model": lambda row: row.model,
            "check": lambda row: row.name,
            "attack": lambda row: row.attack,
            "expected": lambda row: row.expected,
            "found": lambda row: row.found,
            "verdict": lambda row: _STATES[row.check.state],
        },
    )
    states = [row.check.state for row in rows]
    failed, open_ = states.count(CheckState.FAILED), states.count(CheckState.INCONCLUSIVE)
    counts = f"{failed} failed and {open_} could not have failed, as nothing was fooled in them"
    said = f"Of {len(rows)} self-checks {counts}." if rows else "No image was attacked, so no attack was checked."
    lines = (Sentence(said, (len(rows), failed, open_)), *sentences(_WHY, says="method"))
    return Section("Self-checks of the attacks", lines, (table,), leading=True)
