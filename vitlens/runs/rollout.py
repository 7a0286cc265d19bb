"""`vitlens rollout`: rollout of every image, overlays, and whether the maps point at the object where it is known."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.evaluate import accuracy, fitting_batch_size
from vitlens.analysis.localisation import mask_areas, pointing_hits
from vitlens.analysis.rollout import RolloutOptions, follow
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.figures.rollout import rollout_overlays
from vitlens.files import RunRecord
from vitlens.models.specimen import Specimen
from vitlens.names import DEFAULT_ALPHA, Fusion, Readout
from vitlens.report import Section, Table, in_words, metrics
from vitlens.runs.describe import data_words, described
from vitlens.runs.folder import RunFolder
from vitlens.runs.load import load_specimens, load_split
from vitlens.runs.options import ModelOptions, RunOptions
from vitlens.runs.progress import progress
from vitlens.runs.report import Drawn, publish
from vitlens.uncertainty import Estimate, bootstrap_mean

SHOWN = 6  # images in the figure
KEPT = 2000  # images whose maps are kept as arrays


def rollout(
    model: str,
    *,
    images: Sequence[str] | None = None,
    data: str | None = None,
    fusion: Sequence[Fusion] = ("mean", "max", "min"),
    discard: float = 0.0,
    alpha: float = DEFAULT_ALPHA,
    start_layer: int = 0,
    readout: Readout | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path:
    """Roll the attention of a model out over images and write the report; returns the report's path."""
    ways = [RolloutOptions(name, discard, alpha, start_layer) for name in fusion]
    (specimen,) = load_specimens((model,), model_options=model_options, options=options)
    layout, chosen = specimen.layout, readout or specimen.anatomy.readout
    split = load_split(specimen, options=options, data=data, images=images)
    choices: Mapping[str, object] = {
        "fusion": list(fusion), "discard": discard, "alpha": alpha, "start_layer": start_layer, "readout": chosen,
    }  # fmt: skip
    config = described(options, specimens=(specimen,), split=split, choices=choices)
    config["layout"] = {"grid": list(layout.grid), "prefix": list(layout.prefix)}
    folder = RunFolder.create(
        "rollout",
        name_parts=(specimen.alias, split.name),
        title=f"Attention rollout of {specimen.alias} on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=config,
        formats=options.formats,
    )
    with folder:
        maps, logits = _follow(specimen, split, ways, chosen, options)
        _keep(folder, specimen, split, fusion, maps, logits)
        return publish(folder, draw, tell)


def _follow(
    specimen: Specimen, split: Split, ways: Sequence[RolloutOptions], readout: Readout | None, options: RunOptions
) -> tuple[Tensor, Tensor]:
    """Maps (n, ways, rows, columns) and logits (n, classes) of every image, on the CPU."""
    maps, logits = [], []
    size = options.batch_size or fitting_batch_size(specimen)
    with progress("Rollout", len(split), quiet=options.quiet) as advance:
        for batch in split.batches(size, device=specimen.device):
            with autocast(specimen.device, options.precision):
                followed = follow(specimen, batch.images, ways, readout=readout)
            maps.append(torch.stack([specimen.layout.as_map(row) for row in followed.rows], 1).float().cpu())
            logits.append(followed.logits.float().cpu())
            advance(len(batch.images))
    return torch.cat(maps), torch.cat(logits)


def _keep(
    folder: RunFolder, specimen: Specimen, split: Split, fusion: Sequence[Fusion], maps: Tensor, logits: Tensor
) -> None:
    """Metrics, the table of images, and the arrays that the figures are drawn from."""
    hits = None
    if split.masks is not None:
        groups = None if split.groups is None else split.groups.numpy()
        hits = torch.stack([pointing_hits(maps[:, index], split.masks) for index in range(len(fusion))], 1)
        for index, name in enumerate(fusion):
            folder.metric(f"localisation/pointing/rollout-{name}", accuracy(hits[:, index], groups=split.groups))
        areas = mask_areas(split.masks).numpy()
        folder.metric("localisation/pointing/mask-area", bootstrap_mean(areas, groups=groups))
    for index, name in enumerate(fusion):
        mass = maps[:, index].flatten(1).sum(1).numpy()
        folder.metric(f"rollout/patch_mass/{name}", bootstrap_mean(mass))
    confidence, predicted = logits.softmax(-1).max(-1)
    names = [_name(specimen.classes, int(index)) for index in predicted[:KEPT]]
    files = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
    rows = [
        {"image": files[index], "prediction": names[index], "probability": round(float(confidence[index]), 4)}
        for index in range(min(len(split), KEPT))
    ]
    folder.table("images", rows)
    shown = torch.arange(min(SHOWN, len(split)))
    arrays: dict[str, Any] = {"images": split.source.read(shown).numpy(), "maps": maps[:KEPT].numpy()}
    if split.masks is not None and hits is not None:
        arrays |= {"masks": split.masks[shown].numpy(), "hits": hits[:KEPT].numpy()}
    folder.arrays("rollout", **arrays)


