"""What was learned: statements of the literature, each confirmed, contradicted or left open by this study's numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from vitlens.commands.compare.record import HARDENED
from vitlens.commands.explain.record import CHECKS, LEAGUE
from vitlens.commands.shared.calibration import CALIBRATION_ERROR
from vitlens.commands.shared.maps.on_object import ATTENTION, ROLLOUT, mass_of
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.report.document import Section, Sentence, Table
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Estimate, Side, apart, beyond

State = Literal["confirmed", "contradicted", "not decided"]
_ENOUGH: Final = 0.2  # share of the heads that "many heads" stands for


@dataclass(frozen=True)
class Judgement:
    """What this study's numbers say of a statement, and the rows and estimates that say it."""

    state: State
    evidence: str
    rows: tuple[object, ...]


@dataclass(frozen=True)
class Statement:
    """A statement of the literature with its source; judge: from a study to the judgement, None: not measured."""

    text: str
    source: str
    judge: Callable[[Study], Judgement | None]


def learned(study: Study) -> Section | None:
    """The statements that the study can judge, with the evidence; None where there is none."""
    judged = [(statement, statement.judge(study)) for statement in STATEMENTS]
    known = [(statement, judgement) for statement, judgement in judged if judgement is not None]
    if not known:
        return None
    table = Table.of(
        "Statements of the literature against this study",
        known,
        {
            "statement": lambda pair: pair[0].text,
            "source": lambda pair: pair[0].source,
            "here": lambda pair: pair[1].state,
            "evidence": lambda pair: pair[1].evidence,
        },
    )
    rows = tuple(row for _, judgement in known for row in judgement.rows)
    counts = {word: sum(judgement.state == word for _, judgement in known) for word in ("confirmed", "contradicted")}
    open_ones = len(known) - sum(counts.values())
    summary = Sentence(
        f"Of {len(known)} statements of the literature, these models and images confirm {counts['confirmed']}, "
        f"contradict {counts['contradicted']} and do not decide {open_ones}.",
        rows,
    )
    question = "Which statements of the literature hold here?"
    return Section("What was learned", (summary,), (table,), question=question, leading=True)


def _compared(study: Study, metric: Callable[[str], str], *, vit_higher: bool) -> Judgement | None:
    """Whether a metric of the ViT lies above (or below) the CNN's, by their intervals."""
    if study.pair is None:
        return None
    vit, cnn = study.pair
    first, second = study.metric(metric(vit)), study.metric(metric(cnn))
    if first is None or second is None:
        return None
    return _judged(first, second, f"{vit} {in_words(first)}, {cnn} {in_words(second)}", higher=vit_higher)


def _judged(first: Estimate, second: Estimate, evidence: str, *, higher: bool) -> Judgement:
    side = apart(first, second)
    wanted = Side.ABOVE if higher else Side.BELOW
    state: State = "not decided" if side is Side.UNDECIDED else "confirmed" if side is wanted else "contradicted"
    return Judgement(state, evidence, (first, second))


def _less_accurate(study: Study) -> Judgement | None:
    if study.pair is None:
        return None
    gain = study.metric("accuracy_difference/{}/{}".format(*study.pair))
    if gain is None:
        return None
    side, evidence = beyond(gain, 0.0), f"{study.pair[0]} minus {study.pair[1]}: {in_words(gain)}"
    states: dict[Side, State] = {Side.BELOW: "confirmed", Side.ABOVE: "contradicted", Side.UNDECIDED: "not decided"}
    return Judgement(states[side], evidence, (gain,))


def _better_calibrated(study: Study) -> Judgement | None:
    return _compared(study, lambda alias: CALIBRATION_ERROR(model=alias), vit_higher=False)


def _hardened(kind: str, level: str) -> Callable[[Study], Judgement | None]:
    return lambda study: _compared(study, lambda alias: HARDENED(model=alias, kind=kind, level=level), vit_higher=True)


def _local_heads(study: Study) -> Judgement | None:
    chapter = next(study.of("stats"), None)
    rows = () if chapter is None else chapter.record.local
    parts = {row.part: row for row in rows}
    if len(parts) < 2:
        return None
    first, last = parts["first"], parts["last"]
    evidence = f"local heads: {first.local} of {first.heads} in the first layers, {last.local} of {last.heads} later"
    if first.local == last.local:
        return Judgement("not decided", evidence, (first, last))
    return Judgement("confirmed" if first.local > last.local else "contradicted", evidence, (first, last))


