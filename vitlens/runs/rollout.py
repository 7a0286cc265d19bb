"""`vitlens rollout`: attention followed to the image of every picture, and whether the maps point at a known object."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import BACKWARD, accuracy, fitting_batch_size
from vitlens.analysis.attention.methods import Way, require_possible, trace
from vitlens.analysis.attention.registry import ATTENTION_METHODS, attention_method
from vitlens.analysis.faithfulness.localisation import mask_areas, pointing_hits
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.models.model import Model
from vitlens.names import DEFAULT_ALPHA, CommandName, Fusion, Readout
from vitlens.processes import Processes, share_of
from vitlens.runs.describe import described
from vitlens.runs.folder import RunFolder
from vitlens.runs.load import load_models, load_split
from vitlens.runs.options import ModelOptions, RunOptions
from vitlens.runs.processes import join_run
from vitlens.runs.progress import progress
from vitlens.runs.report import publish
from vitlens.runs.rollout_report import SHOWN, draw, tell
from vitlens.runs.sheets import DRAWN, say_left_out
from vitlens.runs.targets import PREDICTED, chosen_targets
from vitlens.uncertainty import bootstrap_mean

__all__ = ["draw", "rollout", "tell"]

DEFAULT_METHODS: Final = tuple(name for name, entry in ATTENTION_METHODS.items() if entry.default)
KEPT = 2000  # images whose maps are kept as arrays


def rollout(
    model: str,
    *,
    images: Sequence[str] | None = None,
    data: str | None = None,
    method: Sequence[str] = (),
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

    method: names of ATTENTION_METHODS, or none for the usual ones that the model has; target: whose logit the gradients
    are of, "predicted", "true" or a class. Of several processes each takes its share of the images; all but the first
    return None. Raises UnsupportedError for a method that needs the classifier that a model has not.
    """
    ways = [
        Way(name, fused, discard, alpha, start_layer, layer)
        for name in method or DEFAULT_METHODS
        for fused in (fusion if "fusion" in attention_method(name).options else ("mean",))
    ]  # fmt: skip
    processes, options = join_run(options)
    with processes.first_ahead():
        # one layer's attention can be drawn where it cannot be followed
        followed = any(attention_method(way.method).needs == "chain" for way in ways)
        command: CommandName = "rollout" if followed else "attention"
        (loaded,) = load_models((model,), command=command, model_options=model_options, options=options)
        split = load_split(loaded, options=options, data=data, images=images)
    ways = _able(loaded, ways, asked=bool(method))
    targets = chosen_targets(target, loaded, split)
    (first,) = split.pick(torch.arange(1)).batches(1, device=loaded.device)
    require_possible(loaded, first.images, ways)
    share_of(split, processes)
    chosen = readout or loaded.anatomy.readout
    if not processes.is_first:
        _follow(loaded, split, ways, targets, chosen, processes, options)
        return None
    choices: Mapping[str, object] = {
        "method": list(dict.fromkeys(way.method for way in ways)), "target": target, "fusion": list(fusion),
        "discard": discard, "alpha": alpha,
        "start_layer": start_layer, "layer": layer, "readout": chosen, "ways": [way.name for way in ways],
    }  # fmt: skip
    config = described(options, models=(loaded,), split=split, choices=choices)
    folder = RunFolder.create(
        "rollout",
        name_parts=(loaded.alias, split.name),
        title=f"Attention of {loaded.alias} followed to the image, on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=config,
        formats=options.formats,
    )
    with folder:
        maps, logits = _follow(loaded, split, ways, targets, chosen, processes, options)
        drawn = min(DRAWN if images else SHOWN, len(split))
        say_left_out(drawn, len(split), quiet=options.quiet, more="maps of all are in arrays/")
        _keep(folder, loaded, split, ways, maps, logits, targets, drawn=drawn)
        return publish(folder, draw, tell)


def _able(model: Model, ways: Sequence[Way], *, asked: bool) -> list[Way]:
    """The ways, of a model without a classifier those that ask about no class.

    Raises UnsupportedError where others were asked for, or none is left.
    """
    classless = [way for way in ways if not attention_method(way.method).gradients]
    if len(classless) < len(ways) and (asked or not classless):
        model.require_classifier()
    return list(ways) if model.has_classifier else classless


def _follow(
    model: Model,
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
    size = options.batch_size or fitting_batch_size(model)
    if options.batch_size is None and any(attention_method(way.method).gradients for way in ways):
        size = max(1, size // BACKWARD)
    with progress("Following attention", len(split), quiet=options.quiet) as advance:
        for batch in split.batches(size, device=model.device):
            own = None if targets is None else targets[batch.indices.cpu()]
            with autocast(model.device, options.precision):
                traced = trace(model, batch.images, ways, targets=own, readout=readout)
            maps.append(torch.stack(traced.maps, 1).float().cpu())
            logits.append(traced.logits.float().cpu())
            advance(len(batch.images))
    return processes.gathered(torch.cat(maps)), processes.gathered(torch.cat(logits))


def _keep(
    folder: RunFolder,
    model: Model,
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
    folder.table("images", _image_rows(model, split, logits, targets))
    shown = torch.arange(drawn)
    arrays: dict[str, Any] = {"images": split.source.read(shown).numpy(), "maps": maps[:KEPT].numpy()}
    if split.masks is not None and hits is not None:
        arrays |= {"masks": split.masks[shown].numpy(), "hits": hits[:KEPT].numpy()}
    folder.arrays("rollout", **arrays)


def _image_rows(model: Model, split: Split, logits: Tensor, targets: Tensor | None) -> list[dict[str, object]]:
    """What the model answers to each image, and which class is asked about; None where it has no classifier."""
    files = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
    confidence, predicted = logits.softmax(-1).max(-1)
    asked = predicted if targets is None else targets
    rows: list[dict[str, object]] = []
    for index in range(min(len(split), KEPT)):
        row: dict[str, object] = {"image": files[index]} | dict.fromkeys(("prediction", "probability", "target"))
        if model.has_classifier:
            row["prediction"] = model.classes[int(predicted[index])]
            row["probability"] = round(float(confidence[index]), 4)
            row["target"] = model.classes[int(asked[index])]
        rows.append(row)
    return rows


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
