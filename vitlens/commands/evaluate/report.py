"""The report of `vitlens evaluate`: how accurate models are, where they err, and whether their confidence is right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts import Picture, bars, images
from vitlens.commands.evaluate.claims import FEWEST, claims, differs, gain, leans, misjudged
from vitlens.commands.evaluate.record import ClassRow, ConfusionRow, EvaluateRecord, PredictedClassRow, PredictionArrays
from vitlens.commands.scaffold.calibration import DRAWN, ENOUGH, FEW, diagram
from vitlens.commands.scaffold.trainings import differences
from vitlens.figures.confusion import confusion_matrix
from vitlens.record import by
from vitlens.report.claims import above, below
from vitlens.report.findings import SMALLEST
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import LEVEL, Estimate, Side, apart

_GRID: Final = 12  # images of a grid of one model; of several each has a row of half as many
_SMALL: Final = 0.5  # of the classes that have few images, from which on it is said
_PICTURED: Final = 3  # models


@dataclass(frozen=True)
class _Matrix:
    """The predictions of one model."""

    model: str
    predictions: PredictionArrays


def _matrices(record: EvaluateRecord) -> list[_Matrix]:
    return [_Matrix(alias, record.predictions[alias]) for alias in record.aliases if alias in record.predictions]


def _grid(record: EvaluateRecord, chosen: str) -> Iterator[Picture]:
    """The random images, or the errors of highest confidence, of each model, with what it predicts."""
    known = _matrices(record)[:_PICTURED]
    for each in known:
        own: Any = each.predictions
        names = [str(name) for name in own.classes]
        places = getattr(own, chosen)[: _GRID if len(known) == 1 else _GRID // 2]
        for place, pixels in zip(places.tolist(), getattr(own, f"{chosen}_pixels")):
            yield Picture.predicted(
                pixels / np.float32(255), names[own.prediction[place]], float(own.probability[place]),
                names[own.label[place]], row=each.model if len(known) > 1 else "",
            )  # fmt: skip


def _picture(record: EvaluateRecord) -> list[Picture]:
    """The errors with the highest confidence; random images where there is no error."""
    return list(_grid(record, "surest_errors")) or list(_grid(record, "random"))


def _confusion(rows: Sequence[_Matrix], _: str) -> Figure:
    """The counts among classes that are a label or a prediction of at least one image."""
    known = rows[0].predictions
    label, prediction = known.label.astype(np.int64), known.prediction.astype(np.int64)
    present, places = np.unique(np.concatenate([label, prediction]), return_inverse=True)
    size = len(present)
    flat: NDArray[np.int64] = places[: len(label)] * size + places[len(label) :]
    counts = np.bincount(flat, minlength=size * size).reshape(size, size)
    return confusion_matrix(counts=counts, classes=[str(known.classes[at]) for at in present], model=rows[0].model)


def _confused(record: EvaluateRecord) -> list[ConfusionRow]:
    wrong = [row for row in record.confusion if row.truth != row.prediction]
    return sorted(wrong, key=lambda row: -row.count) if record.images >= FEWEST else []


def _most_confused(record: EvaluateRecord) -> str:
    """The most frequent confusion of each model."""
    rows = by(_confused(record), "model")
    parts = [
        say("**{{ r.model }}** predicts {{ r.prediction }} for {{ r.count }} image{{ r.count|s }} of {{ r.truth }}",
            r=own[0])
        for own in rows.values()
    ]  # fmt: skip
    if max((row.count for row in _confused(record)), default=0) < 2:
        return "No confusion occurs twice."
    return f"Most often {listed(parts[:_PICTURED])}."


def _classes(record: EvaluateRecord) -> list[ClassRow]:
    """Accuracy by class, the lowest mean over models first; none where no class has enough images."""
    known = [row for row in record.per_class if row.accuracy is not None]
    if max((row.n for row in known), default=0) < FEWEST:
        return []
    means = {name: np.mean([row.accuracy.value for row in own if row.accuracy])
             for name, own in by(known, "class_name").items()}  # fmt: skip
    return sorted(known, key=lambda row: means[row.class_name])


def _lowest(record: EvaluateRecord) -> str:
    """The lowest and the highest accuracy of a class, and whether their intervals overlap."""
    rows = list(by(_classes(record), "model").items())[:_PICTURED]
    ends = [(alias, *(choose(own, key=lambda row: row.accuracy.value) for choose in (min, max))) for alias, own in rows]
    parts = [
        say(
            "**{{ alias }}** recognises class {{ low.class_name }} worst, {{ low.accuracy|alone }} of {{ low.n }} "
            "images, and {{ high.class_name }} best, {{ high.accuracy|alone }}", alias=alias, low=low, high=high,
        )
        for alias, low, high in ends
    ]  # fmt: skip
    together = all(apart(low.accuracy, high.accuracy) is not Side.BELOW for _, low, high in ends)
    more = " The intervals of the worst and the best class overlap, so they may differ by chance." if together else ""
    return f"{'; '.join(parts)}.{more}"


def _paired(record: EvaluateRecord) -> str:
    """Which images one of two models alone classifies correctly."""
    parts = [
        say(
            "{{ r.first }} alone is correct on {{ r.only_first_right }} images, {{ r.second }} alone on "
            "{{ r.only_second_right }}, both on {{ r.both_right }}", r=row,
        )
        for row in record.pairs
    ]  # fmt: skip
    significant = [row for row in record.pairs if differs(row)]
    small = [row for row in record.pairs if row.p_holm <= LEVEL and not differs(row)]
    more = say(
        "{% if small %} {{ small|length }} difference{{ small|s }} {{ small|are }} significant but below "
        "{{ smallest }} points, too small to matter.{% endif %}"
        "{% if several %} {{ significant|length }} of {{ several }} pairs differ significantly.{% endif %}",
        significant=significant, small=small, smallest=SMALLEST,
        several=len(record.pairs) if len(record.pairs) > 1 else 0,
    )  # fmt: skip
    return " ".join(filter(None, [f"{'; '.join(parts)}." if len(parts) <= _PICTURED else "", more]))


def _believed(record: EvaluateRecord) -> str:
    """The calibration of each model, and over- or underconfidence of enough images."""
    judged = record.images >= ENOUGH
    parts = [
        say(
            "**{{ s.model }}** has an expected calibration error of {{ s.calibration_error|alone }}{% if judged %}; "
            "{% if clear %}it is {{ leans }}, by {{ size|points|value }}{% else %}it is not significantly over- or "
            "underconfident{% endif %}{% endif %}.",
            s=s, judged=judged, leans=leans(s.confidence_gap),
            size=replace(s.confidence_gap, value=abs(s.confidence_gap.value)),
            clear=above(s.confidence_gap, 0.0) or below(s.confidence_gap, 0.0),
        )
        for s in record.scores[:_PICTURED]
    ]  # fmt: skip
    few = say("{{ n }} images are too few to judge over- or underconfidence.", n=record.images)
    return " ".join([*parts, *([] if judged else [few])])


def _predicted(record: EvaluateRecord) -> list[PredictedClassRow]:
    return [row for row in record.by_prediction if row.n >= FEWEST]


def _leaning(record: EvaluateRecord) -> str:
    """In how many predicted classes of each model confidence differs from accuracy."""
    parts = []
    for model, rows in by(_predicted(record), "model").items():
        wrong = misjudged(rows)
        parts.append(
            say("{{ k or 'none' }} of {{ rows|length }} of **{{ model }}**{% if wrong %}, most for class "
                "{{ wrong[0].class_name }}{% endif %}", k=len(wrong), rows=rows, model=model, wrong=wrong)
        )  # fmt: skip
    shown = listed(parts[:_PICTURED])
    return say("Of predicted classes with at least {{ n }} images, confidence differs significantly from accuracy in "
               "{{ shown }}.", n=FEWEST, shown=shown)  # fmt: skip


def _bins(record: EvaluateRecord) -> list[Any]:
    """The bins of confidence, with the record that holds the models' errors."""
    return [record] if record.images >= DRAWN else []


