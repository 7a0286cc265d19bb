"""The report of a study of training with and without labels: features, objects, wordings and
corruptions.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from vitlens.charts import intervals, lines, matrix
from vitlens.charts.features import Cloud, feature_space
from vitlens.commands.study.kinds.pretraining.record import (
    FeatureScoreRow,
    LikenessRow,
    PretrainingRecord,
)
from vitlens.commands.study.kinds.record import negated
from vitlens.commands.study.kinds.report import (
    CHANGES,
    CHOICE,
    kind_report,
    range_claim,
    undecidable,
)
from vitlens.record import by
from vitlens.report.claims import Claim
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import LEVEL, Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WITHOUT_LABELS: Final = ("mae", "dino")  # not CLIP, whose captions name the class
_SUPERVISED: Final = "supervised"
_CORRUPTIONS: Final = 4  # in a sentence
_NO_OBJECTS: Final = (
    "no variant's attention is shown to exceed both maps of other images and the mean mask"
)
_NOT_ABOVE_RANDOM: Final = "k-NN accuracy is not shown to exceed that of random weights"


def claims(record: PretrainingRecord) -> Iterator[Claim]:
    """Yield what the features are worth, or why nothing is decided, and the range of either."""
    doubt = undecidable(record)
    if doubt is None:
        yield from _feature_claims(record)
    else:
        yield doubt
    yield range_claim(record)


def _feature_claims(record: PretrainingRecord) -> Iterator[Claim]:
    """Yield the best features without labels, attention on objects, a corruption, and accuracy by
    wordings.
    """
    without_labels = [row for row in nearest_scores(record) if row.label in WITHOUT_LABELS]
    if without_labels:
        yield _without_labels_claim(record, without_labels)
    if record.objectness:
        yield _objects_claim(record)
    yield from _corruption_claim(record)
    for row in record.zero_shot:
        sentence = say(
            "**{{ row.words }}** classifies {{ row.mean|alone }} of the images correctly by "
            "comparing them with words, averaged over {{ row.wordings }} wordings (guessing: "
            "{{ row.chance|percent }}). Its training captions name the class, so it has seen the "
            "labels.",
            row=row,
        )
        yield Claim(
            "zero-shot",
            row.label,
            sentence,
            effect=row.mean,
            reference=row.chance,
            kind="answer",
            place="wordings",
        )


def nearest_scores(record: PretrainingRecord) -> list[FeatureScoreRow]:
    """Return the accuracies of k-NN with the most neighbours, in the order of the variants."""
    rows = [row for row in record.feature_scores if row.measure.startswith("k-NN")]
    if not rows:
        return []
    most_neighbours = rows[-1].measure  # they ascend
    return [row for row in rows if row.measure == most_neighbours]


def _without_labels_claim(record: PretrainingRecord, rows: Sequence[FeatureScoreRow]) -> Claim:
    """Return the highest k-NN accuracy among models trained without labels; rows: of these
    models."""
    best = max(rows, key=lambda row: row.value.value)
    against_random = _comparison_in_words(best.over_random, best.p_random)
    against_supervised = _comparison_in_words(best.over_supervised, best.p_supervised)
    (supervised,) = [row for row in nearest_scores(record) if row.label == _SUPERVISED]
    sentence = say(
        "Among models trained without labels, **{{ row.words }}** has the highest "
        "{{ accuracy }}, {{ row.value|alone }}. It is {{ against_random }} random weights and "
        "{{ against_supervised }} the supervised model "
        "({{ supervised|value }}).{% for other in others %} Its difference from "
        "**{{ other.words }}** ({{ other.value|value }}) was not tested.{% endfor %}",
        row=best,
        accuracy=_neighbour_accuracy(best),
        against_random=against_random,
        against_supervised=against_supervised,
        supervised=supervised.value,
        others=[row for row in rows if row is not best],
    )
    title = say(
        "{{ row.words|whole }}'s k-NN is {{ against_random }} random weights, "
        "{{ against_supervised }} supervised",
        row=best,
        against_random=against_random,
        against_supervised=against_supervised,
    )
    verdict = None
    if not _is_significant(best.p_random):
        verdict = Verdict("inconclusive", _NOT_ABOVE_RANDOM)
    return Claim(
        "features without labels",
        best.label,
        sentence,
        title,
        verdict,
        effect=best.over_random,
        p=best.p_random,
        kind="answer",
        place="neighbours",
    )


def _neighbour_accuracy(row: FeatureScoreRow) -> Marked:
    """Return the name of a k-NN accuracy: "k-NN accuracy (k = 20)"."""
    name, _, neighbours = row.measure.partition(", ")
    return Marked(
        say("{{ name|whole }} accuracy ({{ neighbours|whole }})", name=name, neighbours=neighbours)
    )


def _is_significant(p: float | None) -> bool:
    return p is not None and p <= LEVEL


def _comparison_in_words(difference: Estimate | None, p: float | None) -> str:
    """Return on which side of another variant one lies, if the difference is significant."""
    if difference is None or not _is_significant(p):
        return "not shown to differ from"
    return "above" if difference.value > 0 else "below"


def _objects_claim(record: PretrainingRecord) -> Claim:
    """Return which variants' attention overlaps the objects more than both baselines, and more
    than that of random weights.
    """
    finding = [row.words for row in record.objectness if row.finds_objects]
    top = max(record.objectness, key=lambda row: row.iou.value)
    sentence = say(
        "{% if finding %}The attention of {{ finding|names }} overlaps the objects more than "
        "maps of other images and the mean mask do{% else %}No variant's attention is shown to "
        "overlap the objects more than both maps of other images and the mean mask{% endif %}; "
        "the highest overlap is {{ top.iou|alone }}, of **{{ top.words }}**, compared with "
        "{{ top.shuffled|value }} and {{ top.mean_mask|value }}. "
        "{% if learned %}{{ learned|names }} also "
        "{% if learned|length > 1 %}exceed{% else %}exceeds{% endif %} random "
        "weights{% else %}None is shown to exceed random weights (their attention follows "
        "pixels){% endif %}.",
        finding=finding,
        top=top,
        learned=[row.words for row in record.objectness if row.learned_objects],
    )
    return Claim(
        "attention and objects",
        "the best heads",
        sentence,
        verdict=None if finding else Verdict("inconclusive", _NO_OBJECTS),
        effect=top.over_shuffled,
        p=top.p_shuffled,
        kind="answer",
        place="objectness",
    )


def _corruption_claim(record: PretrainingRecord) -> Iterator[Claim]:
    """Yield the largest difference from the supervised variant in the accuracy lost to a
    corruption.
    """
    losses = _different_losses(record)
    if not losses:
        return
    row = losses[0]
    difference = row.over_supervised
    assert difference is not None  # as it is significant
    loses_more = difference.value > 0
    sentence = say(
        "**{{ row.words }}** loses {{ row.value|points|value }} of accuracy to "
        "{{ row.measure|whole }}, {{ difference|alone }} {{ 'more' if loses_more else 'less' }} "
        "than the supervised model.",
        row=row,
        difference=difference if loses_more else negated(difference),
        loses_more=loses_more,
    )
    yield Claim(
        "accuracy lost to a corruption",
        f"{row.words} and supervised",
        sentence,
        effect=row.over_supervised,
        p=row.p_supervised,
        kind="comparison",
        evidence="intervened",
        place="corrupted",
    )


def _different_losses(record: PretrainingRecord) -> list[FeatureScoreRow]:
    """Return the losses that differ significantly from the supervised variant's, the largest
    difference first.
    """
    rows = [row for row in record.corrupted if _is_significant(row.p_supervised)]
    return sorted(rows, key=_size_of_difference, reverse=True)


def _size_of_difference(row: FeatureScoreRow) -> float:
    return 0.0 if row.over_supervised is None else abs(row.over_supervised.value)


def _gains_of_neighbours(record: PretrainingRecord) -> str:
    """Return the k-NN accuracies minus that of the supervised variant."""
    rows = nearest_scores(record)
    gains = []
    for row in rows:
        if row.label in (*WITHOUT_LABELS, "clip"):
            gain = say(
                "**{{ row.words }}** {{ row.over_supervised|alone }}{% if not significant %} "
                "(undecided){% endif %}",
                row=row,
                significant=_is_significant(row.p_supervised),
            )
            gains.append(gain)
    return say(
        "{{ accuracy }} minus that of the supervised model: {{ gains }}.",
        accuracy=_neighbour_accuracy(rows[0]),
        gains=listed(gains),
    )


def _most_different_losses(record: PretrainingRecord) -> str:
    """Return which variants lose more or less than the supervised one, the largest differences
    first.
    """
    return say(
        "{% for row in rows %}**{{ row.words }}** loses "
        "{{ 'more' if row.over_supervised.value > 0 else 'less' }} to {{ row.measure|whole }} "
        "than the supervised model ({{ row.over_supervised|alone }}). {% else %}No variant is "
        "shown to lose more or less of its probe's accuracy than the supervised "
        "model.{% endfor %}",
        rows=_different_losses(record)[:_CORRUPTIONS],
    )


def _best_with_few_images(record: PretrainingRecord) -> str:
    """Return the best variant with the fewest and with the most images per class."""
    by_shots = by(record.few_shot, "shots")
    fewest_and_most = sorted({min(by_shots), max(by_shots)})  # one number if they are the same
    best = [max(by_shots[shots], key=lambda row: row.accuracy.value) for shots in fewest_and_most]
    return say(
        "{% for row in best %}With {{ row.shots }} image{{ row.shots|s }} per class, "
        "**{{ row.words }}** is best: {{ row.accuracy|alone }}. {% endfor %}These are means over "
        "{{ best[0].draws }} draws of images, the same for all variants; intervals are over "
        "seeds.",
        best=best,
    )


def _most_similar(record: PretrainingRecord) -> str:
    """Return the two trained variants whose features are most similar."""
    rows = [row for row in _pairs(record) if row.label != "random"]
    return say(
        "{% if top %}Of the trained variants, **{{ top.words }}** and "
        "**{{ top.against_words }}** are most similar (CKA {{ top.cka|alone }}). {% endif %}The "
        "diagonal compares trainings of one variant with different seeds: no two variants can be "
        "expected to be more similar.",
        top=max(rows, key=lambda row: row.cka.value, default=None),
    )


def _pairs(record: PretrainingRecord) -> list[LikenessRow]:
    """Return every pair of variants once."""
    order = [row.label for row in record.points]
    return [row for row in record.likeness if order.index(row.label) < order.index(row.against)]


def _range_over_wordings(record: PretrainingRecord) -> str:
    """Return the lowest and the highest accuracy over wordings."""
    return say(
        "{% for row in rows %}Over {{ row.wordings }} wordings, the accuracy of "
        "**{{ row.words }}** ranges from {{ row.lowest|value }} to {{ row.highest|value }} "
        "(means over seeds of the lowest and the highest).{% endfor %}",
        rows=record.zero_shot,
    )


def _has_space(record: PretrainingRecord) -> bool:
    return record.space is not None and bool(record.space.points)


def _draw_space(record: PretrainingRecord, title: str) -> "Figure":
    """Draw the t-SNE of the features of every variant, side by side."""
    assert record.space is not None
    classes = [str(name) for name in record.space.classes]
    clouds = []
    for index, points in record.space.points.items():
        words = record.points[index].words
        clouds.append(Cloud(words, points, classes, record.space.labels, named=False))
    return feature_space(clouds, title)


_NEIGHBOURS: Final = Section(
    "What do features know without a classifier?",
    nearest_scores,
    opening=_gains_of_neighbours,
    about=("features without labels",),
    columns=("words", "value", "over_random", "p_random", "over_supervised", "p_supervised"),
    charts=(
        Chart(
            "neighbours",
            intervals("words", "value", of="measure"),
            "Test accuracy of k-NN and of a linear probe on frozen features, mean over seeds "
            "with 95 % intervals over seeds.",
            title="k-NN and linear probe of each variant",
            rows="feature_scores",
        ),
        Chart(
            "space",
            _draw_space,
            "Test images by t-SNE of each variant's features (first seed). Distances between "
            "groups mean nothing.",
            title="The same test images in each variant's features",
            whole=True,
            only=_has_space,
        ),
    ),
)
_FEW_SHOT: Final = Section(
    "How many labels are enough?",
    "few_shot",
    opening=_best_with_few_images,
    columns=("words", "shots", "accuracy", "spread"),
    charts=(
        Chart(
            "few_shot",
            lines("shots", "accuracy", of="words", reference="chance"),
            "Accuracy of the nearest class mean over the number of training images a class, "
            "bands over seeds; dashed: guessing.",
            title="Accuracy with a few images a class",
        ),
    ),
)
_OBJECTS: Final = Section(
    "Does attention find objects?",
    "objectness",
    about=("attention and objects",),
    opening="{{ rows|selectattr('finds_objects')|list|length }} of {{ rows|length }} variants are "
    "significantly above both baselines, {{ rows|selectattr('learned_objects')|list|length }} also "
    "above random weights. The head is chosen on one half of {{ rows[0].images }} images and "
    "measured on the other.",
    columns=("words", "iou", "over_shuffled", "over_mean", "over_random", "p_random"),
    charts=(
        Chart(
            "objectness",
            intervals("words", "iou", "shuffled", "mean_mask"),
            "Overlap of the objects with an equal area of the best head's attention, of maps of "
            "other images, and of the mean mask.",
            title="Attention on objects, compared with maps that ignore the image",
        ),
    ),
)
_WORDINGS: Final = Section(
    "How well can it classify by words?",
    "wordings",
    about=("zero-shot",),
    opening=_range_over_wordings,
    columns=("wording", "seen", "accuracy"),
    charts=(
        Chart(
            "wordings",
            intervals("wording", "accuracy"),
            "Zero-shot accuracy of each wording, mean over seeds with 95 % intervals over seeds.",
            title="Zero-shot accuracy by wording, guessing: {{ first.chance|percent }}",
        ),
    ),
)
_SIMILARITY: Final = Section(
    "Do the objectives learn the same?",
    _pairs,
    opening=_most_similar,
    columns=("words", "against_words", "cka"),
    order=lambda row: -row.cka.value,
    charts=(
        Chart(
            "likeness",
            matrix("words", "against_words", "cka"),
            "CKA of the last layers' features of test images, mean over seeds; on the diagonal "
            "between seeds.",
            title="Similarity of the variants' features",
            rows="likeness",
        ),
    ),
)
_CORRUPTED: Final = Section(
    "Which features withstand corruptions?",
    "corrupted",
    opening=_most_different_losses,
    columns=("words", "measure", "value", "over_supervised", "p_supervised"),
    charts=(
        Chart(
            "corrupted",
            intervals("words", "value", of="measure", reference=0.0),
            "Accuracy of a linear probe on clean test images minus that on corrupted ones, of a "
            "medium severity.",
            title="Accuracy lost to corruptions",
        ),
    ),
)
REPORT: Final = kind_report(
    PretrainingRecord,
    claims,
    (_NEIGHBOURS, _FEW_SHOT, _OBJECTS, _WORDINGS, _SIMILARITY, _CORRUPTED, CHOICE, CHANGES),
)
