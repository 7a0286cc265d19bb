"""What `vitlens features` draws, from its folder alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vitlens.figures.features import DepthCurve, accuracy_by_depth
from vitlens.figures.features_similarity import LayerMap, layer_similarity
from vitlens.figures.features_space import NAMED, Cloud, feature_space
from vitlens.files import RunRecord
from vitlens.runs.features_draw_look import draw_looks
from vitlens.runs.features_record import aliases_of, chance_of, classes_of, has_table, name_of_classifier, title_of_map
from vitlens.runs.report import Drawn

_CLASSIFIERS = 3  # panels of the curves over depth: the probe, the most and the fewest neighbours


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Accuracy over depth, similarity, the space, colours of patches, matches, neighbours, heads, wording, prompts."""
    if has_table(record, "depth"):
        yield _depth(record)
    if record.has_arrays("similarity"):
        yield from _similarity(record)
    yield from _space(record)
    yield from draw_looks(record)


def _depth(record: RunRecord) -> Drawn:
    rows = record.table("depth")
    families = {str(model["alias"]): str(model["family"]) for model in _models(record)}
    names = list(dict.fromkeys(str(row["classifier"]) for row in rows))
    votes = [name for name in names if name != "probe"]
    chosen = [*(["probe"] if "probe" in names else []), *dict.fromkeys([votes[-1], votes[0]])][:_CLASSIFIERS]
    panels = {}
    for name in chosen:
        mine = [row for row in rows if row["classifier"] == name and row.get("weighting", "dino") == "dino"]
        panels[name_of_classifier(name)] = [
            DepthCurve(alias, *_columns([row for row in mine if row["model"] == alias]), families[alias])
            for alias in aliases_of(record)
        ]
    figure = accuracy_by_depth(panels=panels, chance=chance_of(record), n=int(str(rows[0]["n"])))
    caption = (
        "Test images classified by what each layer's features alone say: a linear classifier trained on them, or the "
        "votes of their nearest training images (cosine, weights exp(similarity / 0.07)). A layer that is low may "
        "still carry what later layers read. Layers of unlike models at the same share of depth need not correspond. "
        "Dashed: always the most frequent class."
    )
    return Drawn("depth", figure, caption)


def _columns(rows: list[dict[str, object]]) -> tuple[list[float], list[float], list[float]]:
    values, low, high = ([float(str(row[key])) for row in rows] for key in ("accuracy", "low", "high"))
    return values, low, high


def _similarity(record: RunRecord) -> Iterator[Drawn]:
    found, aliases = record.arrays("similarity"), aliases_of(record)
    for start, name, title, label, caption in (
        ("cka", "cka", "Linear CKA of the layers", "CKA", "Similarity that no rotation and no scale of the features "
         "changes: 1, the same but for these. Bright blocks are layers that do much the same; white dots: of the model "
         "across, the layer most like this one. It follows the directions of greatest variance, not what a classifier "
         "reads."),
        ("rank", "distances", "Rank correlation of distances between images", "Spearman", "Whether images that are far "
         "apart in one layer are so in the other, whatever the scale of distances (Spearman, over pairs of images)."),
    ):  # fmt: skip
        maps = [
            LayerMap(values, aliases[int(key.split("_")[1])], aliases[int(key.split("_")[2])])
            for key, values in found.items()
            if key.startswith(f"{start}_")
        ]
        yield Drawn(name, layer_similarity(maps=maps, title=title, label=label), caption)


def _space(record: RunRecord) -> Iterator[Drawn]:
    rows = record.table("space") if has_table(record, "space") else []
    for alias in aliases_of(record):
        mine = [row for row in rows if row["model"] == alias]
        if not mine:
            continue
        found = record.arrays(f"space-{alias}")
        for of in ("images", "patches"):
            those = [row for row in mine if row["of"] == of]
            if not those:
                continue
            clouds = [_cloud(found, of, row) for row in those]
            if of == "images" and "pixels" in found:
                few = np.asarray(found["pictures"])
                first = clouds[0]
                clouds.append(
                    Cloud(
                        f"{title_of_map(those[0])}, {len(few)} of them as pictures",
                        np.asarray(first.points)[few],
                        None if first.labels is None else np.asarray(first.labels)[few],
                        None if first.wrong is None else np.asarray(first.wrong)[few],
                        np.asarray(found["pixels"]) / 255,
                    )
                )
            yield Drawn(f"space_{of}_{alias}", *_space_figure(record, alias, of, clouds))


def _cloud(found: Mapping[str, Any], of: str, row: Mapping[str, object]) -> Cloud:
    points = found[f"{row['method']}_{of}"]
    return Cloud(title_of_map(row), points, found.get(f"labels_{of}"), found.get(f"wrong_{of}"), named=of == "images")


def _space_figure(record: RunRecord, alias: str, of: str, clouds: list[Cloud]) -> tuple[Any, str]:
    marker = {str(row["model"]): str(row["by"]) for row in record.table("marks")} if has_table(record, "marks") else {}
    if of == "images":
        title = f"The last layer's features of {alias}, an image a point"
        classes = classes_of(record)
    else:
        masked = bool(record.config.get("masked"))
        classes = ["background", "object"] if masked else classes_of(record)
        title = f"The last layer's patches of {alias}"
        labels = clouds[0].labels
        if labels is not None and len(np.unique(np.asarray(labels))) <= NAMED:
            title += ", coloured by " + ("what they lie on" if masked else "their image's class")
    figure = feature_space(clouds=clouds, classes=classes, title=title, wrong=marker.get(alias, ""))
    caption = (
        "t-SNE keeps neighbours together: who lies beside whom can be read, sizes of groups and distances between them "
        "cannot. PCA shows the two directions of greatest variance. Trustworthiness is 1 where the neighbours of the "
        "picture are those of the features, about 0.5 for points thrown at random."
    )
    if of == "patches":  # the figure before has said the rest
        caption = "Single patches of these images, drawn with the seed, on maps of the same kinds."
    return figure, caption


def _models(record: RunRecord) -> list[dict[str, object]]:
    models: Any = record.config["models"]
    return list(models)
