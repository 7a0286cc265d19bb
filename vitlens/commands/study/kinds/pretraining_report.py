"""What `vitlens study --kind pretraining` claims and shows in addition to what every kind does."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from vitlens.charts import intervals, lines, matrix
from vitlens.charts.features import Cloud, feature_space
from vitlens.commands.study.record import FeatureScoreRow, LikenessRow, StudyRecord
from vitlens.record import by
from vitlens.report.claims import Claim
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import LEVEL, Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WITHOUT_LABELS: Final = ("mae", "dino")  # CLIP's captions name the class


def nearest_scores(record: StudyRecord) -> list[FeatureScoreRow]:
    """Return the accuracies of k-NN with the most neighbours, in the order of the points."""
    rows = [row for row in record.feature_scores if row.measure.startswith("k-NN")]
    return [row for row in rows if row.measure == rows[-1].measure]


def _word(gain: Estimate | None, p: float | None) -> str:
    """Return a paired difference in a word: significant, or not decided."""
    if gain is None or p is None or p > LEVEL:
        return "not shown to differ from"
    return "above" if gain.value > 0 else "below"


def claims(record: StudyRecord) -> Iterator[Claim]:
    """Yield what training without labels brings by k-NN, where attention finds objects, and what the words of CLIP
    tell."""
    known = nearest_scores(record)
    best = max((row for row in known if row.label in WITHOUT_LABELS), key=lambda row: row.value.value, default=None)
    finding = [row for row in record.objectness if row.finds_objects]
    if best is not None:
        supervised = next(row for row in known if row.label == "supervised")
        ends = _word(best.over_random, best.p_random), _word(best.over_supervised, best.p_supervised)
        others = [row for row in known if row.label in WITHOUT_LABELS and row is not best]
        because = "k-NN accuracy is not shown to exceed that of random weights"
        yield Claim(
            "features without labels",
            best.label,
            say(
                "Among models trained without labels, **{{ row.words }}** has the highest {{ row.measure|whole }} "
                "accuracy, {{ row.value|alone }}: {{ ends[0] }} random weights and {{ ends[1] }} the supervised model "
                "({{ supervised|value }}).{% for other in others %} Its difference from **{{ other.words }}** "
                "({{ other.value|value }}) was not tested.{% endfor %}",
                row=best,
                ends=ends,
                supervised=supervised.value,
                others=others,
            ),
            say(
                "{{ row.words|whole }}'s k-NN is {{ ends[0] }} random weights, {{ ends[1] }} supervised",
                row=best,
                ends=ends,
            ),
            Verdict("inconclusive", because) if ends[0].startswith("not") else None,
            effect=best.over_random,
            p=best.p_random,
            kind="answer",
            place="neighbours",
        )
    if record.objectness:
        top = max(record.objectness, key=lambda row: row.iou.value)
        yield Claim(
            "attention and objects",
            "the best heads",
            say(
                "{% if finding %}The attention of {{ finding|names }} overlaps the objects more than maps of other "
                "images and the mean mask do{% else %}No variant's attention is shown to overlap the objects more than "
                "both maps of other images and the mean mask{% endif %}; the highest overlap (IoU) is "
                "{{ top.iou|alone }}, of **{{ top.words }}**, against {{ top.shuffled|alone }} and "
                "{{ top.mean_mask|alone }}. {% if learned %}{{ learned|names }} also {% if learned|length > 1 "
                "%}exceed{% else %}exceeds{% endif %} random "
                "weights{% else %}None is shown to exceed random weights (their attention follows pixels){% endif %}.",
                finding=[row.words for row in finding],
                top=top,
                learned=[row.words for row in record.objectness if row.learned_objects],
            ),
            effect=top.over_shuffled,
            p=top.p_shuffled,
            kind="answer",
            place="objectness",
            verdict=None if finding else Verdict("inconclusive", _NO_OBJECTS),
        )
    yield from _hardest(record)
    for row in record.zero_shot:
        yield Claim(
            "zero-shot",
            row.label,
            say(
                "**{{ row.words }}** classifies {{ row.mean|alone }} of the images correctly by comparing them with "
                "words, averaged over {{ row.wordings }} wordings (guessing: {{ row.chance|percent }}). Its training "
                "captions name the class, so it has seen the labels.",
                row=row,
            ),
            effect=row.mean,
            reference=row.chance,
            kind="answer",
            place="wordings",
        )


def _differing(record: StudyRecord) -> list[FeatureScoreRow]:
    """Return the losses to corruptions that differ significantly from the supervised point's, the largest first."""
    rows = [row for row in record.corrupted if row.p_supervised is not None and row.p_supervised <= LEVEL]
    return sorted(rows, key=lambda row: -abs(_lost(row)))


