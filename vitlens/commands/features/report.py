"""The report of `vitlens features`: what the layers of models hold, and whose features serve best."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from vitlens.charts import Picture, images, intervals, lines, matrix
from vitlens.charts.features import Cloud, Matches, PatchMap, correspondences, feature_space, patch_map
from vitlens.charts.style import RIGHT, RIGHT_SYMBOL, WRONG, WRONG_SYMBOL
from vitlens.commands.features.claims import GROUP, SEARCHED, claims, effects, most_neighbours, tested, unknown
from vitlens.commands.features.record import PROBE, DepthRow, FeaturesRecord, FeaturesRow, LayersRow, MapRow
from vitlens.commands.shared.comparison import UNDECIDED
from vitlens.commands.shared.sheets import file_names
from vitlens.record import by
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Glance, Report, Section
from vitlens.uncertainty import Estimate

_NEARLY: Final = 0.9  # of the last layer's accuracy
_SAID: Final = 3  # sentences of a section
_SHARED: Final = {
    "position": Marked("nearest patches at the same place"),
    "object": Marked("object found by the votes of nearest patches (intersection over union)"),
}
_METHODS: Final = {"tsne": "t-SNE", "pca": "PCA"}


def _over_depth(record: FeaturesRecord) -> str:
    """Return the accuracy at the first, the last and the best layer of each model."""
    name = tested(record, record.depth)[0]
    said = []
    for rows in by([row for row in _curves(record) if row.classifier == name], "model").values():
        last, best = rows[-1], max(rows, key=lambda row: row.accuracy.value)
        nearly = next(row for row in rows if row.accuracy.value >= _NEARLY * last.accuracy.value)
        said.append(
            say(
                "By the {{ last.name }}, the features of **{{ last.model }}** give the class of "
                "{{ first.accuracy|value }} of the images in {{ first.place }} and of {{ last.accuracy|value }} in "
                "{{ last.place }}, the last{% if better %} (most: {{ best.accuracy|value }} in "
                "{{ best.place }}){% endif %}; {{ nearly.place }} is the first to reach {{ share|percent }} of the "
                "last layer's accuracy.",
                first=rows[0],
                last=last,
                best=best,
                better=best.accuracy.value > last.accuracy.value,
                nearly=nearly,
                share=_NEARLY,
            )
        )
    return " ".join(said[:_SAID])


def _curves(record: FeaturesRecord) -> list[DepthRow]:
    """Return the probe, the most and the fewest neighbours (votes by similarity)."""
    names = list(dict.fromkeys(row.classifier for row in record.depth if row.classifier != PROBE))
    shown = {PROBE, *names[:1], *names[-1:]}
    return [row for row in record.depth if row.weighting != "majority" and row.classifier in shown]


def _layers(record: FeaturesRecord) -> list[LayersRow]:
    return [row for row in (*record.between, *record.within) if row.cka is not None and row.rank is not None]


def _ends(record: FeaturesRecord) -> Iterator[LayersRow]:
    """Yield the last layers of each pair of models, and the first and the last layer of each model."""
    for own in by(_layers(record), "models").values():
        first = [row for row in own if row.layer == "0" and row.other == own[-1].other]
        yield from first if own[-1].alone else own[-1:]


def _shared(record: FeaturesRecord) -> str:
    """Return what neighbours share before any attention and in the last layer."""
    said = []
    for share, words in _SHARED.items():
        for model, own in by([row for row in record.patches if row.share == share], "model").items():
            each = "{{ r.value|value }} in {{ r.place }} ({{ r.chance|percent }} by chance)"
            parts = listed([say(each, r=row) for row in own])
            said.append(say("**{{ model }}**, {{ words }}: {{ parts }}.", model=model, words=words, parts=parts))
    return " ".join(said[:_SAID])


def _clouds(of: str, record: FeaturesRecord) -> list[Cloud]:
    """Return the maps of all models' images, or of their patches (coloured by object or background where masks are
    known), none where classes are too small to form groups, unless asked for; of more than two models by one method
    each."""
    masked = record.sets[0].masked and of == "patches"
    several = len(record.features) > 1
    clouds: dict[tuple[str, str], Cloud] = {}
    for row in [row for row in record.maps if row.of == of and (masked or _groups(record))]:
        arrays = record.spaces[row.model]
        known = {model for model, _ in clouds}
        if len(record.features) > 2 and row.model in known:
            continue
        points = arrays.points[f"{row.method}_{of}"]
        classes = [str(name) for name in arrays.classes]
        title = f"{row.model}: {_map_title(row)}" if several else _map_title(row)
        if of == "patches":
            classes = ["background", "object"] if masked else classes
            clouds[row.model, row.method] = Cloud(title, points, classes, arrays.labels_patches, named=False)
            continue
        by_whom = next(each.errors for each in record.features if each.model == row.model)
        cloud = Cloud(title, points, classes, arrays.labels_images, arrays.wrong_images, by_whom)
        clouds[row.model, row.method] = cloud
        if row.model not in known and arrays.pictures is not None and arrays.pixels is not None:
            clouds[row.model, "pictures"] = cloud.with_thumbnails(arrays.pictures, arrays.pixels / 255)
    return list(clouds.values())


def _groups(record: FeaturesRecord) -> bool:
    """Return True if a map may show groups by class, or was asked for."""
    return not 0 < record.sets[0].largest < GROUP or record.options["tsne"] is True


def _trusted(record: FeaturesRecord) -> str:
    """Return how far the maps may be trusted, and why maps of images are missing."""
    rows = [row.trustworthiness for row in record.maps if row.of in ("images", "patches")]
    low, high = (choose(rows, key=lambda each: each.value) for choose in (min, max))
    return say(
        "Trustworthiness of these maps is {{ low|value }}{% if low != high %} to {{ high|value }}{% endif %}.{% if not "
        "groups %} Classes of at most {{ n }} images form no groups: images are mapped only with `--tsne`.{% endif %}",
        low=low,
        high=high,
        groups=_groups(record),
        n=record.sets[0].largest,
    )


def _map_title(row: MapRow) -> str:
    of = "images" if row.of == "images" else "patches"
    title = f"{_METHODS[row.method]}, {row.n:,} {of}, trustworthiness {row.trustworthiness.value:.3f}"
    return title if row.explained is None else f"{title}\n{100 * row.explained:.0f} % of the variance"


def _patch_maps(record: FeaturesRecord) -> Iterator[PatchMap]:
    for model, rows in by([row for row in record.maps if row.of in ("embedding", "content")], "model").items():
        method = "tsne" if any(row.method == "tsne" for row in rows) else "pca"
        titles = [_map_title(row).split("\n")[0] for row in rows if row.method == method]
        found = record.spaces[model]
        if len(titles) == 2 and found.places is not None and found.grid is not None:
            whole, content = (found.points[f"{method}_{of}"] for of in ("embedding", "content"))
            pixels = None if found.cut_pixels is None else found.cut_pixels / 255
            yield PatchMap(model, whole, content, titles, found.places, found.grid.tolist(), found.cut, pixels)


def _colours(record: FeaturesRecord) -> Iterator[Picture]:
    """Yield the images, and below them the colours of their patches by every model."""
    known = [(row.model, record.shown[row.model]) for row in record.features if row.colours is not None]
    for _, arrays in known[:1]:
        for at, pixels in enumerate(arrays.pixels):
            yield Picture(pixels / 255, row="image", column=str(at))
    for model, arrays in known:
        for at, colours in enumerate([] if arrays.colours is None else arrays.colours):
            yield Picture(np.moveaxis(colours, -1, 0), row=model, column=str(at))


def _retrieved(record: FeaturesRecord) -> Iterator[Picture]:
    """Yield queries and their nearest images; none where so few were searched that the nearest need not be near."""
    for row in record.features:
        found: Any = record.shown.get(row.model)  # its arrays of one search are there together
        if found is None or found.queries is None or (row.searched < SEARCHED and not record.options.get("query")):
            continue
        for at, name in enumerate(file_names([str(name) for name in found.query_names])):
            yield Picture(found.queries[at] / 255, row=name, column="query", of=row.model)
            for place, (pixels, word) in enumerate(zip(found.near[at], found.near_names[at])):
                same = None if found.same is None else bool(found.same[at, place])
                symbol = "" if same is None else f"{RIGHT_SYMBOL if same else WRONG_SYMBOL} "
                yield Picture(
                    pixels / 255,
                    row=name,
                    column=str(place + 1),
                    frame={None: "", True: RIGHT, False: WRONG}[same],
                    below=f"{symbol}{word}\n{found.similarity[at, place]:.3f}",
                    of=row.model,
                )


def _near(row: FeaturesRow) -> str:
    """Return the share of the nearest images that are of the image's class."""
    words = "{{ s|alone }} of the {% if k %}{{ k }} {% endif %}nearest"
    shares = [say(words, s=share, k="" if k == "1" else k) for k, share in row.precision.items()]
    return f"**{{{{ model }}}}**: {listed(shares)} are of the image's class." if shares else ""


