"""The report of `vitlens explain`, from its record."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from vitlens.commands.explain.choice_record import CHOICE
from vitlens.commands.explain.conclusions import findings, verdicts
from vitlens.commands.explain.options import ALL, ExplainOptions
from vitlens.commands.explain.record import COMPLETENESS, IMAGES, MAPS, METHODS, ExplainImageRow, MethodRow
from vitlens.commands.explain.report.checks import check_sections
from vitlens.commands.explain.report.choice import choice_limits, choice_sections
from vitlens.commands.explain.report.composites import composite_sections
from vitlens.commands.explain.report.evidence import evidence_sections
from vitlens.commands.explain.report.explorer import explain_explorer
from vitlens.commands.explain.report.league import League, league_section, leagues
from vitlens.commands.explain.report.maps import has_classifier, map_figures, methods_of, target_words
from vitlens.commands.explain.report.trust import league_limits, trust_section
from vitlens.commands.run.describe import data_sentences
from vitlens.commands.shared.explorer import explorer_sentences
from vitlens.commands.shared.sheets import left_out_words
from vitlens.records import Record
from vitlens.report.document import Cell, Document, Section, Sentence, Table, sentences
from vitlens.report.findings import ranked

__all__ = ["report"]

_ROWS: Final = 24  # of the report's table of images


def report(record: Record) -> Document:
    """Which map to trust where that was checked, the maps, the checks one by one, the methods and the images."""
    known = list(leagues(record))
    maps = Section(
        "Maps",
        (
            *_unchecked(record),
            *_fault_sentences(record),
            *_completeness_sentences(record),
            *_agreeing(known),
        ),
        figures=tuple(figure for alias in record.aliases for figure in map_figures(record, alias)),
        leading=True,
    )
    checks = [section for league in known for section in _sections(league)]
    methods = Section(
        "Methods and their cost",
        tables=tuple(_method_table(alias, methods_of(record, alias)) for alias in record.aliases),
    )
    return Document(
        record.config.title,
        (
            *choice_sections(record),
            *map(trust_section, known),
            maps,
            *checks,
            methods,
            Section("Images", tables=(_image_table(record),)),
        ),
        limits=(*league_limits(record), *choice_limits(record), *_map_limits(record)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=(
            *data_sentences(record),
            *_left_out_images(record),
            *_target_sentences(record),
            *_engine_sentences(record),
            *_left_out_methods(record),
            *explorer_sentences(record),
        ),
        explorer=explain_explorer(record),
    )


def _sections(league: League) -> Iterator[Section]:
    """The checks of one model, one by one."""
    yield league_section(league)
    yield from check_sections(league)
    yield from composite_sections(league)
    yield from evidence_sections(league)


def _unchecked(record: Record) -> Iterator[Sentence]:
    """The answer of a run without --verify."""
    if not record.options(ExplainOptions).verify and not _by_evidence(record):
        rows = record.rows(METHODS)
        names = list(dict.fromkeys(row.title for row in rows))
        yield Sentence(
            f"None of these maps ({', '.join(names)}) was checked in this run, so none is shown to depend on what the "
            "model uses; `--verify` checks them.",
            rows,
        )


def _by_evidence(record: Record) -> bool:
    """Whether all methods were chosen by their checks on the images (--auto)."""
    rows = record.rows(CHOICE)
    return bool(rows) and not any(row.reason for row in rows)


def _agreeing(known: Sequence[League]) -> Iterator[Sentence]:
    """Which of the drawn maps are those of the best method."""
    for league in known:
        best = league.judged[0]
        yield Sentence(
            f"{league.alias}: the map of {best.check.method} has the best verdict, {best.state}; maps of the others "
            "are to be read with theirs.",
            (best.check,),
        )


def _map_limits(record: Record) -> Iterator[Sentence]:
    """The limits of maps that were not checked."""
    if record.options(ExplainOptions).verify or _by_evidence(record):
        return
    count = len(dict.fromkeys(row.method for row in record.rows(METHODS)))
    yield Sentence(
        f"No check was run on the {count} methods: a map that looks right may be that of any model (`--verify`).",
        (*record.rows(METHODS), count),
    )
    yield Sentence(
        f"The {count} methods answer different questions and need not agree: gradient methods measure the effect of "
        "small changes, occlusion, RISE and KernelSHAP that of removing parts, attention methods the weights between "
        "tokens.",
        (*record.rows(METHODS), count),
    )


def _left_out_images(record: Record) -> Iterator[Sentence]:
    """How many images figures draw, where they do not draw all."""
    drawn = len(record.arrays(MAPS, model=record.aliases[0]).images)
    total = record.config.data.images if record.config.data else drawn
    yield from sentences(*(f"{words}." for words in left_out_words(drawn, total)), says="setting")


def _target_sentences(record: Record) -> Iterator[Sentence]:
    """Which class the maps are of, and which models have none."""
    classless = [alias for alias in record.aliases if not has_classifier(record, alias)]
    for alias in classless:
        yield Sentence(
            f"{alias} has no classifier: it predicts no class, and methods that explain a class are left out.",
            says="setting",
        )
    if len(classless) < len(record.aliases):
        yield Sentence(f"Each map is of the logit of {target_words(record)}.", says="setting")


def _engine_sentences(record: Record) -> Iterator[Sentence]:
    if record.options(ExplainOptions).engine == "grad-cam":
        yield Sentence(
            "The maps are the grad-cam package's own, unaltered: negative values set to 0 (ReLU), each scaled to "
            "[0, 1] by its smallest and largest value, in the size of the model's input. Without --engine the same "
            "methods give raw, signed maps.",
            says="setting",
        )


def _left_out_methods(record: Record) -> Iterator[Sentence]:
    """Methods of --method that are not defined for a model."""
    names = record.options(ExplainOptions).method
    for alias in record.aliases:
        own = {row.method for row in methods_of(record, alias)}
        own |= {name for row in record.rows(CHOICE) if row.model == alias for name in row.candidates}
        missing = [name for name in names if name not in own and name != ALL]
        if missing:
            why = "not defined for its family" if has_classifier(record, alias) else "it has no classifier"
            yield Sentence(f"Not run on {alias}: {', '.join(missing)} ({why}).", says="setting")


def _fault_sentences(record: Record) -> Iterator[Sentence]:
    for row in record.rows(METHODS):
        for count, fault in ((row.constant, "constant"), (row.not_finite, "not finite")):
            if count:
                yield Sentence(
                    f"**{count} of {row.maps} maps of {row.title} of {row.model} are {fault}** and are not drawn.",
                    (row,),
                )


def _completeness_sentences(record: Record) -> Iterator[Sentence]:
    """By how much the sums of maps differ from the change of the logit that they should sum to."""
    errors = {(parts["model"], parts["method"]): error for parts, error in record.all(COMPLETENESS)}
    for row in record.rows(METHODS):
        error = errors.get((row.model, row.method))
        if error is not None and row.gain is not None:
            yield Sentence(
                f"{row.model}, completeness of {row.title}: the sum of a map differs from F(image) - F(black) by "
                f"{error.value:.2g} logits on average, where |F(image) - F(black)| is {row.gain:.3g} on average.",
                (row, error),
            )


def _method_table(alias: str, methods: tuple[MethodRow, ...]) -> Table:
    return Table.of(
        f"{alias}: methods",
        methods,
        {
            "method": lambda row: row.method,
            "source": lambda row: row.source,
            "map": lambda row: row.map,
            "signed": lambda row: "yes" if row.signed else "no",
            "constant": lambda row: row.constant,
            "not finite": lambda row: row.not_finite,
            "ms an image": lambda row: round(1000 * row.seconds, 1),
        },
    )


def _image_table(record: Record) -> Table:
    """The first images; of models without a classifier their names and labels alone."""
    rows = record.rows(IMAGES)
    shown = rows[:_ROWS]
    columns: dict[str, tuple[Cell, ...]] = {
        "model": tuple(row.model for row in shown),
        "image": tuple(Path(row.image).name for row in shown),
    }
    if any(row.target is not None for row in shown):
        columns |= _answer_columns(shown)
    columns["label"] = tuple(row.label for row in shown)
    explained = any(has_classifier(record, alias) for alias in record.aliases)
    title = "Images, predictions and targets" if explained else "Images"
    if len(rows) > _ROWS:
        title += f": the first {_ROWS}, all {len(rows):,} in results.json"
    return Table(title, tuple(columns), tuple(zip(*columns.values())))


def _answer_columns(rows: tuple[ExplainImageRow, ...]) -> dict[str, tuple[Cell, ...]]:
    return {
        "prediction": tuple(row.prediction for row in rows),
        "probability": tuple(row.probability for row in rows),
        "target": tuple(row.target for row in rows),
        "target probability": tuple(row.target_probability for row in rows),
    }
