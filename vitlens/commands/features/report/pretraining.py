"""Models of different pretraining in one table, and which objective's features are classified better here."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import KNN, PAIRS, PRETRAINING, PROBE_ACCURACY, SHARED
from vitlens.commands.features.record.patch_rows import PatchNeighboursRow
from vitlens.commands.features.record.pretraining_rows import PretrainingRow
from vitlens.commands.features.record.rows import PROBE, FeaturePairRow
from vitlens.commands.features.report.classifiers import classifier_name
from vitlens.names import OBJECTIVES
from vitlens.records import Record
from vitlens.report.document import Cell, Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate, Side, apart

_RULE: Final = (
    "Rule: a model is ahead by a classifier if McNemar's exact test, corrected for all comparisons of the table of "
    "pairs, finds it better than every model of another objective on the same images. Only objectives that are known "
    "are compared, and random weights are none."
)


def pretraining_sections(record: Record) -> Iterator[Section]:
    """One table of the models and their pretraining, and the verdict; none for one model."""
    rows = record.rows(PRETRAINING)
    if len(rows) < 2:
        return
    sentences = [*_known(rows), *_verdict(record, rows), *_objects(record, rows)]
    yield Section(
        "Pretraining",
        tuple(sentences),
        (_table(record, rows),),
        question="Which pretraining gives the features that serve best here?",
        leading=True,
    )


def objectives(rows: Sequence[PretrainingRow]) -> list[str]:
    """The objectives that are known, each once."""
    return [objective for objective in OBJECTIVES if any(row.objective == objective for row in rows)]


def _known(rows: Sequence[PretrainingRow]) -> Iterator[Sentence]:
    """What is not known, and that models of one objective compare none."""
    unknown = [row for row in rows if row.objective == "not known"]
    if unknown:
        listed = ", ".join(f"`{row.model}`" for row in unknown)
        yield Sentence(
            f"The pretraining of {listed} is not known from its name; `--objective {unknown[0].model}=OBJECTIVE` "
            f"states it ({', '.join(OBJECTIVES)}).",
            tuple(unknown),
        )
    random = [row for row in rows if row.objective == "random weights"]
    if random:
        listed = ", ".join(f"`{row.model}`" for row in random)
        yield Sentence(f"{listed}: random weights, so its numbers say nothing about any pretraining.", tuple(random))
    known = objectives(rows)
    if len(known) == 1:
        yield Sentence(
            f"All models whose pretraining is known are {known[0]}: these numbers compare models, not objectives.",
            tuple(rows),
        )


def _verdict(record: Record, rows: Sequence[PretrainingRow]) -> Iterator[Sentence]:
    """Which model is ahead of all models of other objectives, by probe and by neighbours."""
    if len(objectives(rows)) < 2:
        return
    named = [PROBE, f"knn-{max(record.options(FeaturesOptions).ks)}"]
    tested = [name for name in named if any(row.classifier == name for row in record.rows(PAIRS))]
    if not tested:
        return
    ahead = {name: _ahead(record, rows, name) for name in tested}
    winners = {found[0].model for found in ahead.values() if found is not None}
    most = max(record.options(FeaturesOptions).ks)
    backing: tuple[object, ...] = (*rows, most, *(row for row in record.rows(PAIRS) if row.classifier in tested))
    if not winners:
        listed = " or ".join(f"the {classifier_name(name)}" for name in tested)
        text = f"No objective is ahead: by {listed} no model is better than all models of other objectives."
    else:
        text = " ".join(_led(name, found) for name, found in ahead.items() if found is not None)
        open_ones = [classifier_name(name) for name, found in ahead.items() if found is None]
        if open_ones:
            text += f" By the {' and the '.join(open_ones)} no model is ahead."
        elif len(winners) > 1:
            text += " The two classifiers disagree: which objective is better depends on how the features are used."
    yield Sentence(text, backing)
    yield Sentence(_RULE, says="method")
    low, high = min(row.parameters for row in rows), max(row.parameters for row in rows)
    yield Sentence(
        f"The models differ in more than the objective (data, recipe, {low / 1e6:.1f} to {high / 1e6:.1f} million "
        "parameters), so a difference between them is not the objective's alone.",
        (low, high, low / 1e6, high / 1e6),
    )


def _ahead(
    record: Record, rows: Sequence[PretrainingRow], classifier: str
) -> tuple[PretrainingRow, FeaturePairRow] | None:
    """The model that is significantly better than every model of another objective, with its closest comparison."""
    known = [row for row in rows if row.objective in OBJECTIVES]
    for row in known:
        others = {other.model for other in known if other.objective != row.objective}
        beaten: dict[str, FeaturePairRow] = {}
        for pair in record.rows(PAIRS):
            won = pair.classifier == classifier and pair.p_holm <= LEVEL
            if won and pair.first == row.model and pair.difference > 0:
                beaten[pair.second] = pair
            if won and pair.second == row.model and pair.difference < 0:
                beaten[pair.first] = pair
        if others and others <= beaten.keys() and not _twin_ahead(row, known, record, classifier):
            return row, min((beaten[name] for name in others), key=lambda pair: abs(pair.difference))
    return None


def _twin_ahead(row: PretrainingRow, known: Sequence[PretrainingRow], record: Record, classifier: str) -> bool:
    """Whether a model of the same objective has the higher accuracy, which is then the one to name."""
    own = _accuracy(record, row.model, classifier)
    twins = [other.model for other in known if other.objective == row.objective and other.model != row.model]
    return any(_value(_accuracy(record, name, classifier)) > _value(own) for name in twins)


def _accuracy(record: Record, alias: str, classifier: str) -> Estimate | None:
    name = PROBE_ACCURACY(model=alias) if classifier == PROBE else KNN(model=alias, k=classifier.partition("-")[2])
    return record.metrics.get(name)


def _value(estimate: Estimate | None) -> float:
    return -1.0 if estimate is None else estimate.value


def _led(classifier: str, found: tuple[PretrainingRow, FeaturePairRow]) -> str:
    row, pair = found
    sign = 1.0 if pair.first == row.model else -1.0
    other = pair.second if pair.first == row.model else pair.first
    low, high = (None, None) if pair.low is None or pair.high is None else sorted((sign * pair.low, sign * pair.high))
    gap = in_words(Estimate(sign * pair.difference, low, high, pair.n, "points"))
    return (
        f"By the {classifier_name(classifier)} `{row.model}`, {row.words}, is ahead of every model of another "
        f"objective (smallest difference {gap}, to `{other}`)."
    )


def _objects(record: Record, rows: Sequence[PretrainingRow]) -> Iterator[Sentence]:
    """Whose patches find the object best; only where they find it better than the patches before any attention do."""
    found = {row.model: row for row in _overlaps(record)}
    before = {row.model: row for row in record.rows(SHARED) if row.share == "object" and row.layer is None}
    known = [row for row in rows if row.model in found and row.objective in OBJECTIVES]
    if len(objectives(known)) < 2:
        return
    best = max(known, key=lambda row: found[row.model].value)
    own, start = found[best.model], before.get(best.model)
    if start is not None and apart(own.estimate, start.estimate) is not Side.ABOVE:
        yield Sentence(
            f"The object is found by the patches of the best model's last layer (`{best.model}`, intersection over "
            f"union {in_words(own.estimate, with_n=False)}) no better than by its patches before any attention "
            f"({in_words(start.estimate, with_n=False)}): colour and edges suffice on these images, which therefore do "
            "not compare objectives by it.",
            (own, start),
        )
        return
    others = [row for row in known if row.objective != best.objective]
    if all(apart(own.estimate, found[row.model].estimate) is Side.ABOVE for row in others):
        text = (
            f"Patches of `{best.model}`, {best.words}, find the object best without training: intersection over union "
            f"{in_words(own.estimate, with_n=False)}; the intervals of the other objectives lie below."
        )
    else:
        text = "By the intersection over union of the object found by patches no objective is ahead: intervals overlap."
    yield Sentence(f"{text} Finer grids follow an outline better.", tuple(found[row.model] for row in known))


def _overlaps(record: Record) -> list[PatchNeighboursRow]:
    """The overlap of object and votes in each model's last layer."""
    return [row for row in record.rows(SHARED) if row.share == "object" and row.layer is not None]


def _table(record: Record, rows: Sequence[PretrainingRow]) -> Table:
    """One line a model: its pretraining, its size, and what its last layer reaches."""
    most = max(record.options(FeaturesOptions).ks)
    overlap = {row.model: Estimate(row.value, row.low, row.high) for row in _overlaps(record)}
    columns: dict[str, list[Cell]] = {
        "model": [row.model for row in rows],
        "objective": [row.words for row in rows],
        "data": [row.data or None for row in rows],
        "then labels of": [row.labels or None for row in rows],
        "known from": [row.source or None for row in rows],
        "parameters": [row.parameters for row in rows],
        "dim": [row.dim for row in rows],
        classifier_name(f"knn-{most}"): [_accuracy(record, row.model, f"knn-{most}") for row in rows],
        classifier_name(PROBE): [_accuracy(record, row.model, PROBE) for row in rows],
        "object by patches (IoU)": [overlap.get(row.model) for row in rows],
    }
    shown = {title: cells for title, cells in columns.items() if any(cell is not None for cell in cells)}
    return Table("Models by pretraining, and what their last layer reaches", tuple(shown), tuple(zip(*shown.values())))
