"""Attention on errors: the tables, claims and section of `vitlens compare`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.analysis.failures.attention_rows import OutcomeAttentionRow, UntestedAttentionRow
from vitlens.charts import lines
from vitlens.record import Record, by, table
from vitlens.report.claims import FEWEST, Claim
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Section
from vitlens.report.verdicts import Verdict

ATTENTION_ON_ERRORS: Final = "attention on errors"


@dataclass(frozen=True, kw_only=True)
class OutcomeAttentionRecord(Record):
    """The tables of a command that compares attention on errors and on correct predictions."""

    attention_on_errors: tuple[OutcomeAttentionRow, ...] = table()
    attention_untested: tuple[UntestedAttentionRow, ...] = table()


def claims(record: OutcomeAttentionRecord) -> Iterator[Claim]:
    """Yield how the attention of each ViT differs on errors, or why that is not known."""
    for model, rows in by(record.attention_on_errors, "model").items():
        differing = [row for row in rows if row.differs]
        if differing:
            yield _differs(strongest(differing), differing, rows)
        else:
            yield _undecided(model, rows)
    if record.images < FEWEST:
        return
    for row in record.attention_untested:
        because = say("{{ reason|whole }}", reason=row.reason)
        verdict = Verdict("not tested", because)
        yield Claim(ATTENTION_ON_ERRORS, row.model, verdict=verdict)


def strongest(rows: Sequence[OutcomeAttentionRow]) -> OutcomeAttentionRow:
    """Return the row whose difference is largest, measured by its interval."""
    return max(rows, key=_clearness)


def _clearness(row: OutcomeAttentionRow) -> float:
    """Return the size of the difference in widths of its interval; 0 without a width."""
    difference = row.difference
    if difference.low is None or difference.high is None:
        return 0.0
    width = difference.high - difference.low
    if width == 0:  # without spread, the size of a difference has no scale
        return 0.0
    return abs(difference.value) / width


def _differs(
    row: OutcomeAttentionRow,
    differing: Sequence[OutcomeAttentionRow],
    rows: Sequence[OutcomeAttentionRow],
) -> Claim:
    """Return the claim about one row, the strongest of those that differ among all rows."""
    because = say(
        "{{ count }} of {{ tests }} comparisons of attention on errors and on correct predictions "
        "of one class differ",
        count=len(differing),
        tests=len(rows),
    )
    return Claim(
        ATTENTION_ON_ERRORS,
        row.model,
        say(
            "On errors of **{{ row.model }}**, attention in layer {{ row.layer }} "
            "{{ row.words|whole }} than on correct predictions of the same class: "
            "{{ row.failed|percent(1) }} compared with {{ row.passed|percent(1) }} ({{ gap }}).",
            row=row,
            gap=row.difference,
        ),
        say("On errors, attention of {{ row.model }} {{ row.words|whole }}", row=row),
        verdict=Verdict("warn", because),
        effect=row.difference,
        p=row.p_holm,
        place="attention_on_errors",
        kind="comparison",
    )


def _undecided(model: str, rows: Sequence[OutcomeAttentionRow]) -> Claim:
    row = strongest(rows)
    because = say(
        "none of {{ tests }} comparisons of attention on errors and on correct predictions of one "
        "class differs after correction; the clearest, {{ row.quantity_and_layer|whole }}, is "
        "{{ gap|alone }}",
        tests=len(rows),
        row=row,
        gap=row.difference,
    )
    return Claim(ATTENTION_ON_ERRORS, model, verdict=Verdict("inconclusive", because), is_null=True)


def _opening(record: OutcomeAttentionRecord) -> str:
    """Return a sentence for each model: that of its claim, or that no difference is shown."""
    sentences = []
    for claim in claims(record):
        if claim.state == "not tested":
            continue
        sentence = claim.says
        if not sentence:
            sentence = say(
                "Attention of **{{ model }}** on errors is not shown to differ from attention on "
                "correct predictions of the same class.",
                model=claim.subject,
            )
        sentences.append(sentence)
    return " ".join(sentences)


SECTION: Final = Section(
    "Does attention differ on errors?",
    "attention_on_errors",
    opening=_opening,
    about=(ATTENTION_ON_ERRORS,),
    columns=("model", "quantity_and_layer", "failed", "passed", "difference", "p_holm"),
    order=lambda row: (row.p_holm, -_clearness(row)),
    charts=(
        Chart(
            "attention_on_errors",
            lines("layer", "difference", of="model", panel="title", reference="no_difference"),
            "Attention on errors minus that on correct predictions of the same class, by layer, "
            "with 95 % intervals ({{ first.errors }} errors, {{ first.correct }} correct "
            "predictions); dashed: no difference.",
            title="Attention on errors",
        ),
    ),
)