def _name(classes: Sequence[str], index: int) -> str:
    return classes[index] if index < len(classes) else str(index)


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Overlays of the first images, one panel for each way of fusing heads."""
    found = record.arrays("rollout")
    images: Any = found["images"] / np.float32(255)
    count, fusions = len(images), _choices(record)["fusion"]
    rows = record.table("images")[:count]
    figure = rollout_overlays(
        images=images,
        maps=found["maps"][:count],
        titles=[f"{name} of heads" for name in fusions],
        names=[f"{row['prediction']} ({100 * float(str(row['probability'])):.0f} %)" for row in rows],
        masks=found.get("masks"),
        hits=found["hits"][:count] if "hits" in found else None,
    )
    yield Drawn("rollout", figure, _caption(record))


def _caption(record: RunRecord) -> str:
    choices = _choices(record)
    discard = float(choices["discard"])
    dropped = f", the lowest {100 * discard:.0f} % of each row dropped" if discard else ""
    start = f", from layer {int(choices['start_layer']) + 1}" if choices["start_layer"] else ""
    return (
        f"Rollout (Abnar & Zuidema 2020), alpha = {choices['alpha']}{dropped}{start}; readout: "
        f"{_READOUTS[choices['readout']]}. Beside each image: the prediction and its probability. Colours share one "
        "scale, in % of the readout's row; a panel that looks flat has small values beside the others', not less "
        "structure. Bright patches reach the readout most through attention and residual connections; that does not "
        "show that the prediction rests on them: rollout knows neither values nor the class."
    )


_READOUTS = {
    "cls": "the CLS token",
    "cls+distillation": "the mean of the CLS and distillation tokens",
    "mean": "the mean over all patches",
    "pool": "the attention pooling's query",
}


def tell(record: RunRecord) -> list[Section]:
    """What the numbers say: where the maps point, how much of the row lies on patches, the predictions."""
    found = metrics(record)
    n = len(record.table("images"))
    fusions = _choices(record)["fusion"]
    lines = list(data_words(record))
    area = found.get("localisation/pointing/mask-area")
    sections = [Section("What was found", (" ".join(lines), *_pointing_words(found, fusions, area)), (), ("rollout",))]
    if area is not None:
        rows: list[dict[str, Any]] = [
            {"map": f"rollout, {name} of heads", "pointing hits": found[f"localisation/pointing/rollout-{name}"]}
            for name in fusions
        ]
        rows.append({"map": "mean mask area (a random point)", "pointing hits": area})
        sections.append(Section("Localisation", (), (Table("Highest point of the map on the object", rows),)))
    listed = [
        {"image": row["image"], "prediction": row["prediction"], "probability": row["probability"]}
        for row in record.table("images")[: 2 * SHOWN]
    ]
    more = f"The first {len(listed)} of {n:,}; all are in results.json." if n > len(listed) else ""
    sections.append(Section("Predictions", (more,) if more else (), (Table("Images", listed),)))  # type: ignore[arg-type]
    limits = [
        "Rollout is defined by attention weights alone; it is the same for every class. To ask what speaks for one "
        "class, use a method with gradients.",
    ]
    return [*sections, Section("Limits", tuple(limits))]


def _pointing_words(found: Mapping[str, Estimate], fusions: Sequence[str], area: Estimate | None) -> Iterator[str]:
    if area is None:
        return
    hits = found[f"localisation/pointing/rollout-{fusions[0]}"]  # the first asked for, not the one that did best
    apart = _apart(hits, area)
    yield (
        f"The highest point of the rollout ({fusions[0]} of heads) lies on the object in {in_words(hits)} of the "
        f"images; a point thrown at random would in {in_words(area, with_n=False)}. {apart}"
    )


def _apart(hits: Estimate, area: Estimate) -> str:
    low, high = hits.low or 0.0, hits.high or 1.0
    if low > (area.high or area.value):
        return "The intervals are apart: the map points at the object more often than chance."
    if high < (area.low or area.value):
        return "The intervals are apart: the map points at the object less often than chance."
    return "The intervals overlap: the map is not shown to point at the object better than chance."


def _choices(record: RunRecord) -> Any:
    return record.config["options"]
