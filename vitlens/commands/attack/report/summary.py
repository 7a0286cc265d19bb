"""Clean accuracy, accuracy under each attack, paired tests of the models, and the result of the self-checks."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.attack.comparable import at_floor, informative, strongest
from vitlens.commands.attack.epsilons import AXES, epsilon_words
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import CURVES, ROBUST_PAIRS
from vitlens.commands.attack.record.rows import AttackCurveRow, RobustPairRow
from vitlens.commands.attack.report.checks import verdict_sentences
from vitlens.commands.attack.report.distances import accuracies
from vitlens.commands.scaffold.describe import data_sentences, predicted_sentences
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, values_and_ends

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.figures.attack.curves import Panel

_NORMS: Final = {"linf": "L∞ attacks", "l2": "L2 attacks", "patch": "a patch"}
_CAPTION: Final = (
    "Robust accuracy: the fraction of all images that a model classifies correctly when clean and with every "
    "perturbation found within epsilon; at 0: clean accuracy. It is an upper bound, as a stronger attack may lower it. "
    "Epsilons of different norms are not comparable."
)


def summary(record: Record) -> Section:
    """The main results, with the curves over epsilon."""
    rows, pairs = record.rows(CURVES), record.rows(ROBUST_PAIRS)
    lines = (
        *_strongest_sentences(rows),
        *_pair_sentences(pairs, rows),
        *_clean_pair_sentences(pairs),
        *verdict_sentences(record),
    )
    figure = FigureSpec("curves", _CAPTION, partial(_draw, record))
    return Section("Summary", lines, (accuracies(record),), (figure,), leading=True)


def preface(record: Record) -> tuple[Sentence, ...]:
    """What was attacked."""
    predicted = predicted_sentences(record.options(AttackOptions).predicted)
    return (*data_sentences(record), *_size_sentences(record), *predicted)


def _size_sentences(record: Record) -> Iterator[Sentence]:
    data = record.config.data
    if data is not None:
        size = f"{data.size[0]}x{data.size[1]} px"
        yield Sentence(f"Images are attacked at {size}.", (data,), says="setting")


def _strongest_sentences(rows: Sequence[AttackCurveRow]) -> Iterator[Sentence]:
    """The accuracy of each model under the strongest attack at each epsilon, beside its clean accuracy."""
    for alias in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == alias]
        clean = next((row for row in of_model if row.epsilon == 0), None)
        if clean is not None and clean.accuracy == 0:
            yield Sentence(
                f"**{alias} classifies none of the {clean.n:,} images correctly: there is nothing to attack**, and its "
                "curves are flat at 0.",
                (clean,),
            )
            continue
        shown: list[AttackCurveRow] = []
        for norm in _NORMS:
            tried = [row for row in of_model if row.norm == norm and row.epsilon > 0]
            for epsilon in sorted({row.epsilon for row in tried}):
                row = strongest([row for row in tried if row.epsilon == epsilon])
                shown += [row] if row is not None else []
        parts = "; ".join(f"{_accuracy_at(row)} ({row.title})" for row in shown)
        first = "" if clean is None else f"top-1 accuracy {in_words(clean.estimate)} on the clean images; "
        rest = () if clean is None else (clean,)
        yield Sentence(f"{alias}: {first}under the strongest attack at each epsilon {parts}.", (*shown, *rest))


def _accuracy_at(row: AttackCurveRow) -> str:
    return f"{in_words(row.estimate, with_n=False)} at {epsilon_words(row.epsilon, row.norm)}"


def _clean_pair_sentences(rows: Sequence[RobustPairRow]) -> Iterator[Sentence]:
    """Models that differ before any attack."""
    for row in rows:
        if row.attack == "clean" and row.p_holm <= LEVEL:
            better = row.first if row.difference > 0 else row.second
            yield Sentence(
                f"On clean images {better} has the higher accuracy ({_points(row)}, {row.first} minus {row.second}): "
                "robust accuracies include that difference.",
                (row,),
            )


def _pair_sentences(rows: Sequence[RobustPairRow], curves: Sequence[AttackCurveRow]) -> Iterator[Sentence]:
    """Which of two models is more robust, first under the strongest attack; tests that say nothing are said to."""
    attacked = [row for row in rows if row.attack != "clean"]
    for first, second in dict.fromkeys((row.first, row.second) for row in attacked):
        tests = [row for row in attacked if (row.first, row.second) == (first, second)]
        telling = informative(tests, curves)
        floor = [row for row in tests if at_floor(row, curves)]
        silent = [
            (len(floor), "both are at 0 %"),
            (len(tests) - len(telling) - len(floor), "neither has lost any accuracy"),
        ]
        said = " and ".join(f"in {count} {why}" for count, why in silent if count)
        if not telling:
            text = f"{first} and {second} cannot be compared under attack: of {len(tests)} paired tests {said}."
            yield Sentence(text, tuple(tests))
            continue
        yield _most_telling(telling, curves)
        yield _counted(first, second, telling, f" ({said}, which says nothing)" if said else "", len(tests))


def _most_telling(rows: Sequence[RobustPairRow], curves: Sequence[AttackCurveRow]) -> Sentence:
    """The test under the attack that leaves the two least accuracy at the smallest epsilon."""
    norms = list(_NORMS)

    def left(row: RobustPairRow) -> tuple[int, float, float]:
        accuracies = [curve.accuracy for curve in curves if (curve.attack, curve.epsilon) == (row.attack, row.epsilon)]
        return norms.index(row.norm), row.epsilon, sum(accuracies)

    row = min(rows, key=left)
    better = row.first if row.difference > 0 else row.second
    where = f"Under {row.title} at {epsilon_words(row.epsilon, row.norm)}"
    if row.p_holm > LEVEL:
        text = f"{where} {row.first} minus {row.second} is {in_words(row.estimate)}: no difference is shown."
    else:
        text = f"{where} {better} has the higher accuracy: {row.first} minus {row.second} is {in_words(row.estimate)}."
    return Sentence(text, (row, row.estimate))


def _counted(first: str, second: str, telling: Sequence[RobustPairRow], silent: str, count: int) -> Sentence:
    """How many of the tests that could show something do, for each model."""
    significant = [row for row in telling if row.p_holm <= LEVEL and row.difference != 0]
    more_robust = {
        first: [row for row in significant if row.difference > 0],
        second: [row for row in significant if row.difference < 0],
    }
    parts = [f"{alias} is more robust in {len(rows)} ({_largest(rows)})" for alias, rows in more_robust.items() if rows]
    rest = len(telling) - len(significant)
    parts += [f"{rest} show no difference"] if rest else []
    return Sentence(
        f"Of {count} paired tests of {first} and {second}{silent}, after Holm's correction: {'; '.join(parts)}.",
        (*telling, count, *range(count)),
    )


def _largest(rows: Sequence[RobustPairRow]) -> str:
    row = max(rows, key=lambda row: abs(row.difference))
    return f"largest difference under {row.title} at {epsilon_words(row.epsilon, row.norm)}: {_points(row)}"


def _points(row: RobustPairRow) -> str:
    """The size of a difference; its interval starts at 0 where both signs are possible."""
    size = number(abs(row.difference), 1)
    if row.low is None or row.high is None:
        return f"{size} points"
    low, high = sorted((abs(row.low), abs(row.high)))
    return f"{size} points ({number(low if row.low * row.high > 0 else 0.0, 1)} to {number(high, 1)})"


def _draw(record: Record) -> "Figure":
    from vitlens.figures.attack.curves import robust_curves

    rows, aliases = record.rows(CURVES), record.aliases
    images = f"{rows[0].n:,} images"
    if len(aliases) == 1:
        title = f"Accuracy of {aliases[0]} under attack, {images}"
        return robust_curves(panels=list(_panels_of_norms(rows)), title=title)
    return robust_curves(panels=list(_panels_of_attacks(rows)), title=f"Accuracy under attack, {images}")


def _panels_of_norms(rows: Sequence[AttackCurveRow]) -> "Iterator[Panel]":
    """For one model: a panel for the attacks of one norm with the same epsilons, a curve for each attack."""
    from vitlens.figures.attack.curves import Panel

    by_panel: dict[tuple[object, ...], list[AttackCurveRow]] = {}
    for norm in dict.fromkeys(row.norm for row in rows):
        for title in dict.fromkeys(row.title for row in rows if row.norm == norm):
            curve = [row for row in rows if row.title == title]
            by_panel.setdefault((norm, *_epsilons(curve)), []).extend(curve)
    for of_panel in by_panel.values():
        norm, titles = of_panel[0].norm, dict.fromkeys(row.title for row in of_panel)
        curves = {title: _curve([row for row in of_panel if row.title == title]) for title in titles}
        yield Panel(_NORMS[norm], AXES[norm], _epsilons(of_panel), curves)


def _panels_of_attacks(rows: Sequence[AttackCurveRow]) -> "Iterator[Panel]":
    """For several models: a panel for each attack, a curve for each model."""
    from vitlens.figures.attack.curves import Panel

    for title in dict.fromkeys(row.title for row in rows):
        of_attack = [row for row in rows if row.title == title]
        models = dict.fromkeys(row.model for row in of_attack)
        curves = {alias: _curve([row for row in of_attack if row.model == alias]) for alias in models}
        yield Panel(title, AXES[of_attack[0].norm], _epsilons(of_attack), curves)


def _epsilons(rows: Sequence[AttackCurveRow]) -> list[float]:
    return sorted({row.epsilon for row in rows})


def _curve(rows: Sequence[AttackCurveRow]) -> list[list[float]]:
    """Values, lows and highs in the order of the epsilons."""
    return values_and_ends(row.estimate for row in sorted(rows, key=lambda row: row.epsilon))
