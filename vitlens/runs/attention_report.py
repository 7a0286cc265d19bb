"""The figures and the words of `vitlens attention`, from its folder alone."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from vitlens.commands.scaffold.describe import data_words
from vitlens.commands.scaffold.sheets import sheets
from vitlens.figures.attention import attention_grid, attention_overlays, evolution
from vitlens.figures.patches import patch_grid
from vitlens.figures.positions import position_maps, position_matrix
from vitlens.figures.views import images_on_a_page, shared_scale
from vitlens.files import RunRecord
from vitlens.lens.site import NO_PLACE
from vitlens.runs.attention_views_report import draw_views, tell_views
from vitlens.runs.report import Drawn
from vitlens.runs.sections import Section, Table, metrics
from vitlens.runs.stats_words import in_ranges

_NOT = "Bright means looked at; it does not mean that the prediction rests on it."
_ON_A_SHEET = 8  # images of the evolution over depth, a row each
ORDERED = -0.2  # correlation of similarity with distance from which on positions count as ordered by place
_SHARED = "One scale of colours for all panels."


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Grids of all heads of the first image, one layer on every image, depth, what was asked for, and the input."""
    found = record.arrays("attention")
    images, rows = found["images"] / np.float32(255), record.table("layers")
    layers = [found[f"layer{index}"] for index in range(len(rows))]
    names = image_names(record)
    yield from _grids(images[0], layers, rows)
    yield from _one_layer(record, images, layers, rows, names)
    yield from _evolution(record, images, layers, rows, names)
    yield from draw_views(record, images, names, reader=_readers(rows))
    yield from _input(record, images[0])


def _evolution(
    record: RunRecord, images: Any, layers: Sequence[Any], rows: Sequence[dict[str, object]], names: Sequence[str]
) -> Iterator[Drawn]:
    """The mean of each layer's heads on each image, in one scale of colours on all sheets."""
    maps = _by_depth(layers)
    pages = _evolution_pages(record)
    scale = shared_scale(list(maps.swapaxes(0, 1)))
    for name, part in pages:
        figure = evolution(
            images=images[part], maps=maps[part], names=names[part], reader=_common_reader(rows), scale=scale
        )
        shared = _SHARED if len(pages) == 1 else f"One scale of colours for all panels of these {len(pages)} figures."
        yield Drawn(name, figure, f"How attention changes with depth: the mean of each layer's heads. {shared} {_NOT}")


def _evolution_pages(record: RunRecord) -> list[tuple[str, slice]]:
    return sheets("evolution", len(record.table("images")), _ON_A_SHEET)


def image_names(record: RunRecord) -> list[str]:
    """The images' file names, or their numbers in the data."""
    return [Path(str(row["image"])).name for row in record.table("images")]


def _grids(image: Any, layers: Sequence[Any], rows: Sequence[dict[str, object]]) -> Iterator[Drawn]:
    """One grid for each run of layers with the same heads and map; a ViT has one, Swin one a stage."""
    numbers = _numbers(rows)
    starts = [i for i in range(len(layers)) if i == 0 or layers[i].shape[1:] != layers[i - 1].shape[1:]]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(layers)])):
        reader = str(rows[start]["reading"]).removeprefix("the ")
        figure = attention_grid(
            maps=np.stack([layer[0] for layer in layers[start:stop]]),
            image=image,
            reader=reader,
            numbers=numbers[start:stop],
        )
        name = "heads" if len(starts) == 1 else f"heads_{number + 1}"
        which = "Every" if len(starts) == 1 else f"Layers {numbers[start] + 1} to {numbers[stop - 1] + 1}, every"
        whose = rows[start]["reading"]
        said = f"{which} head on the first image; whose attention: {whose}. Layers and heads count from 1. "
        yield Drawn(name, figure, f"{said}{_SHARED} {_NOT}")


def _one_layer(
    record: RunRecord, images: Any, layers: Sequence[Any], rows: Sequence[dict[str, object]], names: Sequence[str]
) -> Iterator[Drawn]:
    """All heads of the layer asked for, or the last one, on each image; as many figures as that takes."""
    index = _shown_layer(record, rows)
    maps, number = layers[index], int(str(rows[index]["layer"]))
    reader = str(rows[index]["reading"])
    scale = shared_scale(list(maps.swapaxes(0, 1)))
    which = "The last layer" if index == len(rows) - 1 else f"Layer {number + 1}"
    pages = _pages(record, rows)
    shared = _SHARED if len(pages) == 1 else f"One scale of colours for all panels of these {len(pages)} figures."
    for name, part in pages:
        figure = attention_overlays(
            images=images[part],
            maps=maps[part],
            layer=number,
            names=names[part],
            scale=scale,
            reader=reader.removeprefix("the "),
        )
        yield Drawn(name, figure, f"{which}: each head on each image, for {reader}. {shared} {_NOT}")


def _shown_layer(record: RunRecord, rows: Sequence[dict[str, object]]) -> int:
    """Which row of the table of layers is drawn large."""
    options: Any = record.config["options"]
    asked = options.get("layer")
    return len(rows) - 1 if asked is None else [row["layer"] for row in rows].index(asked)


def _pages(record: RunRecord, rows: Sequence[dict[str, object]]) -> list[tuple[str, slice]]:
    """The figures of the one layer: the name and the images of each."""
    options: Any = record.config["options"]
    name = "last_layer" if options.get("layer") is None else "layer"
    each = images_on_a_page(int(str(rows[_shown_layer(record, rows)]["heads"])))
    return sheets(name, len(record.table("images")), each)


