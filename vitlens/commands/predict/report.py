"""The report of `vitlens predict`: which class the model gives each image, and how certain it is."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from vitlens.charts import Picture, images
from vitlens.commands.predict.record import PredictRecord
from vitlens.commands.shared.predictions import by_file_name, for_images
from vitlens.report.claims import FEWEST, Claim, above
from vitlens.report.prose import say
from vitlens.report.sections import ROWS, Chart, Overview, Report, Section
from vitlens.uncertainty import wilson

SHARE: Final = 0.5  # of the images, above which one predicted class is a fault
_COLUMNS: Final = ("image", "class_1", "probability_1", "class_2", "probability_2", "label")
_CERTAIN: Final = 0.5  # probability of a class that is more probable than all others together


def claims(record: PredictRecord) -> Iterator[Claim]:
    """Yield how often the prediction is the label, or which classes are predicted; and one class for everything."""
    rows, (alias,) = record.predictions, record.aliases
    if not rows:
        return
    predicted = Counter(row.class_1 for row in rows)
    labels = {row.label for row in rows}
    (name, count), *_ = predicted.most_common(1)
    given = {"rows": rows, "alias": alias, "name": name, "count": count, "predicted": predicted}
    is_judged = len(rows) >= FEWEST and None not in labels
    own = sum(row.label == name for row in rows)
    share = wilson(count, len(rows))
    if is_judged and len(labels) > 1 and count > own and above(share, max(SHARE, own / len(rows))):
        yield Claim(
            "one class",
            alias,
            say(
                "**{{ alias }}** predicts class {{ name }} for {{ count }} of {{ rows|length }} images, of which "
                "{{ own }} have that label.",
                own=own,
                **given,
            ),
            title=say("{{ alias }} predicts class {{ name }} for {{ count }} of {{ rows|length }} images", **given),
            effect=share,
            kind="answer",
            reference=SHARE,
        )
    if is_judged:
        right = sum(bool(row.correct) for row in rows)
        share = wilson(right, len(rows))
        yield Claim(
            "accuracy",
            alias,
            say("The most probable class is the label for {{ share }}.", share=share),
            title=say("{{ alias }} predicts the label of {{ k }} of {{ rows|length }} images", k=right, **given),
            effect=share,
            kind="answer",
        )
    elif len(rows) == 1:
        yield Claim(
            "prediction",
            alias,
            say(
                "**{{ file }}** is most probably {{ row.class_1 }} ({{ row.probability_1|percent(1) }})"
                "{% if row.class_2 is not none %}, then {{ row.class_2 }} ({{ row.probability_2|percent(1) }}){% endif "
                "%}.",
                row=rows[0],
                file=Path(rows[0].image).name,
            ),
            title=say("{{ alias }} predicts {{ name }}", **given),
            kind="answer",
        )
    else:
        yield Claim(
            "prediction",
            alias,
            say(
                "Of {{ rows|length }} images **{{ alias }}** predicts class {{ parts }}.",
                parts=for_images(predicted),
                **given,
            ),
            title=say(
                "{{ alias }} predicts {{ predicted|length }} class{{ 'es' if predicted|length > 1 }} for "
                "{{ rows|length }} images",
                **given,
            ),
            kind="answer",
        )


def unknown(record: PredictRecord) -> Iterator[str]:
    """Yield what a list of predictions does not show."""
    rows = record.predictions
    labelled = [row for row in rows if row.label is not None]
    if not labelled:
        yield "The images have no labels: whether the predictions are correct is not known."
    elif len(rows) < FEWEST or len(labelled) < len(rows):
        right = sum(bool(row.correct) for row in labelled)
        yield say(
            "{{ right }} of {{ n }} prediction{{ n|s }} {{ right|are }} the label: too few images to estimate "
            "accuracy.",
            right=right,
            n=len(labelled),
        )
    yield (
        "A probability is the model's own confidence, not its accuracy: how often such a prediction is correct, "
        "`vitlens evaluate` measures on labelled images."
    )


def _uncertain(record: PredictRecord) -> str:
    less = sum(row.probability_1 < _CERTAIN for row in record.predictions)
    return say(
        "{{ k or 'None' }} of {{ n }} prediction{{ n|s }} {{ k|have }} a probability below {{ limit|percent }}.",
        k=less,
        n=len(record.predictions),
        limit=_CERTAIN,
    )


def _pictures(record: PredictRecord) -> list[Picture]:
    pixels = () if record.images_drawn is None else record.images_drawn.pixels
    return [
        Picture.predicted(image / np.float32(255), row.class_1, row.probability_1, row.label)
        for row, image in zip(record.predictions, pixels)
    ]


REPORT: Final = Report(
    PredictRecord,
    claims=claims,
    unknown=unknown,
    title="Predictions of {{ record.aliases[0] }}",
    picture=Chart(
        "predictions",
        images(),
        "The first {{ rows|length }} of {{ record.images }} images, with prediction and probability"
        "{% if record.predictions[0].label is not none %}; blue: it is the label, red: it is not, with the label below"
        "{% endif %}.",
        title="{{ rows|length }} image{{ rows|s }} with {{ record.aliases[0] }}'s prediction",
        rows=_pictures,
    ),
    glance=Overview(lambda record: by_file_name(record.predictions), _COLUMNS),
    sections=(
        Section(
            "Which predictions are least certain?",
            lambda record: by_file_name(record.predictions) if len(record.predictions) > ROWS else (),
            opening=_uncertain,
            order=lambda row: row.probability_1,
            columns=_COLUMNS,
        ),
    ),
)
