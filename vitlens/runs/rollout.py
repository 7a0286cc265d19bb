"""`vitlens rollout`: attention followed to the image of every picture, and whether the maps point at a known object."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlens.analysis.evaluate import accuracy, fitting_batch_size
from vitlens.analysis.localisation import mask_areas, pointing_hits
from vitlens.analysis.methods import METHODS, Way, require_possible, trace
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.models.specimen import Specimen
from vitlens.names import DEFAULT_ALPHA, AttentionMethod, Fusion, Readout
from vitlens.processes import Processes, share_of
from vitlens.runs.describe import described
from vitlens.runs.folder import RunFolder
from vitlens.runs.load import load_specimens, load_split
from vitlens.runs.options import ModelOptions, RunOptions
from vitlens.runs.processes import join_run
from vitlens.runs.progress import progress
from vitlens.runs.report import publish
from vitlens.runs.rollout_report import SHOWN, draw, tell
from vitlens.runs.sheets import DRAWN, say_left_out
from vitlens.runs.targets import PREDICTED, chosen_targets
from vitlens.uncertainty import bootstrap_mean

__all__ = ["draw", "rollout", "tell"]

KEPT = 2000  # images whose maps are kept as arrays
_BACKWARD = 3  # a backward pass holds about this many times what a forward pass does


def rollout(
    model: str,
    *,
    images: Sequence[str] | None = None,
    data: str | None = None,
    method: Sequence[AttentionMethod] = ("rollout", "relevance"),
    target: str = PREDICTED,
    fusion: Sequence[Fusion] = ("mean", "max", "min"),
    discard: float = 0.0,
    alpha: float = DEFAULT_ALPHA,
    start_layer: int = 0,
    layer: int | None = None,
    readout: Readout | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path | None:
    """Follow the attention of a model over images in several ways and write the report; returns the report's path.

    method: names of ATTENTION_METHODS; target: whose logit the gradients are of, "predicted", "true" or a class. Of
    several processes each takes its share of the images; all but the first return None.
    """
    ways = [
        Way(name, fused, discard, alpha, start_layer, layer)
        for name in method
        for fused in (fusion if name == "rollout" else ("mean",))
    ]  # fmt: skip
    processes, options = join_run(options)
    with processes.first_ahead():
        (specimen,) = load_specimens((model,), model_options=model_options, options=options)
        split = load_split(specimen, options=options, data=data, images=images)
    targets = chosen_targets(target, specimen, split)
    (first,) = split.pick(torch.arange(1)).batches(1, device=specimen.device)
    require_possible(specimen, first.images, ways)
    share_of(split, processes)
    chosen = readout or specimen.anatomy.readout
    if not processes.is_first:
        _follow(specimen, split, ways, targets, chosen, processes, options)
        return None
    choices: Mapping[str, object] = {
        "method": list(method), "target": target, "fusion": list(fusion), "discard": discard, "alpha": alpha,
        "start_layer": start_layer, "layer": layer, "readout": chosen, "ways": [way.name for way in ways],
    }  # fmt: skip
    config = described(options, specimens=(specimen,), split=split, choices=choices)
    folder = RunFolder.create(
        "rollout",
        name_parts=(specimen.alias, split.name),
        title=f"Attention of {specimen.alias} followed to the image, on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=config,
        formats=options.formats,
    )
    with folder:
        maps, logits = _follow(specimen, split, ways, targets, chosen, processes, options)
        drawn = min(DRAWN if images else SHOWN, len(split))
        say_left_out(drawn, len(split), quiet=options.quiet, more="maps of all are in arrays/")
        _keep(folder, specimen, split, ways, maps, logits, targets, drawn=drawn)
        return publish(folder, draw, tell)


def _follow(
    specimen: Specimen,
    split: Split,
    ways: Sequence[Way],
    targets: Tensor | None,
    readout: Readout | None,
    processes: Processes,
    options: RunOptions,
) -> tuple[Tensor, Tensor]:
    """Maps (n, ways, rows, columns) and logits (n, classes) of every image, whichever process looked, on the CPU."""
    maps, logits = [], []
    split = share_of(split, processes)
    targets = None if targets is None else targets[processes.index :: processes.count]
    size = options.batch_size or fitting_batch_size(specimen)
    if options.batch_size is None and any(METHODS[way.method].gradient for way in ways):
        size = max(1, size // _BACKWARD)
    with progress("Following attention", len(split), quiet=options.quiet) as advance:
        for batch in split.batches(size, device=specimen.device):
            own = None if targets is None else targets[batch.indices.cpu()]
            with autocast(specimen.device, options.precision):
                traced = trace(specimen, batch.images, ways, targets=own, readout=readout)
            maps.append(torch.stack(traced.maps, 1).float().cpu())
            logits.append(traced.logits.float().cpu())
            advance(len(batch.images))
    return processes.gathered(torch.cat(maps)), processes.gathered(torch.cat(logits))


def _keep(
    folder: RunFolder,
    specimen: Specimen,
    split: Split,
    ways: Sequence[Way],
    maps: Tensor,
    logits: Tensor,
    targets: Tensor | None,
    *,
    drawn: int,
) -> None:
    """Metrics, the table of images, and the arrays that the figures are drawn from."""
    hits = _localise(folder, split, ways, maps)
    for index, way in enumerate(ways):
        if way.method == "rollout":
            mass = maps[:, index].flatten(1).sum(1).numpy()
            folder.metric(f"rollout/patch_mass/{way.fusion}", bootstrap_mean(mass))
    empty = (maps.flatten(2) == 0).all(-1).sum(0).tolist()
    folder.table("methods", [{"method": way.name, "empty_maps": count} for way, count in zip(ways, empty)])
    confidence, predicted = logits.softmax(-1).max(-1)
    files = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
    asked = predicted if targets is None else targets
    rows = [
        {
            "image": files[index],
            "prediction": _name(specimen.classes, int(predicted[index])),
            "probability": round(float(confidence[index]), 4),
            "target": _name(specimen.classes, int(asked[index])),
        }
        for index in range(min(len(split), KEPT))
    ]
    folder.table("images", rows)
    shown = torch.arange(drawn)
    arrays: dict[str, Any] = {"images": split.source.read(shown).numpy(), "maps": maps[:KEPT].numpy()}
    if split.masks is not None and hits is not None:
        arrays |= {"masks": split.masks[shown].numpy(), "hits": hits[:KEPT].numpy()}
    folder.arrays("rollout", **arrays)


def _localise(folder: RunFolder, split: Split, ways: Sequence[Way], maps: Tensor) -> Tensor | None:
    """Whether each map's highest point lies on the object (n, ways), where masks are known; metrics beside."""
    if split.masks is None:
        return None
    groups = None if split.groups is None else split.groups.numpy()
    hits = torch.stack([pointing_hits(maps[:, index], split.masks) for index in range(len(ways))], 1)
    for index, way in enumerate(ways):
        folder.metric(f"localisation/pointing/{way.name}", accuracy(hits[:, index], groups=split.groups))
    areas = mask_areas(split.masks).numpy()
    folder.metric("localisation/pointing/mask-area", bootstrap_mean(areas, groups=groups))
    return hits


def _name(classes: Sequence[str], index: int) -> str:
    return classes[index] if index < len(classes) else str(index)