def _by_depth(layers: Sequence[Any]) -> Any:
    """Head means (batch, layers, rows, columns), at the finest layer's resolution; nearest, so no value is made up."""
    finest = max((layer.shape[-2:] for layer in layers), key=lambda size: size[0] * size[1])
    means = [torch.from_numpy(layer).mean(1, keepdim=True) for layer in layers]
    return np.concatenate([interpolate(mean, size=finest, mode="nearest-exact").numpy() for mean in means], 1)


def _readers(rows: Sequence[dict[str, object]]) -> dict[int, str]:
    """Whose row each layer's map is."""
    return {int(str(row["layer"])): str(row["reading"]).removeprefix("the ") for row in rows}


def _numbers(rows: Sequence[dict[str, object]]) -> list[int]:
    """Which of the model's layers each map is of, from 0."""
    return [int(str(row["layer"])) for row in rows]


def _common_reader(rows: Sequence[dict[str, object]]) -> str:
    readers = set(_readers(rows).values())
    return readers.pop() if len(readers) == 1 else "readout"


def _input(record: RunRecord, image: Any) -> Iterator[Drawn]:
    layout: Any = record.config["layout"]
    if layout is None:
        return
    grid = (int(layout["grid"][0]), int(layout["grid"][1]))
    if record.has_arrays("positions"):
        similarity = record.arrays("positions")["similarity"]
        caption = f"Cosine similarity of the position embeddings. {_position_words(record)}"
        yield Drawn("positions", position_matrix(similarity=similarity, grid=grid), caption.rstrip())
        maps = position_maps(similarity=similarity, grid=grid)
        yield Drawn("position_maps", maps, "The same, one map a patch, each standing where its patch stands.")
    if _are_whole(record):
        size = (int(layout["patch_size"][0]), int(layout["patch_size"][1]))
        yield Drawn("patches", patch_grid(image=image, patch_size=size), "The first image as the model reads it.")


def _position_words(record: RunRecord) -> str:
    """Whether near positions are more alike than far ones, by the correlation of similarity with distance."""
    models: Any = record.config["models"]
    found = metrics(record).get(f"positions/{models[0]['alias']}/distance_correlation")
    if found is None:
        return ""
    ordered = found.value <= ORDERED
    how = "more similar positions than" if ordered else "no more similar positions than"
    side, number = "at or below" if ordered else "above", round(found.value, 2) + 0.0  # no minus before 0.00
    return (
        f"Its correlation with the distance between patches is {number:.2f} (Pearson, all pairs of {found.n} patches), "
        f"{side} the threshold of {ORDERED}: near patches have {how} far ones."
    )


def _are_whole(record: RunRecord) -> bool:
    """Whether the images have the size that the model's patches cover, so that cutting them shows what it reads."""
    layout: Any = record.config["layout"]
    data: Any = record.config["data"]
    return list(data["size"]) == [side * patch for side, patch in zip(layout["grid"], layout["patch_size"])]


def tell(record: RunRecord) -> list[Section]:
    """Which layers were seen, whose rows the maps are, how much lies on the prefix; then what was asked for."""
    rows = record.table("layers")
    heads = sum(int(str(row["heads"])) for row in rows)
    count = len(record.table("images"))
    lines = [f"{len(rows)} layers with {heads} heads in all were watched on {count} image{'s' if count > 1 else ''}."]
    lines += _left_out(record)
    lines += data_words(record)
    mass = [float(str(row["prefix_mass"])) for row in rows]
    if max(mass) > 0:
        most = mass.index(max(mass))
        lines.append(
            f"Of the readout's attention, {100 * sum(mass) / len(mass):.1f} % lies on the prefix tokens (CLS and the "
            f"like) on average over layers, most in layer {_numbers(rows)[most] + 1} "
            f"({100 * mass[most]:.1f} %); maps show the rest."
        )
    listed: list[dict[str, Any]] = [
        {
            "layer": int(str(row["layer"])) + 1,
            "kind": row["kind"],
            "heads": row["heads"],
            "queries x keys": f"{row['queries']} x {row['keys']}",
            "map": row["map"],
            "row shown": row["reading"],
            "on prefix (%)": round(100 * float(str(row["prefix_mass"])), 1),
        }
        for row in rows
    ]
    seen = Section(
        "What was seen", tuple(lines), (Table("Layers, counted from 1", listed),), tuple(_seen_figures(record, rows))
    )
    inputs = tuple(_input_figures(record))
    return [
        seen,
        *tell_views(record),
        *([Section("What goes in", figures=inputs)] if inputs else []),
        Section("Limits", ("Attention weights say where a head looks, not what it takes from there.",)),
    ]


def _left_out(record: RunRecord) -> Iterator[str]:
    """Which layers have no map, and why."""
    kinds: dict[str, list[int]] = {}
    tables: Any = record.results["tables"]
    for row in tables.get("without_map", ()):
        kinds.setdefault(str(row["kind"]), []).append(int(str(row["layer"])) + 1)
    for kind, numbers in kinds.items():
        yield f"Without a map in the image: {in_ranges(numbers)} ({NO_PLACE[kind]})."


def _seen_figures(record: RunRecord, rows: Sequence[dict[str, object]]) -> Iterator[str]:
    shapes = [(row["heads"], row["map"]) for row in rows]
    groups = 1 + sum(a != b for a, b in pairwise(shapes))
    yield from (["heads"] if groups == 1 else [f"heads_{number + 1}" for number in range(groups)])
    yield from (name for name, _ in _pages(record, rows))
    yield from (name for name, _ in _evolution_pages(record))


def _input_figures(record: RunRecord) -> Iterator[str]:
    if record.config["layout"] is not None:
        yield from ("positions", "position_maps") if record.has_arrays("positions") else ()
        yield from ("patches",) if _are_whole(record) else ()
