"""What models rely on: the tables, claims and section of a command that measures it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from vitlens.analysis.reliance.rows import (
    CueExampleArrays,
    CueExampleRow,
    CueHeadRow,
    CueMapRow,
    LeftOutCueRow,
    ReliancePairRow,
    RelianceRow,
    rank_interventions,
    rank_pairs,
)
from vitlens.charts import intervals
from vitlens.commands.shared.comparison import signed
from vitlens.record import Record, arrays, table
from vitlens.report.claims import Claim
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Section

_MOST_NAMED: Final = 3  # cues of a model in a sentence
_MOST_CLAIMS: Final = 2  # about each model, and about pairs of models


@dataclass(frozen=True, kw_only=True)
class RelianceRecord(Record):
    """The tables of a command that measures what models rely on."""

    reliance: tuple[RelianceRow, ...] = table()
    reliance_pairs: tuple[ReliancePairRow, ...] = table()
    reliance_left_out: tuple[LeftOutCueRow, ...] = table()
    cue_heads: tuple[CueHeadRow, ...] = table()
    cue_maps: tuple[CueMapRow, ...] = table()
    cue_examples: tuple[CueExampleRow, ...] = table()
    cue_pictures: Mapping[str, CueExampleArrays] = arrays("cue-{model}")

    @property
    def misled(self) -> str:
        """Return the model that a cue misleads most, "" for none."""
        rows = [row for row in self.reliance if row.misleads]
        if not rows:
            return ""
        strongest = max(rows, key=lambda row: row.gained.value)
        return strongest.model


def claims(record: RelianceRecord) -> Iterator[Claim]:
    """Yield what each model relies on most, and what one relies on more than another."""
    for model in record.aliases:
        # one row for each cue that changes predictions or misleads; misleading is another claim
        ranked = rank_interventions(record.reliance, model)
        supported = [row for row in ranked if row.changes_predictions]
        for row in supported[:_MOST_CLAIMS]:
            yield _reliance_claim(row, ranked[0])
    for pair in rank_pairs(record.reliance_pairs)[:_MOST_CLAIMS]:
        yield _difference_claim(record, pair)


def _reliance_claim(row: RelianceRow, top: RelianceRow) -> Claim:
    """Return the claim that a model relies on a cue, and that it relies more on the top one."""
    relies = "relies on {{ row.title|whole }}"
    if top.strength > row.strength:
        relies += ", and more on {{ top.title|whole }}"
    words = (
        "**{{ row.model }}** " + relies + ". On images {{ row.change|whole }}, "
        "{{ row.changed_by|value }} of its predictions change; {{ row.control|whole }}, "
        "{{ row.changed_by_control|value }}."
    )
    return Claim(
        f"reliance on {row.title}",
        row.model,
        say(words, row=row, top=top),
        say("{{ row.model }} " + relies, row=row, top=top),
        effect=row.changed,
        p=row.p_holm,
        evidence="intervened",
        place="reliance",
        kind="comparison",
    )


def _difference_claim(record: RelianceRecord, pair: ReliancePairRow) -> Claim:
    """Return the claim that one model (`pair.more`) relies more on a cue than the other."""
    is_first_more = pair.more == pair.first
    other = pair.second if is_first_more else pair.first
    rows = {row.model: row for row in record.reliance if _is_same_intervention(row, pair)}
    says = say(
        "**{{ pair.more }}** relies more on {{ pair.title|whole }} than **{{ other }}**. On "
        "images {{ pair.change|whole }}, {{ more.changed_by|value }} and "
        "{{ less.changed_by|value }} of their predictions change; {{ more.control|whole }}, "
        "{{ more.changed_by_control|value }} and {{ less.changed_by_control|value }}.",
        pair=pair,
        other=other,
        more=rows[pair.more],
        less=rows[other],
    )
    return Claim(
        f"difference in reliance on {pair.title}",
        f"{pair.more} and {other}",
        says,
        say(
            "{{ pair.more }} relies more on {{ pair.title|whole }} than {{ other }}",
            pair=pair,
            other=other,
        ),
        effect=signed(pair.changed, keep=is_first_more),
        p=pair.p_holm,
        evidence="intervened",
        place="reliance",
        kind="comparison",
    )


def _is_same_intervention(row: RelianceRow, other: RelianceRow | ReliancePairRow) -> bool:
    return (row.cue, row.intervention) == (other.cue, other.intervention)


def unknown(record: RelianceRecord) -> Iterator[str]:
    """Yield what could not be tested, and controls that are not matched."""
    # consecutive rows with one reason share a sentence
    for reason, rows in groupby(record.reliance_left_out, lambda row: row.reason):
        titles = list(dict.fromkeys(row.title for row in rows))
        yield say(
            "Not tested: reliance on {{ titles }}, as {{ reason|whole }}.",
            titles=listed(titles),
            reason=reason,
        )
    unmatched = dict.fromkeys(row.change for row in record.reliance if not row.is_matched)
    if unmatched:
        yield say(
            "No control matches images {{ changes }}, so these support no causal claim.",
            changes=listed(list(unmatched)),
        )


def _answer(record: RelianceRecord) -> str:
    """Return what each model is shown to rely on, in the order of the effects."""
    sentences = list[str]()
    for model in record.aliases:
        rows = rank_interventions(record.reliance, model)[:_MOST_NAMED]
        titles = [say("{{ row.title|whole }}", row=row) for row in rows]
        sentences.append(
            say(
                "**{{ model }}** {% if titles %}relies most on {{ titles|whole }}{% else %}is "
                "not shown to rely on any cue that was tested{% endif %}.",
                model=model,
                titles=Marked(", then on ".join(titles)),
            )
        )
    return " ".join(sentences)


def _strongest_interventions(record: RelianceRecord) -> list[RelianceRow]:
    """Return, for each cue, the rows of all models under its strongest intervention.

    The strongest cue comes first. The strongest intervention of a cue has the largest effect on any
    model.
    """
    strongest: dict[str, RelianceRow] = {}
    for row in record.reliance:
        if not row.is_matched:
            continue
        if row.cue not in strongest or row.strength > strongest[row.cue].strength:
            strongest[row.cue] = row
    rows = []
    for top in sorted(strongest.values(), key=lambda row: -row.strength):
        rows += [row for row in record.reliance if _is_same_intervention(row, top)]
    return rows


SECTION: Final = Section(
    "What {% if record.aliases|length > 1 %}do the models{% else %}does the model{% endif %} rely "
    "on?",
    "reliance",
    opening=_answer,
    columns=("model", "cue_and_change", "changed", "lost", "control", "p_holm"),
    order=lambda row: -row.strength,
    charts=(
        Chart(
            "reliance",
            intervals("title", "changed", of="model", reference=0.0),
            "Predictions changed without each cue, minus those under a control that changes "
            "pixels equally; left of the dashed line the control matters more. All "
            "interventions: tables/reliance.csv.",
            title="What predictions depend on ({{ rows|map(attribute='n')|max }} images)",
            rows=_strongest_interventions,
        ),
    ),
)
