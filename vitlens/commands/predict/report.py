"""The report of `vitlens predict`: the class and the probability that the model gives each
image."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from vitlens.charts import Picture, images
from vitlens.commands.predict.record import PredictRecord
from vitlens.commands.shared.predictions import (
    PredictionRow,
    by_file_name,
    count_predictions,
    predicted_classes,
)
from vitlens.report.claims import FEWEST, Claim, above
from vitlens.report.prose import say
from vitlens.report.sections import ROWS, Chart, Overview, Report, Section
from vitlens.uncertainty import wilson

SHARE: Final = 0.5  # of the images: one class predicted for more of them is a fault
_COLUMNS: Final = ("image", "class_1", "probability_1", "class_2", "probability_2", "label")
# probability, from which on a class is more probable than all others together
_CERTAIN: Final = 0.5


def claims(record: PredictRecord) -> Iterator[Claim]:
    """Yield a class that is predicted too often, then the accuracy, or the classes of images
    without labels.
    """
    rows = record.predictions
    if not rows:
        return
    if len(rows) >= FEWEST and None not in _labels(rows):
        yield from _frequent_class(record)
        yield _accuracy_claim(record)
    elif len(rows) == 1:
        yield _single_prediction(record)
    else:
        (alias,) = record.aliases
        yield predicted_classes(rows, alias)


def _labels(rows: Sequence[PredictionRow]) -> Counter[str | None]:
    """Return how many images have each label; None counts those without a label."""
    return Counter(row.label for row in rows)


def _correct(rows: Sequence[PredictionRow]) -> int:
    """Return how many predictions are the label."""
    return sum(bool(row.correct) for row in rows)


def _frequent_class(record: PredictRecord) -> Iterator[Claim]:
    """Yield a class that is predicted for most images, and for more than have it as their label."""
    rows = record.predictions
    (alias,) = record.aliases
    name, count = count_predictions(rows).most_common(1)[0]
    labels = _labels(rows)
    labelled = labels[name]
    share = wilson(count, len(rows))
    limit = max(SHARE, labelled / len(rows))
    has_one_class = len(labels) < 2  # then every prediction should be this class
    is_too_frequent = count > labelled and above(share, limit)
    if has_one_class or not is_too_frequent:
        return
    values = {"alias": alias, "name": name, "count": count, "n": len(rows), "labelled": labelled}
    yield Claim(
        "one class",
        alias,
        say(
            "**{{ alias }}** predicts class {{ name }} for {{ count }} of {{ n }} images, of "
            "which {{ labelled }} have that label.",
            **values,
        ),
        title=say(
            "{{ alias }} predicts class {{ name }} for {{ count }} of {{ n }} images", **values
        ),
        effect=share,
        kind="answer",
        reference=SHARE,
    )


def _accuracy_claim(record: PredictRecord) -> Claim:
    rows = record.predictions
    (alias,) = record.aliases
    correct = _correct(rows)
    share = wilson(correct, len(rows))
    return Claim(
        "accuracy",
        alias,
        say("For {{ share }}, the most probable class is the label.", share=share),
        title=say(
            "{{ alias }} predicts the label of {{ k }} of {{ n }} images",
            alias=alias,
            k=correct,
            n=len(rows),
        ),
        effect=share,
        kind="answer",
    )


def _single_prediction(record: PredictRecord) -> Claim:
    (row,) = record.predictions
    (alias,) = record.aliases
    return Claim(
        "prediction",
        alias,
        say(
            "**{{ file }}** is most probably {{ row.class_1 }} ({{ row.probability_1|percent(1) }})"
            "{% if row.class_2 is not none %}, then {{ row.class_2 }} "
            "({{ row.probability_2|percent(1) }}){% endif %}.",
            row=row,
            file=Path(row.image).name,
        ),
        title=say("{{ alias }} predicts {{ name }}", alias=alias, name=row.class_1),
        kind="answer",
    )


def unknown(record: PredictRecord) -> Iterator[str]:
    """Yield what a list of predictions does not show."""
    rows = record.predictions
    labelled = len(rows) - _labels(rows)[None]
    if not labelled:
        yield "The images have no labels, so it is not known which predictions are correct."
    elif len(rows) < FEWEST or labelled < len(rows):
        yield say(
            "{{ correct }} of {{ n }} prediction{{ n|s }} {{ correct|are }} the label: too few "
            "images to estimate accuracy.",
            correct=_correct(rows),
            n=labelled,
        )
    yield (
        "A probability is the model's confidence, not its accuracy. `vitlens evaluate` measures "
        "on labelled images how often such predictions are correct."
    )


def _on_certainty(record: PredictRecord) -> str:
    return say(
        "{{ k or 'None' }} of {{ n }} prediction{{ n|s }} {{ k|have }} a probability below "
        "{{ limit|percent }}.",
        k=sum(row.probability_1 < _CERTAIN for row in record.predictions),
        n=len(record.predictions),
        limit=_CERTAIN,
    )


def _pictures(record: PredictRecord) -> list[Picture]:
    if record.images_drawn is None:
        return []
    pictures = []
    for row, pixels in zip(record.predictions, record.images_drawn.pixels):
        image = pixels / np.float32(255)
        pictures.append(Picture.predicted(image, row.class_1, row.probability_1, row.label))
    return pictures


def _if_several(record: PredictRecord) -> Sequence[PredictionRow]:
    """Return the predictions if they are more than the first page's table shows."""
    if len(record.predictions) <= ROWS:
        return ()
    return by_file_name(record.predictions)


REPORT: Final = Report(
    PredictRecord,
    claims=claims,
    unknown=unknown,
    title="Predictions of {{ record.aliases[0] }}",
    picture=Chart(
        "predictions",
        images(),
        "The first {{ rows|length }} of {{ record.images }} images, with prediction and probability"
        "{% if record.predictions[0].label is not none %}; blue: correct, red: wrong, with the "
        "label below{% endif %}.",
        title="{{ rows|length }} image{{ rows|s }} with {{ record.aliases[0] }}'s prediction",
        rows=_pictures,
    ),
    glance=Overview(lambda record: by_file_name(record.predictions), _COLUMNS),
    sections=(
        Section(
            "Which predictions are least certain?",
            _if_several,
            opening=_on_certainty,
            order=lambda row: row.probability_1,
            columns=_COLUMNS,
        ),
    ),
)
