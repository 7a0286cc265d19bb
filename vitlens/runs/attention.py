"""`vitlens attention`: where every head of every layer looks, on a few images."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from vitlens.analysis.attention import LayerMaps, attention_maps, position_similarity
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.figures.attention import attention_grid, attention_overlays, evolution
from vitlens.figures.patches import patch_grid
from vitlens.figures.positions import position_maps, position_matrix
from vitlens.files import RunRecord
from vitlens.models.specimen import Specimen
from vitlens.report import Section, Table
from vitlens.runs.describe import data_words, described
from vitlens.runs.folder import RunFolder
from vitlens.runs.load import load_specimens, load_split
from vitlens.runs.options import ModelOptions, RunOptions
from vitlens.runs.report import Drawn, publish

SHOWN = 4  # images of --data, unless --limit says otherwise
MOST = 8  # images, whatever was asked for: more rows than a page holds


def attention(
    model: str,
    *,
    images: Sequence[str] | None = None,
    data: str | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path:
    """Draw the attention of a model on images, by layer and head, and write the report; returns the report's path."""
    (specimen,) = load_specimens((model,), model_options=model_options, options=options)
    split = load_split(specimen, options=options, data=data, images=images, limit=None if images else SHOWN)
    if len(split) > MOST:
        said = f"Only the first {MOST} of {len(split):,} images are looked at."
        split = replace(split.pick(torch.arange(MOST)), notes=(*split.notes, said))
    layout = specimen.anatomy.layout
    config = described(options, specimens=(specimen,), split=split)
    config["readout"] = specimen.anatomy.readout
    config["layout"] = None if layout is None else {
        "grid": list(layout.grid), "prefix": list(layout.prefix), "patch_size": list(layout.patch_size),
    }  # fmt: skip
    (batch,) = split.batches(len(split), device=specimen.device)
    with autocast(specimen.device, options.precision):
        layers = attention_maps(specimen, batch.images)
    folder = RunFolder.create(
        "attention",
        name_parts=(specimen.alias, split.name),
        title=f"Attention of {specimen.alias} on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=config,
        formats=options.formats,
    )
    with folder:
        _keep(folder, specimen, split, layers)
        return publish(folder, draw, tell)


def _keep(folder: RunFolder, specimen: Specimen, split: Split, layers: Sequence[LayerMaps]) -> None:
    """The table of layers, and the maps that the figures are drawn from."""
    folder.table("layers", [_row(layer) for layer in layers])
    files = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
    folder.table("images", [{"image": file} for file in files])
    maps = {f"layer{index}": layer.maps.float().cpu().numpy() for index, layer in enumerate(layers)}
    folder.arrays("attention", images=split.source.read(torch.arange(len(split))).numpy(), **maps)
    similarity = position_similarity(specimen)
    if similarity is not None:
        folder.arrays("positions", similarity=similarity.float().cpu().numpy())


def _row(layer: LayerMaps) -> dict[str, object]:
    site = layer.site
    return {
        "layer": site.layer,
        "module": site.module,
        "kind": site.kind,
        "heads": site.heads,
        "queries": site.queries,
        "keys": site.keys,
        "map": "x".join(str(side) for side in layer.maps.shape[-2:]),
        "reading": layer.reading,
        "prefix_mass": float(layer.prefix.mean()),
    }


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Grids of all heads of the first image, the last layer on every image, depth, positions, and the patches."""
    found = record.arrays("attention")
    images, rows = found["images"] / np.float32(255), record.table("layers")
    layers = [found[f"layer{index}"] for index in range(len(rows))]
    names = [Path(str(row["image"])).name for row in record.table("images")]
    yield from _grids(images[0], layers, rows)
    reader = str(rows[-1]["reading"])
    last = attention_overlays(
        images=images, maps=layers[-1], layer=len(layers) - 1, names=names, reader=reader.removeprefix("the ")
    )
    yield Drawn("last_layer", last, f"The last layer of attention, each head on each image, for {reader}. {_NOT}")
    depth = evolution(images=images, maps=_by_depth(layers), names=names, reader=_common_reader(rows))
    yield Drawn("evolution", depth, f"How attention changes with depth: the mean of each layer's heads. {_NOT}")
    yield from _input(record, images[0])


_NOT = "Bright means looked at; it does not mean that the prediction rests on it."


def _grids(image: Any, layers: Sequence[Any], rows: Sequence[dict[str, object]]) -> Iterator[Drawn]:
    """One grid for each run of layers with the same heads and map; a ViT has one, Swin one a stage."""
    starts = [i for i in range(len(layers)) if i == 0 or layers[i].shape[1:] != layers[i - 1].shape[1:]]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(layers)])):
        reader = str(rows[start]["reading"]).removeprefix("the ")
        figure = attention_grid(
            maps=np.stack([layer[0] for layer in layers[start:stop]]), image=image, reader=reader, first_layer=start
        )
        name = "heads" if len(starts) == 1 else f"heads_{number + 1}"
        which = "Every" if len(starts) == 1 else f"Layers {start + 1} to {stop}, every"
        whose = rows[start]["reading"]
        said = f"{which} head on the first image; whose attention: {whose}. Layers and heads count from 1. "
        yield Drawn(name, figure, said + _NOT)


def _by_depth(layers: Sequence[Any]) -> Any:
    """Head means (batch, layers, rows, columns), at the finest layer's resolution; nearest, so no value is made up."""
    finest = max((layer.shape[-2:] for layer in layers), key=lambda size: size[0] * size[1])
    means = [torch.from_numpy(layer).mean(1, keepdim=True) for layer in layers]
    return np.concatenate([interpolate(mean, size=finest, mode="nearest-exact").numpy() for mean in means], 1)


