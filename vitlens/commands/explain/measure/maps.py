"""The maps of one method on every image of a split, and their arrays, metrics and rows."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import BACKWARD, fitting_batch_size
from vitlens.analysis.faithfulness.map_shares import map_faults
from vitlens.attribution.explain import explain
from vitlens.attribution.gradients import logit_gain
from vitlens.attribution.package import PROVENANCE
from vitlens.attribution.refinement import Refinement
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.measure.subject import quickly
from vitlens.commands.explain.record import COMPLETENESS, MAPS, ExplainArrays, ExplainImageRow, MethodRow
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import Advance
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.uncertainty import bootstrap_mean

_STORED_BYTES: Final = 32 << 20  # of a model's maps, at most, beyond the drawn ones


@dataclass(frozen=True)
class AttributionMaps:
    """One method on all images of one model: maps (n, rows, columns) on the CPU, raw; seconds: an image; gains: the
    target's logit minus its logit for a black image (n,), None for a method whose maps do not sum to it."""

    method: str
    maps: Tensor
    seconds: float
    gains: Tensor | None = None


def attribution_maps(
    model: Model,
    split: Split,
    targets: Tensor | None,
    method: str,
    *,
    engine: Engine = "vitlens",
    refinement: Refinement | None = None,
    options: RunOptions,
    advance: Advance = lambda _: None,
) -> AttributionMaps:
    """One method on every image of a split, for target classes (n,); None for a model without a classifier."""
    size = options.batch_size or max(1, fitting_batch_size(model) // BACKWARD)
    maps, gains, seconds = [], [], 0.0
    complete = ATTRIBUTIONS[method].complete and not (refinement and refinement.changes)  # a refined map sums to less
    for batch in split.batches(size, device=model.device):
        own = None if targets is None else targets[batch.indices].to(model.device)
        with autocast(model.device, precision(options)), quickly(model, method):
            start = time.perf_counter()
            batch_maps = explain(
                model,
                batch.images,
                targets=own,
                method=method,
                refinement=refinement,
                engine=engine,
                batch_size=size,
                seed=options.seed,
            )
            maps.append(batch_maps.cpu())  # waits for an asynchronous device
            seconds += time.perf_counter() - start
            if complete and own is not None:
                gains.append(logit_gain(model, batch.images, own).cpu())
        advance(len(batch_maps))
    return AttributionMaps(method, torch.cat(maps), seconds / len(split), torch.cat(gains) if gains else None)


def precision(options: RunOptions) -> str:
    """fp32 unless --precision is bf16: attributions are small differences of large numbers."""
    return "bf16" if options.precision == "bf16" else "fp32"


def write_maps(
    folder: RunFolder, model: Model, split: Split, attributions: Sequence[AttributionMaps], *, drawn: int
) -> None:
    """Write the completeness of a model's maps as metrics, and the maps as arrays. drawn: images in figures."""
    groups = None if split.groups is None else split.groups.numpy()
    for attribution in attributions:
        if attribution.gains is not None and bool(attribution.maps.isfinite().all()):
            error = (attribution.maps.sum((1, 2)) - attribution.gains).abs().numpy()
            name = COMPLETENESS(model=model.alias, method=attribution.method)
            folder.metric(name, bootstrap_mean(error, groups=groups, unit="logits"))
    size = sum(4 * attribution.maps[0].numel() for attribution in attributions)
    stored, shown = max(drawn, _STORED_BYTES // size), torch.arange(min(drawn, len(split)))
    masks = None if split.masks is None else split.masks[shown].numpy()
    maps = {index: attribution.maps[:stored].numpy() for index, attribution in enumerate(attributions)}
    folder.save(MAPS, ExplainArrays(split.source.read(shown).numpy(), maps, masks), model=model.alias)


def method_row(
    model: Model, attribution: AttributionMaps, engine: Engine, refinement: Refinement | None = None
) -> MethodRow:
    """The method and what was done with its maps, their faults, and their cost."""
    method, faults = ATTRIBUTIONS[attribution.method], map_faults(attribution.maps)
    own, done = engine == "vitlens", refinement.words if refinement is not None else ""
    title = method.title if own else f"{method.title} (grad-cam package)"
    return MethodRow(
        model=model.alias,
        method=method.name,
        title=f"{title}, {done}" if done else title,
        source=method.paper if own else PROVENANCE,
        map="x".join(str(side) for side in attribution.maps.shape[1:]),
        signed=method.signed and own and (refinement is None or refinement.times is None),
        maps=len(attribution.maps),
        constant=int(faults.constant.sum()),
        not_finite=int(faults.not_finite.sum()),
        seconds=round(attribution.seconds, 5),
        gain=None if attribution.gains is None else float(attribution.gains.abs().mean()),
    )


def image_rows(model: Model, split: Split, logits: Tensor, targets: Tensor | None) -> Iterator[ExplainImageRow]:
    """The prediction of each image, and the class that is explained; None where the model has no classifier."""
    names = split.files or tuple(f"{split.name} {index}" for index in range(len(split)))
    for index, probabilities in enumerate(logits.softmax(-1)):
        label = None if split.labels is None else split.classes[int(split.labels[index])]
        if targets is None:
            yield ExplainImageRow(model.alias, names[index], None, None, None, None, label)
            continue
        target = int(targets[index])
        yield ExplainImageRow(
            model=model.alias,
            image=names[index],
            prediction=model.classes[int(probabilities.argmax())],
            probability=round(float(probabilities.max()), 4),
            target=model.classes[target],
            target_probability=round(float(probabilities[target]), 4),
            label=label,
        )