def _lost(row: FeatureScoreRow) -> float:
    """Return how much more a point loses than the supervised one."""
    return 0.0 if row.over_supervised is None else row.over_supervised.value


def _hardest(record: StudyRecord) -> Iterator[Claim]:
    """Yield the largest difference between a point and the supervised one in what a corruption costs."""
    for row in _differing(record)[:1]:
        yield Claim(
            "accuracy lost to a corruption",
            f"{row.words} and supervised",
            say(
                "**{{ row.words }}** loses {{ row.value|value }} of accuracy to {{ row.measure|whole }}: "
                "{{ row.over_supervised|alone }} {{ 'more' if more else 'less' }} than the supervised model.",
                row=row,
                more=_lost(row) > 0,
            ),
            effect=row.over_supervised,
            p=row.p_supervised,
            kind="comparison",
            evidence="intervened",
            place="corrupted",
        )


_NO_OBJECTS: Final = "no variant's attention is shown to exceed both maps of other images and the mean mask"


def _gains(rows: Sequence[FeatureScoreRow], *labels: str) -> str:
    """Return the differences of points from random weights and from the supervised one, the significant ones marked."""
    return listed(
        [
            say(
                "**{{ row.words }}** {{ row.over_supervised|alone }}{% if not sure %} (undecided){% endif %}",
                row=row,
                sure=row.p_supervised is not None and row.p_supervised <= LEVEL,
            )
            for row in rows
            if row.label in labels
        ]
    )


def _neighbours(record: StudyRecord) -> str:
    rows = nearest_scores(record)
    return say(
        "{{ measure|whole }} accuracy minus that of the supervised model: {{ gains }}.",
        measure=rows[0].measure,
        gains=_gains(rows, *WITHOUT_LABELS, "clip"),
    )


def _robust(record: StudyRecord) -> str:
    """Return which points lose more or less than the supervised one, the largest differences first."""
    sure = _differing(record)
    return say(
        "{% if sure %}{% for row in sure[:4] %}**{{ row.words }}** loses "
        "{{ 'more' if row.over_supervised.value > 0 else 'less' }} to {{ row.measure|whole }} than the supervised "
        "model ({{ row.over_supervised|alone }}). {% endfor %}{% else %}No variant is shown to lose more or less of "
        "its probe's accuracy than the supervised model.{% endif %}",
        sure=sure,
    ).strip()


def _shots(record: StudyRecord) -> str:
    """Return the highest with the fewest and with the most images a class."""
    by_shots = by(record.few_shot, "shots")
    tops = [max(by_shots[shots], key=lambda row: row.accuracy.value) for shots in (min(by_shots), max(by_shots))]
    return say(
        "{% for row in tops %}With {{ row.shots }} image{{ row.shots|s }} a class, **{{ row.words }}** is best: "
        "{{ row.accuracy|alone }}. {% endfor %}These are means over {{ tops[0].draws }} draws of images, the same for "
        "all variants; intervals are over seeds.",
        tops=tops if len(by_shots) > 1 else tops[:1],
    )


def _alike(record: StudyRecord) -> str:
    """Return the two objectives that are most alike."""
    rows = [row for row in _pairs(record) if row.label != "random"]
    top = max(rows, key=lambda row: row.cka.value, default=None)
    return say(
        "{% if top %}Of the trained variants, **{{ top.words }}** and **{{ top.against_words }}** are most similar "
        "(CKA {{ top.cka|alone }}). {% endif %}The diagonal compares trainings of one variant with different seeds: no "
        "two variants can be expected to be more similar.",
        top=top,
    )


def _pairs(record: StudyRecord) -> list[LikenessRow]:
    """Return every pair of points once."""
    order = [row.label for row in record.points]
    return [row for row in record.likeness if order.index(row.label) < order.index(row.against)]


