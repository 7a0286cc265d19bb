"""The claim and section of `vitlens attack` on why two models differ in robustness."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.charts import intervals
from vitlens.commands.attack.reason_rows import CandidateRow, RobustnessGapRow
from vitlens.commands.attack.record import AttackRecord
from vitlens.report.claims import Claim
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Section
from vitlens.report.verdicts import Verdict

WHY: Final = "why robustness differs"


def claims(record: AttackRecord) -> Iterator[Claim]:
    """Yield what accounts for the difference in robustness of two models, or why nothing does.

    A record has at most one such difference: it is explained only if there are two models.
    """
    accounting = _accounting(record)
    for gap in record.robustness_gap:
        if not gap.differs:
            yield _nothing_to_explain(gap)
        elif accounting:
            yield _accounted(record, gap, accounting)
        else:
            yield _not_accounted(record, gap)
    for row in record.robustness_untested:
        verdict = Verdict("not tested", say("{{ reason|whole }}", reason=row.reason))
        yield Claim(WHY, say("{{ a }} and {{ b }}", a=row.first, b=row.second), verdict=verdict)


def _accounting(record: AttackRecord) -> list[CandidateRow]:
    """Return the candidates that account for a part of the difference, the largest part first."""
    rows = [row for row in record.robustness_candidates if row.accounts]
    return sorted(rows, key=lambda row: -row.accounted.value)


def _subject(gap: RobustnessGapRow) -> str:
    return say("{{ gap.first }} and {{ gap.second }}", gap=gap)


def _rests_on(gap: RobustnessGapRow) -> tuple[tuple[str, str], ...]:
    """Return the verdicts, as (question, model), that remove the claim if they are in doubt."""
    verdicts = []
    for question in ("robustness", "self-checks"):
        verdicts += [(question, gap.first), (question, gap.second)]
    return tuple(verdicts)


def _nothing_to_explain(gap: RobustnessGapRow) -> Claim:
    because = say(
        "under {{ gap.attack }} at {{ gap.at }}, robust accuracy does not differ significantly on "
        "the images that both models classify correctly ({{ gap.difference }})",
        gap=gap,
    )
    return Claim(WHY, _subject(gap), verdict=Verdict("not tested", because), is_null=True)


def _accounted(
    record: AttackRecord, gap: RobustnessGapRow, accounting: Sequence[CandidateRow]
) -> Claim:
    """Return the claim about the candidates that account for a difference."""
    row = accounting[0]
    title = row.title[:1].upper() + row.title[1:]  # str.capitalize would lower the other letters
    sentences = [
        _difference(gap),
        say(
            # of the points of the difference
            "{{ start }} accounts for {{ row.accounted|alone }} of them: "
            "{{ row.definition.change|whole }} {{ row.after|value }} are left, "
            "{{ row.definition.control|whole }} {{ row.control|value }}.",
            start=title,
            row=row,
        ),
    ]
    if len(accounting) > 1:
        parts = [
            say("{{ row.title|whole }} for {{ row.accounted|value }}", row=other)
            for other in accounting[1:]
        ]
        sentences.append(say("The parts overlap: {{ parts }}.", parts=listed(parts)))
    because = say(
        "{{ k }} of {{ n }} candidates account{{ end }} for a part of the difference beyond a "
        "control",
        k=len(accounting),
        n=len(record.robustness_candidates),
        end="s" if len(accounting) == 1 else "",
    )
    return Claim(
        WHY,
        _subject(gap),
        " ".join(sentences),
        say("{{ row.title|whole }} accounts for part of the difference in robustness", row=row),
        verdict=Verdict("pass", because),
        effect=row.accounted,
        p=row.p_holm,
        evidence="intervened",
        place="robustness_candidates",
        kind="comparison",
        rests_on=_rests_on(gap),
    )


def _difference(gap: RobustnessGapRow) -> str:
    """Return how much more robust one model is."""
    return say(
        "Under {{ gap.attack }} at {{ gap.at }}, **{{ gap.better }}** is "
        "{{ size|number(1) }} points more robust than **{{ gap.worse }}** on images that both "
        "classify correctly.",
        gap=gap,
        size=abs(gap.difference.value),
    )


def _not_accounted(record: AttackRecord, gap: RobustnessGapRow) -> Claim:
    """Return the claim that no candidate is shown to account for a difference."""
    candidates = record.robustness_candidates
    largest = max(candidates, key=lambda row: row.accounted.value)
    sentence = say(
        "None of {{ n }} candidates is shown to account for it. The largest part is that of "
        "{{ row.title|whole }}: {{ row.accounted|alone }}, p = {{ p }} after correction.",
        n=len(candidates),
        row=largest,
        p=round(largest.p_holm, 2),
    )
    because = say(
        "none of {{ n }} candidates changes the difference beyond its control after correction",
        n=len(candidates),
    )
    return Claim(
        WHY,
        _subject(gap),
        f"{_difference(gap)} {sentence}",
        verdict=Verdict("inconclusive", because),
        evidence="intervened",
        place="robustness_candidates",
        is_null=True,
        rests_on=_rests_on(gap),
    )


def answer(record: AttackRecord, claims: Sequence[Claim]) -> str:
    """Return the sentence of the claim, or why there is none, as the opening of the section.

    claims: the claims of the report after the sentences that rest on doubted measurements were
        removed.
    """
    for claim in claims:
        if claim.question == WHY and claim.says:
            return claim.says
    gap = record.robustness_gap[0]
    if gap.differs:
        return "The attacks are in doubt, so the difference in robustness is not explained."
    return say(
        "Under {{ gap.attack }} at {{ gap.at }}, robust accuracy of **{{ gap.first }}** and "
        "**{{ gap.second }}** does not differ significantly on images that both classify "
        "correctly. There is no difference to explain.",
        gap=gap,
    )


SECTION: Final = Section(
    "Why does robustness differ?",
    "robustness_candidates",
    about=(WHY,),
    columns=("possible_cause", "measured", "control", "after", "accounted", "p_holm"),
    order=lambda row: -row.accounted.value,
    charts=(
        Chart(
            "robustness_candidates",
            intervals("title", "accounted", reference=0.0),
            "Points of the difference in robust accuracy that each candidate accounts for, with "
            "95 % intervals: the difference under a control minus that under the change "
            "({{ first.accounted.n }} images).",
            title="What accounts for the difference in robustness",
        ),
    ),
)