def _common_reader(rows: Sequence[dict[str, object]]) -> str:
    readers = list(dict.fromkeys(str(row["reading"]).removeprefix("the ") for row in rows))
    return readers[0] if len(readers) == 1 else "readout"


def _input(record: RunRecord, image: Any) -> Iterator[Drawn]:
    layout: Any = record.config["layout"]
    if layout is None:
        return
    grid = (int(layout["grid"][0]), int(layout["grid"][1]))
    if record.has_arrays("positions"):
        similarity = record.arrays("positions")["similarity"]
        caption = (
            "Cosine similarity of the learned position embeddings; near patches are alike where a model learned place."
        )
        yield Drawn("positions", position_matrix(similarity=similarity, grid=grid), caption)
        maps = position_maps(similarity=similarity, grid=grid)
        yield Drawn("position_maps", maps, "The same, one map a patch, each standing where its patch stands.")
    if _are_whole(record):
        size = (int(layout["patch_size"][0]), int(layout["patch_size"][1]))
        yield Drawn("patches", patch_grid(image=image, patch_size=size), "The first image as the model reads it.")


def _are_whole(record: RunRecord) -> bool:
    """Whether the images have the size that the model's patches cover, so that cutting them shows what it reads."""
    layout: Any = record.config["layout"]
    data: Any = record.config["data"]
    return list(data["size"]) == [side * patch for side, patch in zip(layout["grid"], layout["patch_size"])]


def tell(record: RunRecord) -> list[Section]:
    """Which layers were seen, whose rows the maps are, and how much lies on the prefix."""
    rows = record.table("layers")
    heads = sum(int(str(row["heads"])) for row in rows)
    count = len(record.table("images"))
    lines = [f"{len(rows)} layers with {heads} heads in all were watched on {count} image{'s' if count > 1 else ''}."]
    lines += data_words(record)
    mass = [float(str(row["prefix_mass"])) for row in rows]
    if max(mass) > 0:
        most = mass.index(max(mass))
        lines.append(
            f"Of the readout's attention, {100 * sum(mass) / len(mass):.1f} % lies on the prefix tokens (CLS and the "
            f"like) on average over layers, most in layer {most + 1} ({100 * mass[most]:.1f} %); maps show the rest."
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
    figures = tuple(name for name in _figure_names(record, rows))
    return [
        Section("What was seen", tuple(lines), (Table("Layers, counted from 1", listed),), figures),
        Section("Limits", ("Attention weights say where a head looks, not what it takes from there.",)),
    ]


def _figure_names(record: RunRecord, rows: Sequence[dict[str, object]]) -> Iterator[str]:
    shapes = [(row["heads"], row["map"]) for row in rows]
    groups = 1 + sum(a != b for a, b in pairwise(shapes))
    yield from (["heads"] if groups == 1 else [f"heads_{number + 1}" for number in range(groups)])
    yield from ("last_layer", "evolution")
    if record.config["layout"] is not None:
        yield from ("positions", "position_maps") if record.has_arrays("positions") else ()
        yield from ("patches",) if _are_whole(record) else ()