def _reliability(rows: Sequence[EvaluateRecord], _: str) -> Figure:
    (record,) = rows
    shown = record.aliases[:_PICTURED]
    errors = {row.model: row.calibration_error.value for row in record.scores}
    return diagram([row for row in record.calibration if row.model in shown], errors)


def _gap(record: EvaluateRecord) -> Estimate | None:
    return gain(record.pairs[0], record.aliases[0]) if len(record.pairs) == 1 else None


def unknown(record: EvaluateRecord) -> Iterator[str]:
    """What could overturn these numbers, the most serious first."""
    n = record.images
    if n < FEW:
        scores = listed([say("{{ s.model }} {{ s.accuracy|alone }}", s=score) for score in record.scores])
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few to judge a model: {{ scores }}.", n=n, scores=scores)
    yield from _trainings(record)
    for row in record.pairs:
        if row.p_holm > LEVEL and row.only_first_right + row.only_second_right:
            yield say(
                "That {{ r.first }} and {{ r.second }} do not differ significantly is no evidence that they are equal: "
                "the difference may be anything from {{ gap.low|number(1) }} to {{ gap.high|number(1) }} points.",
                r=row, gap=gain(row, row.first),
            )  # fmt: skip
            break
    few = [row for row in record.per_class if row.model == record.aliases[0] and 0 < row.n < FEW]
    classes = len({row.class_name for row in record.per_class if row.n})
    if n >= FEW and len(few) > _SMALL * classes:
        yield say(
            "{{ few|length }} of {{ classes }} classes have fewer than {{ limit }} images: another sample could make "
            "another class the worst.", few=few, classes=classes, limit=FEW,
        )  # fmt: skip
    yield say(
        "The images are a sample of {{ n }}, and of each model one training was evaluated: other data or another seed "
        "may give another order.", n=n,
    ) if record.pairs else (
        "One training was evaluated on images of one kind: other data, or another seed, may give another accuracy."
    )  # fmt: skip
    yield (
        "The calibration error is a mean over bins, which few images bias upwards: models with overlapping intervals "
        "are not ordered by it."
    )


