"""The study in short: one line for each question that a reader of the first page asks."""

from collections.abc import Iterator, Sequence

from vitlens.commands.attack.record import AttackCurveRow
from vitlens.commands.shared.trainings import TRAINING
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.commands.study.report.whole.first_page import SUBJECTS
from vitlens.commands.study.report.whole.heads import head_sentences
from vitlens.report.document import Section, Sentence, Verdict
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Side, beyond


def in_short(study: Study, verdicts: Sequence[Verdict]) -> Section | None:
    """Accuracy, maps, heads, robustness, and what was not shown, one sentence each."""
    lines = (*_accuracy(study), *_maps(verdicts), *_heads(study), *_breaking(study), *_open(study, verdicts))
    return Section("In short", tuple(lines), leading=True) if lines else None


def _accuracy(study: Study) -> Iterator[Sentence]:
    chapter = next(study.of("evaluate"), None)
    if chapter is None:
        return
    reached = {row.model: row.accuracy for row in chapter.record.scores}
    listed = ", ".join(f"{alias} {in_words(estimate)}" for alias, estimate in reached.items())
    text, rows = f"**Accuracy.** Top-1 accuracy: {listed}", [*reached.values()]
    for row in chapter.record.pairs:
        gain = row.difference
        if gain is not None:
            side = beyond(gain, 0.0)
            better = row.first if side is Side.ABOVE else row.second
            word = "no significant difference" if side is Side.UNDECIDED else f"{better} is significantly better"
            text += f"; {row.first} minus {row.second} {in_words(gain, with_n=False)}: {word}"
            rows.append(gain)
    yield Sentence(f"{text}.", tuple(rows))


def _maps(verdicts: Sequence[Verdict]) -> Iterator[Sentence]:
    """The verdict on each model's best map."""
    rows = [verdict for verdict in verdicts if verdict.subject.startswith("explanation")]
    if rows:
        listed = "; ".join(
            f"for {verdict.subject.removeprefix('explanation of ')} {verdict.because} ({verdict.state})"
            for verdict in rows
        )
        yield Sentence(f"**Map to trust.** {listed[:1].upper()}{listed[1:]}.", tuple(rows))


def _heads(study: Study) -> Iterator[Sentence]:
    for alias in study.vits:
        for sentence in head_sentences(study, alias):
            yield Sentence(f"**Heads.** {sentence.text}", sentence.rows)


def _breaking(study: Study) -> Iterator[Sentence]:
    """The smallest L∞ perturbation of any attack with which a model loses half of its accuracy."""
    chapter = next(study.of("attack"), None)
    rows = () if chapter is None else chapter.record.curves
    parts: list[str] = []
    backing: list[AttackCurveRow] = []
    for alias in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == alias and row.norm == "linf"]
        clean = max((row.accuracy.value for row in own if row.epsilon == 0), default=0.0)
        lost = [row for row in own if row.epsilon > 0 and row.accuracy.value < clean / 2]
        if lost:
            row = min(lost, key=lambda row: (row.epsilon, row.accuracy.value))
            words = f"at {row.at} ({row.title}, {in_words(row.accuracy)} left)"
        elif own:
            row = min(own, key=lambda row: row.accuracy.value)
            words = f"not within {row.at} ({row.title}, {in_words(row.accuracy)} left)"
        else:
            continue
        parts.append(f"{alias} {words}")
        backing.append(row)
    if parts:
        yield Sentence(f"**Breaking.** Half of the accuracy is lost: {'; '.join(parts)}.", tuple(backing))


def _open(study: Study, verdicts: Sequence[Verdict]) -> Iterator[Sentence]:
    """The subjects without a verdict, and what one study cannot show."""
    names = [verdict.subject for verdict in verdicts if verdict.state in ("inconclusive", "not tested")]
    names += [word for word in SUBJECTS if not any(verdict.subject.startswith(word) for verdict in verdicts)]
    listed = f"Inconclusive or not tested: {', '.join(names)}. " if names else ""
    trained = [budget for budget in study.record.rows(TRAINING) if budget.epochs]
    seeds = "other training seeds, " if trained else ""
    text = f"**Not shown.** {listed}Tried were neither {seeds}other data nor stronger attacks."
    rows = (*verdicts, *trained)
    yield Sentence(text, rows, "result" if rows else "setting")
