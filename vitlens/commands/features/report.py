"""The report of `vitlens features`."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from vitlens.charts import images, intervals, lines, matrix
from vitlens.charts.features import correspondences, feature_space, patch_map
from vitlens.commands.features.caveats import unknown
from vitlens.commands.features.claims import (
    claims,
    concluding_classifiers,
    effects,
    most_neighbours,
)
from vitlens.commands.features.pictures import (
    image_clouds,
    matched_patches,
    nearest_images,
    patch_clouds,
    patch_colours,
    patch_maps,
    prompt_maps,
    shows_groups,
)
from vitlens.commands.features.record import (
    PROBE,
    DepthRow,
    FeaturesRecord,
    FeaturesRow,
    LayersRow,
    neighbours_of,
)
from vitlens.commands.shared.comparison import UNDECIDED
from vitlens.record import by
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import Estimate

_NEARLY: Final = 0.9  # share of the last layer's accuracy
_MOST_SENTENCES: Final = 3  # of a section
_SHARED: Final = {  # what patches share with the nearest patches, by `share` of PatchesRow
    "position": Marked("share of nearest patches at the same place"),
    "object": Marked("overlap of the object with the patches that their neighbours assign to it"),
}


def _over_depth(record: FeaturesRecord) -> str:
    """Return the accuracy at the first, the last and the best layer of each model."""
    classifier = concluding_classifiers(record, record.depth)[0]
    rows_of_classifier = [row for row in _curves(record) if row.classifier == classifier]
    sentences = []
    for rows in by(rows_of_classifier, "model").values():
        last = rows[-1]
        best = max(rows, key=lambda row: row.accuracy.value)
        threshold = _NEARLY * last.accuracy.value
        reaching = [row for row in rows if row.accuracy.value >= threshold]
        sentence = say(
            "With the {{ last.name }}, the features of **{{ last.model }}** give the class of "
            "{{ first.accuracy|value }} of the images in {{ first.place }} and of "
            "{{ last.accuracy|value }} in {{ last.place }}, the last layer{% if is_better %} "
            "(most: {{ best.accuracy|value }} in {{ best.place }}){% endif %}. The first layer "
            "to reach {{ share|percent }} of the last layer's accuracy is {{ nearly.place }}.",
            first=rows[0],
            last=last,
            best=best,
            is_better=best.accuracy.value > last.accuracy.value,
            nearly=reaching[0],
            share=_NEARLY,
        )
        sentences.append(sentence)
    return " ".join(sentences[:_MOST_SENTENCES])


def _curves(record: FeaturesRecord) -> list[DepthRow]:
    """Return the rows of the probe, of the fewest and of the most neighbours.

    Neighbours vote by similarity.
    """
    by_neighbours = dict.fromkeys(row.classifier for row in record.depth if row.classifier != PROBE)
    names = list(by_neighbours)
    classifiers = {PROBE, *names[:1], *names[-1:]}
    return [
        row for row in record.depth if row.weighting != "majority" and row.classifier in classifiers
    ]


def _layers(record: FeaturesRecord) -> list[LayersRow]:
    """Return the pairs of layers with features that vary."""
    return [row for row in (*record.between, *record.within) if _has_similarity(row)]


def _has_similarity(row: LayersRow) -> bool:
    """Return True if the features of both layers vary."""
    return row.cka is not None and row.rank is not None


def _first_and_last_layers(record: FeaturesRecord) -> Iterator[LayersRow]:
    """Yield the similarity of two models' last layers, and of each model's first and last layer."""
    for rows in by((*record.between, *record.within), "models").values():
        last = rows[-1]  # the pair of last layers, as the second layer of pairs varies fastest
        for row in rows:
            is_shown = row.layer == "0" and row.other == last.other if last.alone else row is last
            if is_shown and _has_similarity(row):
                yield row


def _shared_by_patches(record: FeaturesRecord) -> str:
    """Return what the nearest patches share before any attention and in the last layer."""
    sentences = []
    for share, words in _SHARED.items():
        rows_of_share = [row for row in record.patches if row.share == share]
        for model, rows in by(rows_of_share, "model").items():
            parts = []
            for row in rows:
                parts.append(
                    say(
                        "{{ r.value|value }} in {{ r.place }} ({{ r.chance|percent }} by chance)",
                        r=row,
                    )
                )
            sentence = say(
                "In **{{ model }}**, the {{ words }} is {{ parts }}.",
                model=model,
                words=words,
                parts=listed(parts),
            )
            sentences.append(sentence)
    return " ".join(sentences[:_MOST_SENTENCES])


def _trustworthiness(record: FeaturesRecord) -> str:
    """Return how far the maps can be trusted, and why maps of images are missing."""
    rows = [row.trustworthiness for row in record.maps if row.of in ("images", "patches")]
    low = min(rows, key=lambda estimate: estimate.value)
    high = max(rows, key=lambda estimate: estimate.value)
    return say(
        "The trustworthiness of these maps is {{ low|value }}{% if low != high %} to "
        "{{ high|value }}{% endif %}.{% if not groups %} Images are only mapped with `--tsne`, "
        "because classes of at most {{ n }} images form no groups.{% endif %}",
        low=low,
        high=high,
        groups=shows_groups(record),
        n=record.sets[0].largest,
    )


def _nearest(row: FeaturesRow) -> str:
    """Return the template on how many of the nearest images are of the image's class."""
    if not row.precision:
        return ""
    shares = []
    for k, share in row.precision.items():
        if k == "1":
            shares.append(say("{{ share|alone }} of the nearest images", share=share))
        else:
            words = say("{{ share|alone }} of the {{ k }} nearest images", share=share, k=k)
            shares.append(words)
    return "For **{{ model }}**, " + listed(shares) + " are of the image's class."