def _trainings(record: EvaluateRecord) -> Iterator[str]:
    """That models were trained differently, or that this is not known."""
    trained = differences(record.training)
    if trained:
        parts = [
            say("{{ what }} {{ values }}", what=Marked(each.what.replace("_", " ")),
                values=listed([say("{{ v }} ({{ m }})", v=v, m=b.model) for v, b in zip(each.values, record.training)]))
            for each in trained
        ]  # fmt: skip
        yield (
            f"The models were trained differently: {'; '.join(parts)}. A difference between them can come from this as "
            "well as from their architectures."
        )
    unknown = [budget.model for budget in record.training if not budget.known]
    if unknown and record.pairs:
        yield say(
            "How {{ names|names }} {{ 'was' if names|length == 1 else 'were' }} trained is not known here, so "
            "trainings may differ as much as architectures.", names=unknown,
        )  # fmt: skip


REPORT: Final = Report(
    EvaluateRecord,
    claims=claims,
    unknown=unknown,
    title="Accuracy of {{ record.aliases|join(', ') }}",
    picture=Chart(
        "surest_errors", images(),
        "{% if record.errors %}The errors with the highest confidence, highest first, with the true class below: the "
        "worst, "
        "not typical ones. Labels may be wrong.{% else %}Images with their predictions, none of "
        "them wrong.{% endif %}",
        title="{% if record.errors %}Errors with the highest confidence{% else %}Predictions{% endif %}",
        rows=_picture,
    ),
    glance=(
        Glance("scores", "accuracy", question="accuracy", difference=_gap),
        Glance("scores", "top5"),
        Glance("scores", "cross_entropy"),
        Glance("scores", "calibration_error", question="calibration"),
        Glance("scores", "confidence_gap"),
    ),
    sections=(
        Section(
            "Which model is correct on which images?",
            lambda record: record.pairs if record.images >= FEWEST else (),
            opening=_paired, about=("accuracy",),
            columns=("first", "second", "difference", "only_first_right", "only_second_right", "p_holm"),
        ),
        Section(
            "Which classes are recognised worst?", _classes, opening=_lowest,
            columns=("model", "class_name", "n", "accuracy"),
            charts=(Chart(
                "per_class", bars("class_name", "accuracy", of="model"),
                "Accuracy of each class with its interval, lowest first. Where intervals overlap, classes may differ "
                "by chance.",
                title="Accuracy by class",
            ),),
        ),
        Section(
            "Which classes are confused?", _confused, opening=_most_confused,
            columns=("model", "truth", "prediction", "count"),
            charts=(Chart(
                "confusion", _confusion,
                "Images by true class (rows) and predicted class (columns); colour: share of the row. Classes that "
                "do not occur are left out.",
                title="Confusions of {{ first.model }}", rows=lambda record: _matrices(record)[:_PICTURED],
                each="model",
            ),),
        ),
        Section(
            "Is the confidence right?", lambda record: record.scores if record.images >= FEWEST else (),
            opening=_believed, about=("calibration",),
            charts=(Chart(
                "calibration", _reliability,
                "Accuracy against confidence in bins, with the share of images below; bars under the dashed line are "
                "overconfident, hollow ones hold few images.",
                title="Accuracy against confidence", rows=_bins,
            ),),
        ),
        Section(
            "For which predicted classes is it wrong?", _predicted, opening=_leaning,
            order=lambda row: (row.p_holm, row.p),
            columns=("model", "class_name", "n", "confidence", "accuracy", "gap"),
        ),
        Section(
            "What are typical predictions?", lambda record: list(_grid(record, "random")),
            opening="These images were drawn at random: they are too few to judge a model by.",
            charts=(Chart(
                "predictions", images(),
                "Images with prediction and probability; blue: correct, red: wrong, with the true class below.",
                title="Predictions for random images",
            ),),
        ),
    ),
)  # fmt: skip