def _matched(record: FeaturesRecord) -> Iterator[Matches]:
    for model, rows in by(record.matches, "model").items():
        arrays = record.shown[model]
        for at, row in enumerate(rows):
            if row.matches and arrays.first is not None and arrays.second is not None:
                yield Matches(
                    f"{row.model}: {row.first} and {row.second}",
                    arrays.first[at] / 255,
                    arrays.second[at] / 255,
                    arrays.sources[at],
                    arrays.targets[at],
                    arrays.alike[at],
                    row.grid,
                )


def _prompted(record: FeaturesRecord) -> Iterator[Picture]:
    """Yield the relevance of each prompt over the images."""
    for model, rows in by(record.prompts, "model").items():
        arrays = record.shown[model]
        if arrays.prompts is not None:
            prompts = list(dict.fromkeys(row.prompt for row in rows))
            names = file_names([str(name) for name in arrays.names])
            for at, number in np.ndindex(arrays.prompts.shape[:2]):
                yield Picture(arrays.pixels[at] / 255, arrays.prompts[at, number], names[at], prompts[number], of=model)


def _gap(record: FeaturesRecord, classifier: str) -> Estimate | None:
    return next((row.difference for row in record.pairs if row.classifier == classifier), None)


def _last_layers(record: FeaturesRecord) -> list[FeaturesRow]:
    """Return the models, with what the most neighbours say under one name."""
    k = most_neighbours(record).partition("-")[2]
    rows = [row for row in record.features if k in row.knn]
    return [replace(row, knn={"most": row.knn[k]}, precision={"most": row.precision[k]}) for row in rows]