def _draw_space(record: StudyRecord, title: str) -> "Figure":
    """Return the t-SNE of every point, side by side."""
    assert record.space is not None
    classes = [str(name) for name in record.space.classes]
    clouds = [
        Cloud(record.points[at].words, points, classes, record.space.labels, named=False)
        for at, points in record.space.points.items()
    ]
    return feature_space(clouds, title)


SECTIONS: Final = (
    Section(
        "What do features know without a classifier?",
        nearest_scores,
        opening=_neighbours,
        about=("features without labels",),
        columns=("words", "value", "over_random", "p_random", "over_supervised", "p_supervised"),
        charts=(
            Chart(
                "neighbours",
                intervals("words", "value", of="measure"),
                "Test accuracy of k-NN and of a linear probe on frozen features, mean over seeds with 95 % intervals "
                "over seeds.",
                title="k-NN and linear probe of each variant",
                rows="feature_scores",
            ),
            Chart(
                "space",
                _draw_space,
                "Test images by t-SNE of each variant's features (first seed). Distances between groups mean nothing.",
                title="The same test images in each variant's features",
                whole=True,
                only=lambda record: record.space is not None and bool(record.space.points),
            ),
        ),
    ),
    Section(
        "How many labels are enough?",
        "few_shot",
        opening=_shots,
        columns=("words", "shots", "accuracy", "spread"),
        charts=(
            Chart(
                "few_shot",
                lines("shots", "accuracy", of="words", reference="chance"),
                "Accuracy of the nearest class mean over the number of training images a class, bands over seeds; "
                "dashed: guessing.",
                title="Accuracy with a few images a class",
            ),
        ),
    ),
    Section(
        "Does attention find objects?",
        "objectness",
        about=("attention and objects",),
        opening="{{ rows|selectattr('finds_objects')|list|length }} of {{ rows|length }} variants are significantly "
        "above both, {{ rows|selectattr('learned_objects')|list|length }} also above random weights. The head "
        "is chosen on one half of {{ rows[0].images }} images and measured on the other.",
        columns=("words", "iou", "over_shuffled", "over_mean", "over_random", "p_random"),
        charts=(
            Chart(
                "objectness",
                intervals("words", "iou", "shuffled", "mean_mask"),
                "Overlap of the objects with an equal area of the best head's attention, of maps of other images, and "
                "of the mean mask.",
                title="Attention on objects, compared with maps that ignore the image",
            ),
        ),
    ),
    Section(
        "How well can it classify by words?",
        "wordings",
        about=("zero-shot",),
        opening=lambda record: say(
            "{% for row in rows %}Over {{ row.wordings }} wordings, the accuracy of **{{ row.words }}** ranges from "
            "{{ row.lowest|value }} to {{ row.highest|value }} (means over seeds of the lowest and the highest)."
            "{% endfor %}",
            rows=record.zero_shot,
        ),
        columns=("wording", "seen", "accuracy"),
        charts=(
            Chart(
                "wordings",
                intervals("wording", "accuracy"),
                "Zero-shot accuracy of each wording, mean over seeds with 95 % intervals over seeds.",
                title="Zero-shot accuracy by wording, guessing: {{ first.chance|percent }}",
            ),
        ),
    ),
    Section(
        "Do the objectives learn the same?",
        _pairs,
        opening=_alike,
        columns=("words", "against_words", "cka"),
        order=lambda row: -row.cka.value,
        charts=(
            Chart(
                "likeness",
                matrix("words", "against_words", "cka"),
                "CKA of the last layers' features of test images, mean over seeds; on the diagonal between seeds.",
                title="Similarity of the variants' features",
                rows="likeness",
            ),
        ),
    ),
    Section(
        "Which features withstand corruptions?",
        "corrupted",
        opening=_robust,
        columns=("words", "measure", "value", "over_supervised", "p_supervised"),
        charts=(
            Chart(
                "corrupted",
                intervals("words", "value", of="measure", reference=0.0),
                "Accuracy of a linear probe on clean test images minus that on corrupted ones, of a medium severity.",
                title="Accuracy lost to corruptions",
            ),
        ),
    ),
)
