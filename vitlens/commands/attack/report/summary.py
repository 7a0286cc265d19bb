"""Clean accuracy, accuracy under each attack, paired tests of the models, and the result of the self-checks."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.attack.epsilons import AXES, epsilon_words
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import CURVES, ROBUST_PAIRS
from vitlens.commands.attack.record.rows import AttackCurveRow, RobustPairRow
from vitlens.commands.attack.report.checks import verdict_sentences
from vitlens.commands.attack.report.corruptions import corruption_sentences
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
        *_clean_sentences(rows),
        *_attack_sentences(rows),
        *_clean_pair_sentences(pairs),
        *_pair_sentences(pairs),
        *verdict_sentences(record),
        *corruption_sentences(record),
    )
    return Section("Summary", lines, figures=(FigureSpec("curves", _CAPTION, partial(_draw, record)),), leading=True)


def preface(record: Record) -> tuple[Sentence, ...]:
    """What was attacked."""
    predicted = predicted_sentences(record.options(AttackOptions).predicted)
    return (*data_sentences(record), *_size_sentences(record), *predicted)


def _size_sentences(record: Record) -> Iterator[Sentence]:
    data = record.config.data
    if data is not None:
        yield Sentence(f"Images are attacked at {data.size[0]}x{data.size[1]} px.", (data,))


def _clean_sentences(rows: Sequence[AttackCurveRow]) -> Iterator[Sentence]:
    """The clean accuracy of each model, or that it classifies no image correctly."""
    for alias, row in {row.model: row for row in rows if row.epsilon == 0}.items():
        if row.accuracy == 0:
            yield Sentence(
                f"**{alias} classifies none of the {row.n:,} images correctly: there is nothing to attack**, and its "
                "curves are flat at 0.",
                (row,),
            )
        else:
            yield Sentence(f"{alias}: top-1 accuracy {in_words(row.estimate)} on the clean images.", (row,))


def _attack_sentences(rows: Sequence[AttackCurveRow]) -> Iterator[Sentence]:
    """The accuracy of each model under each attack at the smallest and the largest epsilon."""
    for alias in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == alias]
        if not any(row.accuracy > 0 for row in of_model):
            continue
        parts, shown = [], []
        for attack in dict.fromkeys(row.attack for row in of_model):
            tried = [row for row in of_model if row.attack == attack and row.epsilon > 0]
            chosen = tried[:1] + tried[1:][-1:]
            parts.append(f"{chosen[0].title} {', '.join(_accuracy_at(row) for row in chosen)}")
            shown += chosen
        yield Sentence(f"Accuracy of {alias} under attack: {'; '.join(parts)}.", tuple(shown))


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


def _pair_sentences(rows: Sequence[RobustPairRow]) -> Iterator[Sentence]:
    """Which of two models is more robust, and in how many of the paired tests."""
    attacked = [row for row in rows if row.attack != "clean"]
    for first, second in dict.fromkeys((row.first, row.second) for row in attacked):
        tests = [row for row in attacked if (row.first, row.second) == (first, second)]
        significant = [row for row in tests if row.p_holm <= LEVEL and row.difference != 0]
        if not significant:
            text = f"{first} and {second}: no difference in robustness is shown in {len(tests)} paired tests."
            yield Sentence(text, tuple(tests))
            continue
        more_robust = {
            first: [row for row in significant if row.difference > 0],
            second: [row for row in significant if row.difference < 0],
        }
        parts = [
            f"{alias} is more robust in {len(rows_of)} ({_largest(rows_of)})"
            for alias, rows_of in more_robust.items()
            if rows_of
        ]
        rest = len(tests) - len(significant)
        undecided = f"; {rest} show no difference" if rest else ""
        yield Sentence(
            f"{first} and {second}, {len(tests)} paired tests after Holm's correction: {'; '.join(parts)}{undecided}.",
            tuple(tests),
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
