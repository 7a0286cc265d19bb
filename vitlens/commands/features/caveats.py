"""What `vitlens features` does not show."""

from collections.abc import Iterator
from typing import Final

from vitlens.commands.features.claims import known_objectives
from vitlens.commands.features.record import FeaturesRecord
from vitlens.report.claims import few_images
from vitlens.report.prose import listed, say

GROUP: Final = 10  # images of a class from which a map can show them as a group
SEARCHED: Final = 100  # images from which the nearest of them is informative
SAME_SIZE: Final = 1.05  # ratio of parameters up to which two models have the same size
_WITHOUT_OBJECTIVE: Final = ("not known", "random weights")


def unknown(record: FeaturesRecord) -> Iterator[str]:
    """Yield what could overturn the results, the most serious first."""
    yield from few_images(record.images)
    yield from _omissions(record)
    if len(record.features) > 1:
        yield from _pretraining(record)
    yield from _limits_of_images(record)
    if record.depth:
        yield (
            "A layer can hold the class without the model reading it there; `vitlens ablate` "
            "tests this."
        )
        yield (
            "The best layer is best partly by chance, because the images that choose it also "
            "measure it."
        )
    yield from _projections(record)


def _omissions(record: FeaturesRecord) -> Iterator[str]:
    """Yield what was not measured, and the first note of the measurements."""
    [data] = record.sets  # all models have the same images
    if data.bank is None:
        yield say(
            "k-NN and linear probe were left out, because {{ reason|whole }}.", reason=data.no_bank
        )
    for row in record.features:
        if row.no_zero_shot:
            yield say("{{ r.model }} has no zero-shot accuracy: {{ r.no_zero_shot|whole }}.", r=row)
    if record.notes:
        yield say(
            "{{ first.note|whole }}{% if more %} (more in `tables/notes.csv`){% endif %}.",
            first=record.notes[0],
            more=record.notes[1:],
        )


def _pretraining(record: FeaturesRecord) -> Iterator[str]:
    """Yield how far the numbers of several models compare pretrainings."""
    without_objective = [row.model for row in record.features if row.objective == "not known"]
    if without_objective:
        yield say(
            "The pretraining of {{ models|names }} is not known; state it with `--objective "
            "ALIAS=OBJECTIVE`.",
            models=without_objective,
        )
    untrained = [row.model for row in record.features if row.objective == "random weights"]
    if untrained:
        yield say(
            "{{ models|names }} {{ models|have }} random weights, which say nothing about "
            "pretraining.",
            models=untrained,
        )
    objectives = known_objectives(record.features)
    if len(objectives) == 1:
        yield say(
            "All known pretrainings are {{ objective }}: these numbers compare models, not "
            "pretrainings.",
            objective=objectives[0],
        )
    elif objectives:
        yield _other_differences(record)


def _other_differences(record: FeaturesRecord) -> str:
    """Return what differs between models of several pretrainings, as far as it is recorded."""
    rows = [row for row in record.features if row.objective not in _WITHOUT_OBJECTIVE]
    parts = []
    data = {row.data for row in rows}
    if len(data) > 1 or "" in data:
        parts.append("data")
    if len({row.labels for row in rows}) > 1:
        parts.append("labels of a later fine-tuning")
    sizes = [row.parameters for row in rows]
    if max(sizes) > SAME_SIZE * min(sizes):
        parts.append("size")
    if parts:
        return say(
            "The models also differ in {{ parts }}, so no difference is due to pretraining only.",
            parts=listed(parts),
        )
    return (
        "The pretrainings have the same data and size: what else differs are steps, learning rate "
        "and chance. One training of each was compared."
    )


def _limits_of_images(record: FeaturesRecord) -> Iterator[str]:
    """Yield notes about training images, and about too few images for neighbours or groups."""
    [data] = record.sets
    if data.bank is not None:
        yield say(
            "Neighbours and probes learn from {{ n }} training images. A model that was trained "
            "on these images separates them better than unseen images.",
            n=data.bank,
        )
    few = [row.searched for row in record.features if 0 < row.searched < SEARCHED]
    if few:
        yield say(
            "The nearest of {{ n }} images need not be similar; search at least {{ least }}.",
            n=few[0],
            least=SEARCHED,
        )
    if 0 < data.largest < GROUP:
        yield say(
            "Maps cannot show groups, because the largest class has only {{ n }} image{{ n|s }}.",
            n=data.largest,
        )


def _projections(record: FeaturesRecord) -> Iterator[str]:
    """Yield how much of the variance the weakest map by PCA shows."""
    by_pca = [
        row for row in record.maps if row.explained is not None and row.of in ("images", "patches")
    ]
    if by_pca:
        weakest = min(by_pca, key=lambda row: row.explained or 0.0)
        yield say(
            "PCA of the {{ map.of }} of {{ map.model }} shows {{ map.explained|percent }} of their "
            "variance, and t-SNE distorts distances.",
            map=weakest,
        )