def _removable(study: Study) -> Judgement | None:
    chapter = next(study.of("ablate"), None)
    rows = [] if chapter is None else [row for row in chapter.record.curves if row.order == "least first"]
    if not rows or rows[0].accuracy.low is None:
        return None
    whole = rows[0]
    kept = [
        row for row in rows
        if row.accuracy.high is not None and row.accuracy.high >= whole.accuracy.value and row.removed
    ]  # fmt: skip
    most = max(kept, key=lambda row: row.removed, default=None)
    if most is None:
        return Judgement("contradicted", f"removing {rows[1].removed} heads lowers the accuracy", tuple(rows[:2]))
    state: State = "confirmed" if most.share >= _ENOUGH else "contradicted"
    kept_accuracy = in_words(most.accuracy)
    evidence = f"without {most.removed} heads ({percent(most.share)}) the accuracy is {kept_accuracy}"
    return Judgement(state, evidence, (most, whole))


def _rollout_locates(study: Study) -> Judgement | None:
    chapter = next(study.of("attention"), None)
    rows = () if chapter is None else chapter.record.on_object
    means, rollouts = mass_of(rows, ATTENTION), mass_of(rows, ROLLOUT)
    if not means or not rollouts:
        return None
    rollout, weights = rollouts[-1].estimate, means[-1].estimate
    evidence = f"on the object: rollout {in_words(rollout)}, attention of the last layer {in_words(weights)}"
    return _judged(rollout, weights, evidence, higher=True)


def _relevance_beats_rollout(study: Study) -> Judgement | None:
    chapter = next(study.of("explain"), None)
    if chapter is None:
        return None
    gaps = {
        method: chapter.record.metrics.get(CHECKS["gap"](model=chapter.row.alias, method=method))
        for method in ("relevance", "rollout")
    }
    first, second = gaps["relevance"], gaps["rollout"]
    if first is None or second is None:
        return None
    evidence = f"insertion minus deletion: relevance {in_words(first)}, rollout {in_words(second)}"
    return _judged(first, second, evidence, higher=True)


def _blind_maps(study: Study) -> Judgement | None:
    rows = [row for chapter in study.of("explain") for row in chapter.record.rows(LEAGUE) if not row.baseline]
    checked = [row for row in rows if row.randomisation is not None]
    if not checked:
        return None
    flagged = [f"{row.method} of {row.model}" for row in checked if row.flagged]
    evidence = f"failed the check: {', '.join(flagged) or 'none'} (of {len(checked)} maps)"
    return Judgement("confirmed" if flagged else "contradicted", evidence, tuple(checked))


def _more_robust(study: Study) -> Judgement | None:
    chapter = next(study.of("attack"), None)
    if chapter is None or study.pair is None:
        return None
    vit, cnn = study.pair
    rows = [row for row in chapter.record.curves if row.norm == "linf" and row.epsilon == 1.0]
    weakest = {
        alias: min((row for row in rows if row.model == alias), key=lambda row: row.accuracy.value, default=None)
        for alias in (vit, cnn)
    }
    first, second = weakest[vit], weakest[cnn]
    if first is None or second is None:
        return None
    evidence = (
        f"at 1/255: {vit} {in_words(first.accuracy)} ({first.title}), {cnn} {in_words(second.accuracy)} "
        f"({second.title})"
    )
    return _judged(first.accuracy, second.accuracy, evidence, higher=True)


STATEMENTS: Final = (
    Statement(
        "Trained on few images from scratch, a ViT is less accurate than a CNN.", "Dosovitskiy et al. 2021",
        _less_accurate,
    ),
    Statement("ViTs are better calibrated than CNNs.", "Minderer et al. 2021", _better_calibrated),
    Statement("Heads of early layers are more often local than those of late ones.", "Raghu et al. 2021", _local_heads),
    Statement(
        "Many heads can be removed without a loss of accuracy (at least a fifth).", "Michel et al. 2019", _removable
    ),
    Statement(
        "Rollout lies on the object more than the attention of the last layer.", "Abnar & Zuidema 2020",
        _rollout_locates,
    ),
    Statement("Relevance is more faithful than rollout.", "Chefer et al. 2021", _relevance_beats_rollout),
    Statement("Some attribution maps hardly depend on the model's weights.", "Adebayo et al. 2018", _blind_maps),
    Statement(
        "ViTs withstand missing patches better than CNNs (half of them hidden).", "Naseer et al. 2021",
        _hardened("occlusion", "0.5"),
    ),
    Statement(
        "ViTs withstand the loss of high frequencies better than CNNs (a blur that keeps 0.2 of the spectrum).",
        "Park & Kim 2022", _hardened("low-pass", "0.2"),
    ),
    Statement("ViTs are more robust to small L∞ perturbations than CNNs.", "Shao et al. 2022", _more_robust),
)  # fmt: skip
