"""The section on the method that `--auto` chose: by what, how sure that is, and what the other images say."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.analysis.faithfulness.composite_kinds import COMPOSITE_KINDS
from vitlens.commands.explain.choice_record import (
    CERTAINTY,
    CHOICE,
    CHOICE_MARGINS,
    CHOICE_SCORE,
    CHOICE_SCORES,
    ChoiceMarginRow,
    ChoiceRow,
    ChoiceScoreRow,
)
from vitlens.commands.explain.report.league import SUBSTRATE_WORDS
from vitlens.commands.explain.report.maps import best_sentences
from vitlens.commands.shared.maps.findings import listed
from vitlens.commands.shared.maps.judged import in_three_decimals
from vitlens.commands.shared.maps.rows import BASELINES
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, percent
from vitlens.uncertainty import Estimate, Side, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS: Final = 12  # of the table
_SCORE: Final = "score"
_TITLES: Final = {"insertion_minus_deletion": "insertion − deletion", "localisation": "localisation, ROC-AUC"}
_CHANCE: Final = {"insertion_minus_deletion": 0.0, "localisation": 0.5}


def choice_sections(record: Record) -> Iterator[Section]:
    """A section for each model whose method was chosen, or one line where there were too few images to choose by."""
    for row in record.rows(CHOICE):
        several = f" for {row.model}" if len(record.aliases) > 1 else ""
        title = f"Chosen method{several}"
        if row.reason:
            words = f"{row.method} is the default method of {row.model}, not chosen by evidence: {row.reason}."
            yield Section(title, (Sentence(words, (row,)),), leading=True)
            continue
        said = (
            _answer(record, row),
            *_others(record, row),
            *best_sentences(record, row.candidates),
            *_left_out(row),
            _words(row),
        )
        yield Section(title, said, (_table(record, row),), (_figure(record, row),), leading=True)


def choice_limits(record: Record) -> Iterator[Sentence]:
    """What the choice does not say."""
    for row in record.rows(CHOICE)[:1]:
        if not row.reason:
            yield Sentence(
                f"{row.method} was chosen by {len(row.checks)} of the checks on {row.selection} images; that it fails "
                "no other check is not shown (`--verify`), and images of another kind may have another best method.",
                (row, len(row.checks)),
            )


def _answer(record: Record, row: ChoiceRow) -> Sentence:
    """Which method, how sure, and whether the other half confirms it."""
    certainty = record.metric(CERTAINTY(model=row.model))
    sure = (
        f"**{row.method}** is chosen for {row.model}: it has the highest score of {len(row.candidates)} candidates on "
        f"{row.selection} images, and in {percent(certainty.value, 1)} of {row.draws:,} bootstrap samples of them"
    )
    margin = _margin(record, row, row.runner_up)
    if margin is None:
        return Sentence(f"{sure}; all other candidates have the same maps.", (row, certainty, len(row.candidates)))
    other = f"{row.runner_up} by {in_words(margin.difference, with_n=False)}"
    words = {
        "confirmed": f"the other {row.report} images confirm it: its score is above that of {other}",
        "not confirmed": f"the other {row.report} images do not confirm it: its score differs from that of {other}",
        "contradicted": f"**the other {row.report} images contradict it**: its score differs from that of {other}",
    }
    return Sentence(
        f"{sure}; {words[row.confirmation or 'not confirmed']}.", (row, certainty, margin, len(row.candidates))
    )


def _others(record: Record, row: ChoiceRow) -> Iterator[Sentence]:
    """The chosen method beside the baselines and the best known methods, on the report half."""
    if row.alike:
        yield Sentence(f"The maps of {listed(row.alike)} are the same up to rounding.", (row,))
    margins = [_margin(record, row, name) for name in BASELINES]
    known = [margin for margin in margins if margin is not None]
    below = [margin.against for margin in known if beyond(margin.difference, 0.0) is not Side.ABOVE]
    floor = f"It is not shown to exceed the baseline {listed(below)}" if below else "It exceeds both baselines"
    differences = ", ".join(f"{margin.against} {in_words(margin.difference, with_n=False)}" for margin in known)
    yield Sentence(f"{floor} on the report half (differences of the score: {differences}).", tuple(known))
    rest = [
        margin
        for margin in record.rows(CHOICE_MARGINS)
        if (margin.model, margin.check) == (row.model, _SCORE) and margin.against not in (row.runner_up, *BASELINES)
    ]
    if rest:
        compared = ", ".join(f"{margin.against} {in_words(margin.difference, with_n=False)}" for margin in rest)
        yield Sentence(f"Differences of its score on the report half from other methods: {compared}.", tuple(rest))


def _left_out(row: ChoiceRow) -> Iterator[Sentence]:
    for check, reason in row.left_out.items():
        yield Sentence(f"Not judged by {check}: {reason}.", (row,))


def _words(row: ChoiceRow) -> Sentence:
    """The rule."""
    if row.localised == "objects":
        where = "the objects' masks"
    else:
        kind = COMPOSITE_KINDS[row.localised].title
        where = f"{kind} of images of the same half, of which the model's confident predictions are explained in turn"
    by = f"; localisation: on {where}" if "localisation" in row.checks else ""
    return Sentence(
        "The images are divided by a seeded draw: one half selects, the other reports. Score: the mean over the checks "
        "of a method's mean value, divided by the standard deviation of the methods' values on the selection half, so "
        f"that a score of 1 is one standard deviation{by}. Removed patches are replaced by "
        f"{SUBSTRATE_WORDS[row.substrate]}. Certainty says how often the same method would win with "
        "other images of this kind, not that its maps are right.",
        says="method",
    )


def _margin(record: Record, row: ChoiceRow, against: str | None, check: str = _SCORE) -> ChoiceMarginRow | None:
    rows = (each for each in record.rows(CHOICE_MARGINS) if each.model == row.model)
    return next((each for each in rows if (each.against, each.check) == (against, check)), None)


def _scores(record: Record, row: ChoiceRow) -> list[ChoiceScoreRow]:
    return [each for each in record.rows(CHOICE_SCORES) if each.model == row.model]


def _estimate(record: Record, row: ChoiceRow, half: str, check: str, method: str) -> Estimate:
    return record.metric(CHOICE_SCORE(model=row.model, half=half, check=check, method=method))


def _table(record: Record, row: ChoiceRow) -> Table:
    """Every candidate and baseline: the score that selected, and the values on the report half."""
    scores = _scores(record, row)
    baselines = [each for each in scores if each.baseline]
    shown = [*[each for each in scores if not each.baseline][: _ROWS - len(baselines)], *baselines]
    cells: list[tuple[Cell, ...]] = [
        (
            each.method,
            _estimate(record, row, "selection", _SCORE, each.method).value,
            "" if each.wins is None else percent(each.wins, 1),
            *(in_three_decimals(_estimate(record, row, "report", check, each.method)) for check in row.checks),
        )
        for each in shown
    ]
    columns = ("method", "score (selection)", "wins", *(f"{_TITLES[check]} (report)" for check in row.checks))
    caption = f"Candidates by their score on {row.selection} images, and their values on the other {row.report}"
    return Table(caption, columns, tuple(cells))


def _figure(record: Record, row: ChoiceRow) -> FigureSpec:
    suffix = f"_{row.model}" if len(record.aliases) > 1 else ""
    caption = (
        f"Candidates of {row.model} by their score on the selection half; values: mean and 95 % interval over the "
        f"{row.report} images of the report half; grey: baselines that ignore the model."
    )
    return FigureSpec(f"choice{suffix}", caption, partial(_draw, record, row))


def _draw(record: Record, row: ChoiceRow) -> "Figure":
    from vitlens.figures.league import Column, league_figure
    from vitlens.uncertainty import values_and_ends

    scores = _scores(record, row)
    columns = []
    for check in row.checks:
        known = [_estimate(record, row, "report", check, each.method) for each in scores]
        value, low, high = values_and_ends(known)
        columns.append(Column(_TITLES[check], value, low, high, chance=_CHANCE[check]))
    return league_figure(
        methods=[each.method for each in scores],
        columns=columns,
        baselines=[each.method for each in scores if each.baseline],
        title=f"{row.model}: candidates on the report half",
    )
