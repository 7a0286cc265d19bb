"""The report of `vitlens evaluate`: how accurate models are, where they err, and whether their confidence is right."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts import Picture, bars, images
from vitlens.commands.evaluate.record import ConfusionRow, EvaluateRecord, PredictedClassRow, ScoreRow
from vitlens.commands.shared.calibration import DRAWN, ENOUGH, FEW, diagram
from vitlens.commands.shared.pairs import PairRow
from vitlens.commands.shared.trainings import differences
from vitlens.commands.shared.worst_class import worst_of
from vitlens.figures.confusion import confusion_matrix
from vitlens.report.claims import Claim, found, judge
from vitlens.report.findings import FOUND, SMALLEST, clear
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import LEVEL, Estimate

FEWEST: Final = 20  # images, of a model or a class, below which nothing is claimed
_PICTURED: Final = 3  # models


def claims(record: EvaluateRecord) -> Iterator[Claim]:
    """Which model is better, what is judged of each, and where its confidence and its classes are worst."""
    if record.images >= FEW:
        yield from _which(record)
    for score in record.scores:
        if len(record.scores) > 1:
            yield _accuracy(record, score)
        error = score.calibration_error
        if (error.n or 0) >= ENOUGH:
            yield judge("calibration", score.model, error, "calibration", because="expected calibration error")
        else:
            because = say("expected calibration error of fewer than {{ n }} images, which bins bias upwards", n=ENOUGH)
            yield Claim("calibration", score.model, state="inconclusive", limit="calibration", because=because)
        yield from _confidence(record, score)
        own = [(row, row.accuracy) for row in record.per_class if row.model == score.model and row.n >= FEWEST]
        worst = worst_of(own, score.accuracy)
        if worst is not None:
            yield found(
                "worst class", score.model,
                "**{{ row.model }}** classifies images of class {{ row.class_name }} worst: {{ effect }}, beside "
                "{{ overall|value }} of all images.",
                replace(worst[1], n=worst[0].n), given={"row": worst[0], "overall": score.accuracy},
                reference=score.accuracy.value, place="per_class",
            )  # fmt: skip


def _best(record: EvaluateRecord) -> ScoreRow:
    return max(record.scores, key=lambda row: row.accuracy.value)


def gain(row: PairRow, of: str) -> Estimate:
    """The difference of accuracy of a pair as one of its models minus the other."""
    difference = row.difference or Estimate(0.0, unit="points")
    if row.first == of:
        return difference
    low, high = (None if end is None else -end for end in (difference.high, difference.low))
    return replace(difference, value=-difference.value, low=low, high=high)


def differs(row: PairRow) -> bool:
    """Whether the two models differ significantly, and by more than is too small to matter."""
    return row.p_holm <= LEVEL and abs(gain(row, row.first).value) >= SMALLEST


def _which(record: EvaluateRecord) -> Iterator[Claim]:
    """The answer: the accuracy of one model, or the best of several and which others it exceeds."""
    top = _best(record)
    pairs = {row.second if row.first == top.model else row.first: row
             for row in record.pairs if top.model in (row.first, row.second)}  # fmt: skip
    alike = [other for other, row in pairs.items() if not differs(row)]
    given = {"top": top, "n": record.images, "right": record.images - record.errors, "pairs": pairs, "alike": alike}
    if not pairs:
        yield Claim(
            "top-1 accuracy", top.model,
            say("**{{ top.model }}** classifies {{ top.accuracy }} of the images correctly.", **given),
            title=say("{{ top.model }} classifies {{ right }} of {{ n }} images correctly", **given),
            effect=top.accuracy, kind="answer",
        )  # fmt: skip
    for other, row in pairs.items():
        if differs(row):
            given |= {"other": other, "row": row, "size": gain(row, top.model)}
            yield Claim(
                "which is better", f"{top.model} and {other}",
                say("**{{ top.model }}** classifies more images correctly than **{{ other }}**: "
                    "{{ top.accuracy|value }}, {{ size }} more (McNemar's exact test, p = {{ row.p_holm|number }}).",
                    **given),
                title=say("{% if not alike %}{{ top.model }} classifies more images correctly than {% if pairs|length "
                          "> 1 %}the {{ pairs|length }} other models{% else %}{{ other }}{% endif %}{% endif %}",
                          **given),
                effect=gain(row, top.model), p=row.p_holm, kind="answer",
            )  # fmt: skip
    if alike:
        row = pairs[alike[0]]
        yield Claim(
            "no difference", top.model,
            say("**{{ top.model }}** has the highest accuracy, {{ top.accuracy|alone }}, but no significant lead over "
                "{{ alike|names }}{% if pairs|length == 1 %}: {{ size|alone }}, p = {{ row.p_holm|number }}"
                "{% endif %}.", row=row, size=gain(row, top.model), **given),
            title=say("{{ top.model }} has no significant lead over {{ alike[:2]|join(' or ') }} in accuracy", **given),
            kind="answer",
        )  # fmt: skip


def _accuracy(record: EvaluateRecord, score: ScoreRow) -> Claim:
    """The judgement of a model beside the best that was compared."""
    top, because = _best(record), say("fewer than {{ few }} images do not order models; raise --limit", few=FEW)
    if record.images < FEW:
        return Claim("accuracy", score.model, state="inconclusive", limit="accuracy", because=because)
    if score is top:
        because = say("top-1 accuracy {{ own }}, the highest of the models compared", own=score.accuracy)
        return Claim("accuracy", score.model, state="pass", limit="accuracy", because=because)
    row = next(row for row in record.pairs if {row.first, row.second} == {score.model, top.model})
    because = say("difference from {{ best }}", best=top.model)
    return judge("accuracy", score.model, gain(row, score.model), "accuracy", because=because)


def misjudged(rows: Sequence[PredictedClassRow]) -> list[PredictedClassRow]:
    """The predicted classes, of enough images, whose confidence differs from their accuracy, also after the correction
    for their number, those with the most images too few or too many correct first."""
    known = [r for r in rows if r.n >= FEWEST and r.p_holm <= FOUND and 100 * abs(r.gap.value) >= SMALLEST]
    return sorted((row for row in known if clear(row.gap, 0.0)), key=lambda row: -abs(row.gap.value) * row.n)


def _leans(gap: Estimate) -> str:
    return "overconfident" if gap.value > 0 else "underconfident"


def _confidence(record: EvaluateRecord, score: ScoreRow) -> Iterator[Claim]:
    """The predicted class whose confidence misleads most; where that is not so of a minority of them, all images."""
    rows = [row for row in record.by_prediction if row.model == score.model]
    leaning, gap = misjudged(rows), score.confidence_gap
    if 0 < 2 * len(leaning) < len(rows):
        row = leaning[0]
        yield found(
            "confidence by class", score.model,
            "**{{ row.model }}** is {{ leans }} where it predicts class {{ row.class_name }}: mean confidence "
            "{{ row.confidence|percent(1) }}, accuracy {{ row.accuracy|percent(1) }} of {{ row.n }} images"
            "{% if leaning|length > 1 %}; {{ leaning|length }} of {{ rows|length }} predicted classes differ like this"
            "{% endif %}.",
            row.gap, given={"row": row, "leans": _leans(row.gap), "rows": rows, "leaning": leaning},
            kind="hidden fault", p=row.p_holm, place="calibration",
        )  # fmt: skip
    elif (gap.n or 0) >= ENOUGH and 100 * abs(gap.value) >= SMALLEST:
        yield found(
            "confidence", score.model,
            "**{{ model }}** is {{ leans }}: mean confidence minus accuracy is {{ effect|points }}.",
            gap, given={"model": score.model, "leans": _leans(gap)}, kind="hidden fault", place="calibration",
        )  # fmt: skip


def unknown(record: EvaluateRecord) -> Iterator[str]:
    """What could overturn these numbers, the most serious first."""
    n, trained = record.images, differences(record.training)
    if n < FEW:
        scores = listed([say("{{ s.model }} {{ s.accuracy|alone }}", s=score) for score in record.scores])
        yield say("{{ n }} image{{ n|s }} {{ n|are }} too few to judge a model: {{ scores }}.", n=n, scores=scores)
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
    strange = [budget.model for budget in record.training if not budget.known]
    if strange and record.pairs:
        yield say(
            "How {{ names|names }} {{ 'was' if names|length == 1 else 'were' }} trained is not known here, so "
            "trainings may differ as much as architectures.", names=strange,
        )  # fmt: skip
    for row in [row for row in record.pairs if row.p_holm > LEVEL and row.only_first_right + row.only_second_right][:1]:
        yield say(
            "That {{ r.first }} and {{ r.second }} do not differ significantly is no evidence that they are equal: "
            "the difference may be anything from {{ gap.low|number(1) }} to {{ gap.high|number(1) }} points.",
            r=row, gap=gain(row, row.first),
        )  # fmt: skip
    yield say(
        "The images are a sample of {{ n }}, and of each model one training was evaluated: other data or another seed "
        "may give {{ 'another order' if pairs else 'another accuracy' }}.", n=n, pairs=record.pairs,
    )  # fmt: skip


def _errors(record: EvaluateRecord) -> list[Picture]:
    """The errors with the highest confidence, of several models a row each."""
    known = {alias: record.predictions[alias] for alias in record.aliases[:_PICTURED] if alias in record.predictions}
    return [
        Picture.predicted(
            pixels / np.float32(255), str(own.classes[own.prediction[at]]), float(own.probability[at]),
            str(own.classes[own.label[at]]), row=alias if len(known) > 1 else "",
        )
        for alias, own in known.items()
        for at, pixels in list(zip(own.surest_errors, own.surest_errors_pixels))[: 12 if len(known) == 1 else 6]
    ]  # fmt: skip


def _confusion(rows: Sequence[ConfusionRow], _: str) -> Figure:
    """The counts among classes that are a label or a prediction of at least one image."""
    names = list(dict.fromkeys([*(row.truth for row in rows), *(row.prediction for row in rows)]))
    counts = np.zeros((len(names), len(names)), np.int64)
    for row in rows:
        counts[names.index(row.truth), names.index(row.prediction)] = row.count
    return confusion_matrix(counts=counts, classes=names, model=rows[0].model)


def _confused(record: EvaluateRecord) -> list[ConfusionRow]:
    return [row for row in record.confusion if row.truth != row.prediction and record.images >= FEWEST]


def _paired(row: PairRow) -> str:
    words = "{{ first }} alone is correct on {{ only_first_right }} images, {{ second }} alone on "
    words += "{{ only_second_right }}, both on {{ both_right }}."
    small = " This difference is significant, but too small to matter."
    return words + small if row.p_holm <= LEVEL and not differs(row) else words


def _leaning(record: EvaluateRecord) -> str:
    rows = [row for row in record.by_prediction if row.n >= FEWEST]
    return say(
        "Confidence differs significantly from accuracy in {{ k }} of {{ n }} predicted classes with at least {{ few }}"
        " images.", k=len(misjudged(rows)), n=len(rows), few=FEWEST,
    )  # fmt: skip


def _reliability(rows: Sequence[EvaluateRecord], _: str) -> Figure:
    (record,) = rows
    shown = [row for row in record.calibration if row.model in record.aliases[:_PICTURED]]
    return diagram(shown, {row.model: row.calibration_error.value for row in record.scores})


REPORT: Final = Report(
    EvaluateRecord,
    claims=claims,
    unknown=unknown,
    title="Accuracy of {{ record.aliases|join(', ') }}",
    picture=Chart(
        "surest_errors", images(),
        "The errors with the highest confidence, highest first, with the true class below: the worst, not typical "
        "ones. Labels may be wrong.",
        title="Errors with the highest confidence", rows=_errors,
    ),
    glance=(
        Glance("scores", "accuracy", question="accuracy", difference=lambda record: (
            gain(record.pairs[0], record.aliases[0]) if len(record.pairs) == 1 else None
        )),
        Glance("scores", "top5"),
        Glance("scores", "cross_entropy"),
        Glance("scores", "calibration_error", question="calibration"),
        Glance("scores", "confidence_gap"),
    ),
    sections=(
        Section(
            "Which model is correct on which images?",
            lambda record: record.pairs if record.images >= FEWEST else (),
            says=_paired, about=("accuracy",),
            columns=("first", "second", "difference", "only_first_right", "only_second_right", "p_holm"),
        ),
        Section(
            "Which classes are recognised worst?",
            lambda record: [row for row in record.per_class if row.accuracy is not None and row.n >= FEWEST],
            order=lambda row: row.accuracy.value,
            opening="The lowest accuracy is that of **{{ first.model }}** on class {{ first.class_name }}, "
            "{{ first.accuracy|alone }} of {{ first.n }} images; the highest is {{ rows[-1].accuracy|value }}.",
            columns=("model", "class_name", "n", "accuracy"),
            charts=(Chart(
                "per_class", bars("class_name", "accuracy", of="model"),
                "Accuracy of each class with its interval, lowest first. Where intervals overlap, classes may differ "
                "by chance.",
                title="Accuracy by class",
            ),),
        ),
        Section(
            "Which classes are confused?", _confused, order=lambda row: -row.count,
            opening="{% if first.count > 1 %}Most often **{{ first.model }}** predicts {{ first.prediction }} for "
            "{{ first.truth }}: {{ first.count }} images.{% else %}No confusion occurs twice.{% endif %}",
            columns=("model", "truth", "prediction", "count"),
            charts=(Chart(
                "confusion", _confusion,
                "Images by true class (rows) and predicted class (columns); colour: share of the row. Classes that "
                "do not occur are left out.",
                title="Confusions of {{ first.model }}", each="model",
                rows=lambda record: [row for row in record.confusion if row.model in record.aliases[:_PICTURED]],
            ),),
        ),
        Section(
            "Is the confidence right?", lambda record: record.by_prediction if record.images >= FEWEST else (),
            opening=_leaning, about=("calibration",), order=lambda row: (row.p_holm, row.p),
            columns=("model", "class_name", "n", "confidence", "accuracy", "gap"),
            charts=(Chart(
                "calibration", _reliability,
                "Accuracy against confidence in bins, with the share of images below; bars under the dashed line are "
                "overconfident, hollow ones hold few images.",
                title="Accuracy against confidence", rows=lambda record: [record] if record.images >= DRAWN else [],
            ),),
        ),
    ),
)  # fmt: skip
