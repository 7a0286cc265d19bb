"""Accuracy and time of every regime, convergence, and the number of images: sections of the report."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from vitlens.commands.run.describe import data_sentences
from vitlens.commands.study.record import DIFFERENCE, DIFFERENCES, RECIPES, TRIALS, ComparisonRow
from vitlens.commands.study.report.transfer.facts import (
    TransferFacts,
    caught_up_at,
    share_estimate,
    state_of,
    words,
)
from vitlens.commands.study.transfer.record import (
    CURVES,
    REACHED_ROWS,
    REGIME_ROWS,
    SHARE_GAPS,
    ReachedRow,
    RegimeRow,
)
from vitlens.commands.study.transfer.regimes import BY_SHARE, FROZEN, FULL, MARGIN, REACHED, REGIMES, WORDS, Regime
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_time, in_words, number, percent
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def result_section(facts: TransferFacts) -> Section:
    """Accuracy and time of every regime."""
    caption = (
        "Accuracy on the test images, the mean over seeds, with a 95 % interval that covers seeds and test images; "
        "grey ticks: single trainings; dashed: guessing. Seconds of one training with its evaluations, median over "
        "seeds; of the distilled regime with the training of its teacher."
    )
    figure = FigureSpec("regimes", caption, partial(_draw_regimes, facts))
    return Section(
        "Result", tuple(_summary(facts)), (_regime_table(facts),), (figure,), "Which way of adapting it is best?", True
    )


def _summary(facts: TransferFacts) -> Iterator[Sentence]:
    rows = sorted(facts.record.rows(REGIME_ROWS), key=lambda row: facts.accuracy(row.label).value)
    worst, best = rows[0], rows[-1]
    own, other = facts.accuracy(best.label), facts.accuracy(worst.label)
    yield Sentence(
        f"Highest: `{words(best.label)}`, top-1 accuracy {in_words(own)}; lowest: `{words(worst.label)}`, "
        f"{in_words(other)}.",
        (own, other, best, worst),
    )
    fast = min(rows, key=lambda row: row.seconds + row.before)
    slow = max(rows, key=lambda row: row.seconds + row.before)
    times = (slow.seconds + slow.before) / (fast.seconds + fast.before)
    yield Sentence(
        f"`{words(fast.label)}` takes {in_time(fast.seconds + fast.before)} a training, `{words(slow.label)}` "
        f"{number(times)} times as long.",
        (fast, slow, times, fast.seconds + fast.before),
    )


def _regime_table(facts: TransferFacts) -> Table:
    def seconds(row: RegimeRow) -> str:
        own = in_time(row.seconds)
        return f"{own} + {in_time(row.before)} of the teacher" if row.before else own

    columns = {
        "regime": lambda row: words(row.label),
        "accuracy": lambda row: in_words(facts.accuracy(row.label), with_n=False),
        "trained parameters": lambda row: row.trained,
        "epochs": lambda row: row.epochs,
        "time per training": seconds,
        "recipe": lambda row: row.recipe,
    }
    return Table.of("Every regime", facts.record.rows(REGIME_ROWS), columns)


def _draw_regimes(facts: TransferFacts) -> "Figure":
    from vitlens.figures.study.transfer import RegimeBar, regimes_in_rows

    bars = []
    for row in facts.record.rows(REGIME_ROWS):
        own = facts.accuracy(row.label)
        seeds = [trial.accuracy for trial in facts.record.rows(TRIALS) if trial.label == row.label]
        low = own.value if own.low is None else own.low
        high = own.value if own.high is None else own.high
        bars.append(RegimeBar(words(row.label), own.value, low, high, seeds, row.seconds, row.before))
    title = f"{facts.record.config.title}: {facts.design.seeds} seeds"
    return regimes_in_rows(regimes=bars, chance=1 / facts.design.classes, title=title)


def difference_section(facts: TransferFacts) -> Section:
    """The paired differences of the regimes, tested."""
    rows = facts.record.rows(DIFFERENCES)

    def size(row: ComparisonRow) -> str:
        return in_words(facts.record.metric(DIFFERENCE(model=row.label, against=row.against)), with_n=False)

    columns = {
        "regime": lambda row: words(row.label),
        "against": lambda row: words(row.against),
        "difference": size,
        "p": lambda row: row.p,
        "p (Holm)": lambda row: row.p_holm,
    }
    table = Table.of("Paired differences of accuracy, on the same test images", rows, columns)
    text = (
        "A difference is between accuracies on the same images; its unit is the seed, however many images: interval "
        "and p are Welch's over seeds (with one seed McNemar's test over images). p (Holm) is "
        f"corrected for all {len(rows)} differences."
    )
    return Section("Differences", (Sentence(text, tuple(rows), "method"),), (table,))


def convergence_section(facts: TransferFacts) -> Section:
    """Test accuracy by epoch and by time, and when each regime came near the best."""
    columns = {
        "regime": lambda row: words(row.label),
        "epochs": lambda row: "not reached" if row.epochs is None else row.epochs,
        "seconds": lambda row: "not reached" if row.seconds is None else round(row.seconds, 1),
    }
    rows = facts.record.rows(REACHED_ROWS)
    wanted = Estimate(rows[0].accuracy)
    table = Table.of(f"When the mean accuracy over seeds first reached {in_words(wanted)}", rows, columns)
    caption = (
        "Test accuracy after every epoch, mean over seeds; seconds on a logarithmic axis. The frozen regime computes "
        "its features once; the distilled one without the time of its teacher."
    )
    figure = FigureSpec("convergence", caption, partial(_draw_curves, facts))
    question = "How fast does each regime learn?"
    return Section("Convergence", tuple(_reached(rows, wanted)), (table,), (figure,), question, True)


def _reached(rows: tuple[ReachedRow, ...], wanted: Estimate) -> Iterator[Sentence]:
    there = [row for row in rows if row.epochs is not None]
    never = [row for row in rows if row.epochs is None]
    parts = [f"{words(row.label)} after epoch {row.epochs} and {in_time(row.seconds or 0.0)}" for row in there]
    parts += [f"{words(row.label)} not within its epochs" for row in never]
    yield Sentence(
        f"{percent(REACHED)} of the best mean test accuracy, {in_words(wanted)}, is reached by {', '.join(parts)}.",
        (*rows, wanted, REACHED),
    )


def _draw_curves(facts: TransferFacts) -> "Figure":
    from vitlens.figures.train.compared import learning_compared

    ways: dict[str, list[tuple[float, float, float]]] = {}
    ordered = sorted(
        facts.record.rows(CURVES), key=lambda row: ([r.label for r in REGIMES].index(row.label), row.epochs)
    )
    for (label, epochs), rows in groupby(ordered, key=lambda row: (row.label, row.epochs)):
        same = list(rows)
        means = [float(np.mean([getattr(row, name) for row in same])) for name in ("seconds", "accuracy")]
        ways.setdefault(words(label), []).append((epochs, *means))
    return learning_compared(ways=ways, title=f"Convergence on {facts.design.data}, mean over seeds")


def share_section(facts: TransferFacts) -> Section:
    """Accuracy by the number of training images, and where training from scratch catches up."""
    columns = {
        "regime": lambda row: words(row.label),
        "training images": lambda row: row.images,
        "share": lambda row: percent(row.share),
        "minus from scratch, points": lambda row: in_words(share_estimate(row)).removesuffix(" points"),
        "p (Holm)": lambda row: row.p_holm,
        "from scratch has": state_of,
    }
    table = Table.of("Advantage over training from scratch on the same images", facts.record.rows(SHARE_GAPS), columns)
    caption = (
        "Accuracy on the same test images, mean over seeds, with 95 % intervals over seeds and test images. All "
        "numbers of images have the same number of steps: fewer images are repeated."
    )
    figure = FigureSpec("shares", caption, partial(_draw_shares, facts))
    rule = (
        f"Training from scratch has caught up at a share where the interval's upper end of the advantage is at most "
        f"{MARGIN:g} points there and at all larger shares."
    )
    sentences = (*(_catch_up(facts, regime) for regime in (FULL, FROZEN)), Sentence(rule, (MARGIN,), "method"))
    question = "With how many images does training from scratch catch up?"
    return Section("Number of images", sentences, (table,), (figure,), question, True)


def _catch_up(facts: TransferFacts, own: Regime) -> Sentence:
    rows = facts.share_gaps(own)
    found, last = caught_up_at(rows), rows[-1]
    if found is not None:
        text = (
            f"Training from scratch catches up with {own.words} at {percent(found.share)} of the images "
            f"({found.images:,})."
        )
        return Sentence(text, (found,))
    told = (
        f"The share at which training from scratch catches up with {own.words} is not reached"
        if state_of(last) == "behind"
        else f"It is not decided at which share training from scratch catches up with {own.words}"
    )
    text = f"{told}: on all {last.images:,} images {own.words} minus from scratch is {in_words(share_estimate(last))}."
    return Sentence(text, (last, share_estimate(last)))


def _draw_shares(facts: TransferFacts) -> "Figure":
    from vitlens.figures.study.transfer import accuracy_by_share

    lines = {
        regime.words: [
            (row.images, row.accuracy, _end(row.low, row.accuracy), _end(row.high, row.accuracy))
            for row in facts.shares(regime)
        ]
        for regime in BY_SHARE
    }
    title = f"Accuracy by number of training images, {facts.design.data}"
    return accuracy_by_share(lines=lines, order=tuple(WORDS.values()), chance=1 / facts.design.classes, title=title)


def _end(end: float | None, value: float) -> float:
    return value if end is None else end


def training_section(facts: TransferFacts) -> Section:
    """What each regime is, on which images, and how it was trained."""
    design, (tested,) = facts.design, data_sentences(facts.record)
    blocks = f"The last blocks are {design.last} of {design.blocks}."
    sentences = (
        Sentence(
            f"Trained on {design.train_images:,} images, tested on {tested.text} The model had {design.pretrained:,} "
            f"classes. {blocks}",
            (design, *tested.rows),
            "setting",
        ),
        Sentence("; ".join(f"**{regime.words}**: {regime.meaning}" for regime in REGIMES) + ".", says="setting"),
        Sentence(
            "All regimes have the same augmentation (mirroring, where the data allows it) but the frozen one, whose "
            "features are computed once, and all but the frozen one the same number of epochs. Learning rates "
            "are fixed, from trials on other images (see the recipes): training from random weights takes larger "
            "steps. The last weights are tested; test images choose nothing.",
            says="setting",
        ),
        Sentence(
            "The weights of each training are in `points/`, in a folder that every command takes as a MODEL.",
            says="setting",
        ),
    )
    return Section("How the regimes were trained", sentences)


def recipe_tables(facts: TransferFacts) -> Iterator[Table]:
    """The recipe of each regime in full."""
    columns = {"setting": lambda row: row.setting, "value": lambda row: row.value}
    for label, rows in groupby(facts.record.rows(RECIPES), key=lambda row: row.preset):
        yield Table.of(f"Recipe: {words(label)}", list(rows), columns)
