"""The section of a report on failures by category, and its findings; the words follow the causal tests."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.analysis.failures.taxonomy import CATEGORIES, FEWEST, MOST_ZOOM, NOT_EXPLAINED, TESTED, TESTS
from vitlens.commands.shared.failures.rows import (
    FAILURE_ARRAYS,
    FAILURE_EXAMPLES,
    FAILURES,
    REPAIRS,
    FailureExampleRow,
    FailureRow,
    RepairRow,
)
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Finding, Section, Sentence, Table
from vitlens.report.findings import finding
from vitlens.report.numbers import in_words, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE: Final = "Why images are misclassified"


def failure_sections(record: Record, methods: Mapping[str, str]) -> Iterator[Section]:
    """Categories of failures with their causal tests; nothing for a folder of before they were written.

    methods: the title of the method of each model's maps.
    """
    rows, tests = record.rows(FAILURES), record.rows(REPAIRS)
    if not rows:
        return
    yield Section(
        TITLE,
        (*_results(record.aliases, rows, tests), *_methods(rows, methods)),
        (_category_table(record.aliases, rows, tests), *_test_table(tests)),
        tuple(_figures(record, methods)),
        question="Why are images misclassified, and what shows it?",
    )


def findings_of(record: Record) -> Iterator[Finding | None]:
    """The causes that a test supports, then the categories that are more frequent among failures."""
    rows, tests = record.rows(FAILURES), record.rows(REPAIRS)
    figures = {alias: f"failure_examples_{index + 1}" for index, alias in enumerate(record.aliases)}
    supported = {(row.model, row.category) for row in tests if row.verdict == "supported"}
    for test in tests:
        if test.verdict == "supported":
            yield finding(
                _because(test),
                test.effect,
                kind="hidden fault",
                p=test.p_holm,
                figure=figures[test.model],
                rows=(test,),
            )
    for row in rows:
        if row.more_frequent and row.gap is not None and (row.model, row.category) not in supported:
            yield finding(
                f"{_frequency(row)} No test shows that this is their cause.",
                row.gap,
                kind="fact",
                figure=figures[row.model],
                rows=(row,),
            )


def _results(aliases: Sequence[str], rows: Sequence[FailureRow], tests: Sequence[RepairRow]) -> Iterator[Sentence]:
    """By model: the causes that are supported, what is only more frequent, what was not shown, what is left."""
    for alias in aliases:
        own = [row for row in rows if row.model == alias]
        of_model = [test for test in tests if test.model == alias]
        rest = next(row for row in own if row.category == NOT_EXPLAINED)
        if rest.of_failures is None and not any(row.failures for row in own):
            yield Sentence(
                f"**{alias}** misclassifies none of these images, so there is nothing to explain.", tuple(own)
            )
            continue
        supported = [test for test in of_model if test.verdict == "supported"]
        yield from (Sentence(_because(test), (test,)) for test in supported)
        if not of_model:
            yield Sentence(f"No causal test of the errors of **{alias}** is possible on these images.", tuple(own))
        elif not supported:
            yield Sentence(f"No causal test shows a cause of the errors of **{alias}**.", (*own, *of_model))
        named = {test.category for test in supported}
        yield from (Sentence(_frequency(row), (row,)) for row in own if row.more_frequent and row.category not in named)
        yield from _not_supported(alias, of_model)
        if rest.of_failures is not None:
            yield Sentence(
                f"**{alias}**: {in_words(rest.of_failures)} of its misclassified images are in no category that "
                "explains any.",
                (rest,),
            )
    yield from _not_judged(rows)


def _because(test: RepairRow) -> str:
    """The sentence that only a supported test may have."""
    known = TESTS[test.test]
    return (
        f"**{test.model}** misclassifies images because of {CATEGORIES[test.category].because}: where {known.change}, "
        f'{test.corrected} of {test.n} errors of the category "{CATEGORIES[test.category].title}" are corrected; where '
        f"{known.control}, {test.control}."
    )


def _frequency(row: FailureRow) -> str:
    return (
        f'The category "{CATEGORIES[row.category].title}" is more frequent among the misclassified images of '
        f"**{row.model}** ({_percent(row.failure_rate)}) than among its correct predictions "
        f"({_percent(row.success_rate)})."
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{number(100 * value, 1)} %"


def _not_supported(alias: str, tests: Sequence[RepairRow]) -> Iterator[Sentence]:
    """The tests that show no cause, and those of too few images."""
    failed = [test for test in tests if test.verdict == "not supported"]
    if failed:
        listed = "; ".join(
            f"{CATEGORIES[test.category].title}: {test.corrected} of {test.n} corrected, {test.control} by the control "
            f"(p = {number(test.p_holm)})"
            for test in failed
        )
        yield Sentence(f"Not supported by its test, for **{alias}**: {listed}.", tuple(failed))
    few = [test for test in tests if test.verdict == "too few"]
    if few:
        listed = ", ".join(f"{CATEGORIES[test.category].title} ({test.n})" for test in few)
        yield Sentence(f"Too few misclassified images of **{alias}** for a test: {listed}.", tuple(few))


def _not_judged(rows: Sequence[FailureRow]) -> Iterator[Sentence]:
    """What these data do not allow to judge."""
    unknown = [row for row in rows if row.category in CATEGORIES and not row.failures and not row.successes]
    by_need: dict[str, list[str]] = {}
    for row in unknown:
        titles = by_need.setdefault(CATEGORIES[row.category].needs, [])
        if CATEGORIES[row.category].title not in titles:
            titles.append(CATEGORIES[row.category].title)
    if by_need:
        listed = "; ".join(f"{', '.join(titles)} (needs {need})" for need, titles in by_need.items())
        needs = tuple(CATEGORIES[row.category].needs for row in unknown)
        yield Sentence(f"Not tested on these images: {listed}.", (*unknown, *needs))


def _methods(rows: Sequence[FailureRow], methods: Mapping[str, str]) -> Iterator[Sentence]:
    """The rules and tests that these images allow, and when a cause is called supported."""
    judged = {row.category for row in rows if row.failures or row.successes}
    categories = [known for name, known in CATEGORIES.items() if name in judged]
    tests = [test for test in TESTS.values() if test.category in judged]
    if categories:
        maps = ", ".join(f"{alias} ({title})" for alias, title in methods.items())
        of_maps = f", by maps of the predicted class of {maps}" if "elsewhere" in judged else ""
        rules = "; ".join(f"**{known.title}**: {known.rule}" for known in categories)
        yield Sentence(f"Categories of failures, not exclusive{of_maps}: {rules}.", says="method")
    if tests:
        changes = "; ".join(
            f"**{CATEGORIES[test.category].title}**: {test.change}; control: {test.control}" for test in tests
        )
        yield Sentence(
            f"Causal tests change at most {TESTED} misclassified images of a category, at random, and count those that "
            f"are then classified correctly: {changes}. Objects are enlarged at most {MOST_ZOOM:g} times.",
            says="method",
        )
        yield Sentence(
            f"A cause is supported where the change corrects more of at least {FEWEST} images than its control does "
            "(McNemar's exact test, p at most 0.05 after Holm's correction over all tests); only then is it called a "
            "cause.",
            says="method",
        )
    yield Sentence(
        "A category explains failures where its cause is supported or where it is more frequent among failures than "
        "among correct predictions (interval of Newcombe 1998, widened by Bonferroni for all comparisons). A "
        "doubtful label explains nothing: it names images to be looked at.",
        says="method",
    )
    untested = "; ".join(f"**{known.title}**: {known.untestable}" for known in categories if known.untestable)
    if untested:
        yield Sentence(f"Categories without a causal test: {untested}.", says="method")


def _category_table(aliases: Sequence[str], rows: Sequence[FailureRow], tests: Sequence[RepairRow]) -> Table:
    verdicts = {(test.model, test.category): test.verdict for test in tests}
    table: list[tuple[Cell, ...]] = []
    judged = {row.category for row in rows if row.failures or row.successes}
    for category in (*(name for name in CATEGORIES if name in judged), NOT_EXPLAINED):
        cells: list[Cell] = [CATEGORIES[category].title if category in CATEGORIES else NOT_EXPLAINED]
        for alias in aliases:
            own = next(row for row in rows if row.model == alias and row.category == category)
            cells += [_counted(own), in_words(own.of_successes, with_n=False)]
            cells += [verdicts.get((alias, category), _untested(own))]
        table.append(tuple(cells))
    columns = [f"{alias}: {what}" for alias in aliases for what in ("failures", "correct predictions", "causal test")]
    return Table(
        "How often each category holds, among misclassified and correctly classified images",
        ("category", *columns),
        tuple(table),
    )


def _untested(row: FailureRow) -> str:
    """Why a category has no verdict."""
    if row.category == NOT_EXPLAINED:
        return "–"
    if CATEGORIES[row.category].untestable:
        return "no test"
    if row.failure_rate is None:
        return "–"
    return "no failure" if row.failure_rate == 0 else "not possible"


def _counted(row: FailureRow) -> str:
    """ "9 of 18, 50.0 % (29.0 to 71.0)"."""
    if row.failure_rate is None:
        return "–"
    return f"{round(row.failure_rate * row.failures)} of {row.failures}, {in_words(row.of_failures, with_n=False)}"


def _test_table(tests: Sequence[RepairRow]) -> Iterator[Table]:
    if tests:
        yield Table.of(
            "Causal tests: misclassified images that are classified correctly after a change",
            tests,
            {
                "model": lambda row: row.model,
                "category": lambda row: CATEGORIES[row.category].title,
                "test": lambda row: row.test,
                "images": lambda row: row.n,
                "corrected": lambda row: in_words(row.of_changed, with_n=False),
                "by the control": lambda row: in_words(row.of_control, with_n=False),
                "difference": lambda row: in_words(row.effect, with_n=False),
                "p (Holm)": lambda row: number(row.p_holm),
                "cause": lambda row: row.verdict,
            },
        )


def _figures(record: Record, methods: Mapping[str, str]) -> Iterator[FigureSpec]:
    """For each model at most three failures of each category."""
    for index, alias in enumerate(record.aliases):
        rows = [row for row in record.rows(FAILURE_EXAMPLES) if row.model == alias]
        if rows and record.has(FAILURE_ARRAYS, model=alias):
            yield FigureSpec(
                f"failure_examples_{index + 1}",
                f"Misclassified images of {alias}, at most three of each category, drawn at random: the image with its "
                f"true class; the map of the predicted class ({methods[alias]}) in % of its greatest value, with the "
                "prediction; and, where the category has a causal test, the image after the change with the "
                "prediction then. An image can be in several categories.",
                partial(_draw_examples, record, alias, rows),
            )


def _draw_examples(record: Record, alias: str, rows: Sequence[FailureExampleRow]) -> "Figure":
    from vitlens.figures.failures import ChangedImages, failure_examples

    arrays = record.arrays(FAILURE_ARRAYS, model=alias)
    groups = []
    for category in dict.fromkeys(row.category for row in rows):
        members = [(at, row) for at, row in enumerate(rows) if row.category == category]
        at = [place for place, _ in members]
        own = [row for _, row in members]
        scaled: Any = np.float32(255)
        groups.append(
            ChangedImages(
                title=f"{CATEGORIES[category].title}: {own[0].test or 'no causal test'}",
                images=arrays.pixels[at] / scaled,
                maps=arrays.maps[at],
                masks=None if arrays.masks is None else arrays.masks[at],
                changed=arrays.changed[at] / scaled if own[0].test else None,
                truths=[row.truth for row in own],
                before=[(row.prediction, row.probability) for row in own],
                after=[(row.changed_prediction or "", row.changed_probability or 0.0) for row in own],
            )
        )
    return failure_examples(groups=groups, title=f"Misclassified images of {alias}, by category")