REPORT: Final = Report(
    FeaturesRecord,
    claims=claims,
    effects=effects,
    unknown=unknown,
    picture=Chart(
        "patches",
        images(),
        "{{ rows|selectattr('row', 'eq', 'image')|list|length }} of {{ record.images }} images. Patches of one colour "
        "have similar features within a row: their first three principal components. Colours of two models are not "
        "comparable.",
        title="Patches of images coloured by their features in the last layer",
        rows=_colours,
    ),
    glance=(
        Glance("features", "objective"),
        Glance("features", "parameters"),
        Glance("features", "pool"),
        Glance("features", "accuracy", title="accuracy of the own classifier", question="classifier"),
        Glance("features", "probe", title="accuracy of a linear probe", difference=partial(_gap, classifier=PROBE)),
        Glance(
            _last_layers,
            "knn",
            key="most",
            title="accuracy of k-NN (largest k)",
            difference=lambda record: _gap(record, most_neighbours(record)),
        ),
        Glance(_last_layers, "precision", key="most", title="neighbours of the image's class (largest k)"),
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
                    "Accuracy on test images with each layer's features alone, with intervals. Dashed: the most "
                    "frequent class. Zero is the embedding.",
                    title="Accuracy of simple classifiers on features, layer by layer",
                    rows=_curves,
                ),
            ),
        ),
        Section(
            "Whose last layer is classified better?",
            "pairs",
            about=("features",),
            columns=("first", "second", "classifier", "probe", "knn", "p_holm"),
            order=lambda row: (row.better == UNDECIDED, row.p_holm),
        ),
        Section(
            "Which layers are alike?",
            _ends,
            about=("last layers",),
            says="{% if row.alone %}The first and the last layer of **{{ first }}** have{% else %}The last "
            "layers of **{{ first }}** and **{{ second }}** have{% endif %} a CKA of {{ cka|alone }}; their distances "
            "between images have a rank correlation of {{ rank|number }}.",
            charts=(
                Chart(
                    "cka",
                    matrix("layer", "other", "cka", panel="models"),
                    "Linear CKA of every two layers; dark is alike. Blocks of dark cells are layers with similar "
                    "features.",
                    title="Linear CKA of the layers",
                    rows=_layers,
                ),
            ),
        ),
        Section(
            "What do patches hold before any attention, and what in the last layer?",
            "patches",
            opening=_shared,
            columns=("model", "title", "share", "value", "chance"),
            about=("positions", "object by patches"),
            charts=(
                Chart(
                    "space_embedding",
                    patch_map,
                    "Patches as they enter the first block, in two dimensions: groups of one colour mean that "
                    "positions decide what is similar. Right: the same without their positions.",
                    title="The patch embeddings of {{ first.model }}, before any attention",
                    rows=_patch_maps,
                    each="model",
                ),
            ),
        ),
        Section(
            "Which images and patches lie together?",
            lambda record: [row for row in record.maps if row.of in ("images", "patches")],
            columns=("model", "of", "method", "trustworthiness", "explained"),
            opening=_trusted,
            charts=tuple(
                Chart(
                    f"space_{of}",
                    feature_space,
                    "Last layers in two dimensions. Neighbours mean something, sizes of groups and distances between "
                    "them do not.",
                    title=f"The last layer's features, one point {each}",
                    rows=partial(_clouds, of),
                )
                for of, each in (("images", "an image"), ("patches", "a patch"))
            ),
        ),
        Section(
            "Which images are near one another?",
            lambda record: [row for row in record.features if row.searched],
            says=_near,
            charts=(
                Chart(
                    "retrieval",
                    images(largest=0.85),
                    "Nearest images of {{ rows|map(attribute='row')|unique|list|length }} queries among "
                    "{{ record.images }} images, with their cosine similarity. Frames show whether they are of its "
                    "class.",
                    title="Nearest images in the last layer of {{ first.of }}",
                    rows=_retrieved,
                    each="of",
                ),
                Chart(
                    "matches",
                    correspondences,
                    "Arcs join patches of an image and its nearest neighbour that are each other's most similar; "
                    "positions alone can join them, too.",
                    title="Best-matching patches of an image and its nearest",
                    rows=_matched,
                ),
            ),
        ),
        Section(
            "How much does the wording of a prompt change?",
            "templates",
            columns=("model", "template", "accuracy", "gain", "p_holm"),
            charts=(
                Chart(
                    "templates",
                    intervals("template", "gain", of="model", reference=0),
                    "Zero-shot accuracy with one template minus that of the ensemble of all (dashed), on the same "
                    "images, with intervals.",
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
                    "Relevance of patches for the similarity of image and text (Chefer 2021). Places that are bright "
                    "for every prompt depend on the image more than on the text.",
                    title="Relevance of the patches for a text, in {{ first.of }}",
                    rows=_prompted,
                    each="of",
                ),
            ),
        ),
    ),
)