def _difference(record: FeaturesRecord, classifier: str) -> Estimate | None:
    """Return the difference of two models by a classifier."""
    for row in record.pairs:
        if row.classifier == classifier:
            return row.difference
    return None


def _difference_by_neighbours(record: FeaturesRecord) -> Estimate | None:
    return _difference(record, most_neighbours(record))


def _by_most_neighbours(record: FeaturesRecord) -> list[FeaturesRow]:
    """Return the models with only the results of the most neighbours, under the name "most"."""
    k = neighbours_of(most_neighbours(record))
    rows = []
    for row in record.features:
        if k in row.knn:
            most = replace(row, knn={"most": row.knn[k]}, precision={"most": row.precision[k]})
            rows.append(most)
    return rows


REPORT: Final = Report(
    FeaturesRecord,
    claims=claims,
    effects=effects,
    unknown=unknown,
    about_weights=False,
    picture=Chart(
        "patches",
        images(),
        "{{ rows|selectattr('row', 'eq', 'image')|list|length }} of {{ record.images }} images. "
        "Within a row, patches with similar features have similar colours (the first three "
        "principal components). Colours of two models are not comparable.",
        title="Patches of images coloured by their features in the last layer",
        rows=patch_colours,
    ),
    glance=(
        Glance("features", "objective"),
        Glance("features", "parameters"),
        Glance("features", "pool"),
        Glance(
            "features",
            "accuracy",
            title="accuracy of the model's classifier",
            question="classifier",
        ),
        Glance(
            "features",
            "probe",
            title="accuracy of a linear probe",
            difference=partial(_difference, classifier=PROBE),
        ),
        Glance(
            _by_most_neighbours,
            "knn",
            key="most",
            title="accuracy of k-NN (largest k)",
            difference=_difference_by_neighbours,
        ),
        Glance(
            _by_most_neighbours,
            "precision",
            key="most",
            title="neighbours of the image's class (largest k)",
        ),
        Glance("features", "zero_shot", title="zero-shot accuracy"),
        Glance("features", "candidates"),
        Glance("features", "chance"),
    ),
    sections=(
        Section(
            "From which layer on can the class be read?",
            "depth",
            opening=_over_depth,
            about=("classifier", "best layer"),
            charts=(
                Chart(
                    "depth",
                    lines("depth", "accuracy", of="model", panel="name", reference="chance"),
                    "Accuracy on test images from the features of each layer, with intervals. "
                    "Dashed: the most frequent class. Zero is the embedding.",
                    title="Accuracy of simple classifiers on features, layer by layer",
                    rows=_curves,
                ),
            ),
        ),
        Section(
            "Which model has the better last layer?",
            "pairs",
            about=("features",),
            columns=("first", "second", "classifier", "probe", "knn", "p_holm"),
            order=lambda row: (row.better == UNDECIDED, row.p_holm),
        ),
        Section(
            "Which layers are similar?",
            _first_and_last_layers,
            about=("last layers",),
            says="{% if row.alone %}The first and the last layer of **{{ first }}** "
            "have{% else %}The last layers of **{{ first }}** and **{{ second }}** have{% endif %} "
            "a CKA of {{ cka|alone }}. The rank correlation of their distances between images is "
            "{{ rank|number }}.",
            charts=(
                Chart(
                    "cka",
                    matrix("layer", "other", "cka", panel="models"),
                    "Linear CKA of every pair of layers; dark: similar. Blocks of dark cells are "
                    "layers with similar features.",
                    title="Linear CKA of the layers",
                    rows=_layers,
                ),
            ),
        ),
        Section(
            "What do patches hold before any attention and in the last layer?",
            "patches",
            opening=_shared_by_patches,
            columns=("model", "title", "share", "value", "chance"),
            about=("positions", "object by patches"),
            charts=(
                Chart(
                    "space_embedding",
                    patch_map,
                    "Patches as they enter the first block, in two dimensions. Groups of one "
                    "colour mean that position decides which patches are similar. Right: the "
                    "same without positions.",
                    title="The patch embeddings of {{ first.model }}, before any attention",
                    rows=patch_maps,
                    each="model",
                ),
            ),
        ),
        Section(
            "Which images and patches lie close together?",
            lambda record: [row for row in record.maps if row.of in ("images", "patches")],
            columns=("model", "of", "method", "trustworthiness", "explained"),
            opening=_trustworthiness,
            charts=(
                Chart(
                    "space_images",
                    feature_space,
                    "The last layer in two dimensions. Neighbours are meaningful; sizes of "
                    "groups and distances between them are not.",
                    title="The last layer's features, one point an image",
                    rows=image_clouds,
                ),
                Chart(
                    "space_patches",
                    feature_space,
                    "The last layer in two dimensions. Neighbours are meaningful; sizes of "
                    "groups and distances between them are not.",
                    title="The last layer's features, one point a patch",
                    rows=patch_clouds,
                ),
            ),
        ),
        Section(
            "Which images are similar?",
            lambda record: [row for row in record.features if row.searched],
            says=_nearest,
            charts=(
                Chart(
                    "retrieval",
                    images(largest=0.85),
                    "Nearest images of {{ rows|map(attribute='row')|unique|list|length }} "
                    "queries among {{ record.images }} images, with their cosine similarity. "
                    "Frames show if they are of the query's class.",
                    title="Nearest images in the last layer of {{ first.of }}",
                    rows=nearest_images,
                    each="of",
                ),
                Chart(
                    "matches",
                    correspondences,
                    "Arcs join patches of an image and of its nearest neighbour that are most "
                    "similar to each other. Equal positions can be the only reason.",
                    title="Best-matching patches of an image and its nearest",
                    rows=matched_patches,
                ),
            ),
        ),
        Section(
            "How much does the wording of a prompt matter?",
            "templates",
            columns=("model", "template", "accuracy", "gain", "p_holm"),
            charts=(
                Chart(
                    "templates",
                    intervals("template", "gain", of="model", reference=0),
                    "Zero-shot accuracy with one template minus that of the ensemble of all "
                    "(dashed), on the same images, with intervals.",
                    title="Zero-shot accuracy by template",
                    only=lambda row: row.gain is not None,
                ),
            ),
        ),
        Section(
            "Which places match a text?",
            "prompts",
            columns=("model", "name", "prompt", "cosine"),
            charts=(
                Chart(
                    "prompts",
                    images(scale="joint", label="relevance"),
                    "Relevance of patches for the similarity of image and text (Chefer 2021). "
                    "Places that are bright for every prompt depend on the image more than on "
                    "the text.",
                    title="Relevance of the patches for a text, in {{ first.of }}",
                    rows=prompt_maps,
                    each="of",
                ),
            ),
        ),
    ),
)
