"""Inside one model: labels of its heads, activation patching, the logit lens, direct contributions; and pruning."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.cost.latency import Latency, latency
from vitlens.analysis.heads.specialisation import specialise
from vitlens.analysis.heads.statistics import Stream
from vitlens.analysis.patching.contribution import accuracy_by_depth, contributions, logits_by_depth
from vitlens.analysis.patching.corruption import corrupt
from vitlens.analysis.patching.patching import patch_parts
from vitlens.commands.ablate.bench import Bench, LabelledBatch, finite
from vitlens.commands.ablate.record import (
    CORRUPTED,
    ContributionRow,
    HeadLabelRow,
    LensRow,
    LogitRow,
    PatchingArrays,
    PatchingRow,
    PrunedHeadsRow,
    PrunedRow,
)
from vitlens.commands.scaffold.unseen import copy_training_images
from vitlens.data.catalogue import load_images
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.rebuilding.pruning import prune_heads
from vitlens.models.saved import WEIGHTS_FILE, save
from vitlens.processes import Processes
from vitlens.uncertainty import Estimate, wilson

IMAGES: Final = 64  # on which heads are labelled, of the lens and the contributions, at most; the pair is one of them
_CLASSES: Final = 5  # in the logit lens
_TRIED: Final = 8  # images that are corrupted in search of one whose prediction changes
_CORRUPTIONS: Final = ("blur", "shuffle", "noise")  # in this order: blur keeps colours and places
_ROUNDS: Final = 3  # of timing, alternating between the whole and the pruned model
_TIMED: Final = 8  # images in the batch that is timed

Parts = dict[str, Any]  # fields of the record


def head_labels(bench: Bench) -> Iterator[HeadLabelRow]:
    """One row for each head whose attention has a place in the image."""
    split = bench.split.pick(torch.arange(min(IMAGES, len(bench.split))))
    stream = Stream(bench.model, groups=split.groups)
    try:
        for batch in split.batches(bench.batch_size, device=bench.model.device):
            masks = None if split.masks is None else split.masks[batch.indices]
            stream.add(batch.images, masks=masks)
    except UnsupportedError:  # attention between channels, or heads of several shapes in one layer: no labels
        return
    for layer, heads in enumerate(specialise(stream.result()).given):
        for head, given in enumerate(heads):
            score = Estimate(given.score, finite(given.low), finite(given.high), len(split), "")
            yield HeadLabelRow(
                layer, head, given.label, score, given.best, given.other or None, finite(given.other_score)
            )


def inside(bench: Bench) -> Parts:
    """Activation patching, the logit lens and the contributions of heads and MLPs to the logits.

    Where one of these is not defined for the model, `undone` gives the reason.
    """
    found: Parts = {}
    undone: list[str] = []
    parts: tuple[Callable[[Bench], Parts], ...] = (_patching, _lens, _contributions)
    for part in parts:
        try:
            found |= part(bench)
        except UnsupportedError as error:
            undone.append(str(error))
        except InputError as error:
            if bench.options.clean is not None:
                raise
            undone.append(str(error))
    return {**found, "undone": tuple(dict.fromkeys(undone))}


@dataclass(frozen=True)
class _Pair:
    """A clean and a corrupted image, (1, 3, height, width) each, with their names; corruption: as in PatchingRow."""

    clean: Tensor
    corrupted: Tensor
    names: tuple[str, str]
    corruption: str = ""


def _patching(bench: Bench) -> Parts:
    pair, layout, classes = _pair(bench), bench.model.anatomy.layout, bench.model.classes
    patched = patch_parts(bench.model, pair.clean, pair.corrupted)
    row = PatchingRow(
        clean=pair.names[0],
        corrupted=pair.names[1],
        target=classes[int(patched.targets[0])],
        other=classes[int(patched.others[0])],
        difference_clean=float(patched.clean[0]),
        difference_corrupted=float(patched.corrupted[0]),
        corruption=pair.corruption,
        note=patched.note,
        grid=None if layout is None else (layout.grid[0], layout.grid[1]),
        prefix=None if layout is None else tuple(layout.prefix),
    )
    arrays = PatchingArrays(
        clean=pair.clean[0].cpu().numpy(),
        corrupted=pair.corrupted[0].cpu().numpy(),
        heads=patched.restored("heads").numpy(),
        blocks=patched.restored("blocks").numpy(),
        mlps=patched.restored("mlps").numpy(),
        positions=patched.restored("positions").numpy(),
    )
    return {"patching": (row,), "patched": arrays}


def _pair(bench: Bench) -> _Pair:
    """The images of --clean and --corrupted; or the correctly classified image of highest confidence whose prediction a
    corruption changes, and its corrupted copy, so that positions correspond; or, where none changes, the one of highest
    confidence and the one of highest confidence in another class."""
    model, options = bench.model, bench.options
    if options.clean is not None and options.corrupted is not None:
        paths = [options.clean, options.corrupted]
        split = load_images(paths, preprocessing=model.preprocessing)
        if len(split) != 2:
            raise InputError(f"expected two images that can be read, found {len(split)} of {paths[0]} and {paths[1]}")
        (both,) = split.batches(2, device=model.device)
        return _Pair(both.images[:1], both.images[1:], (paths[0].name, paths[1].name))
    batch = _first_images(bench)
    confidence, predicted = _predictions(model, batch.images)
    labels = batch.labels.to(predicted.device)
    correct = (predicted == labels).nonzero().flatten().tolist()
    order = sorted(correct, key=lambda index: -float(confidence[index]))
    names = [model.classes[int(label)] for label in labels]
    for index in order[:_TRIED]:
        clean = batch.images[index : index + 1]
        for how in _CORRUPTIONS:
            corrupted = corrupt(clean, how)
            if int(_predictions(model, corrupted)[1]) != int(labels[index]):
                return _Pair(clean, corrupted, (names[index], f"{names[index]}, {CORRUPTED[how]}"), how)
    other = next((index for index in order[1:] if labels[index] != labels[order[0]]), None) if order else None
    if other is None:
        raise InputError(
            "expected a correctly classified image whose prediction a corruption changes, found none; give --clean and "
            "--corrupted"
        )
    clean, corrupted = (batch.images[[index]] for index in (order[0], other))
    return _Pair(clean, corrupted, (names[order[0]], names[other]))


@torch.no_grad()
def _predictions(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    """The confidence and the class of each prediction, (batch,)."""
    confidence, predicted = model(images).float().softmax(-1).max(-1)
    return confidence, predicted


def _first_images(bench: Bench) -> LabelledBatch:
    first = torch.arange(len(bench.split))[:IMAGES]
    (batch,) = bench.split.pick(first).batches(len(first), device=bench.model.device)
    return LabelledBatch(batch.images, bench.labels[first], 0)


def _lens(bench: Bench) -> Parts:
    batch, classes = _first_images(bench), bench.model.classes
    lens = logits_by_depth(bench.model, batch.images).float().cpu()  # (batch, depths, classes)
    right, n = accuracy_by_depth(lens, batch.labels), len(batch.labels)
    top = lens[0, -1].topk(min(_CLASSES, lens.shape[-1])).indices.tolist()
    probability = lens[0].softmax(-1)
    return {
        "lens": tuple(
            LensRow(
                depth,
                replace(wilson(round(share * n), n), value=share),
                {classes[index]: float(probability[depth, index]) for index in top},
            )
            for depth, share in enumerate(right.tolist())
        )
    }


def _contributions(bench: Bench) -> Parts:
    batch = _first_images(bench)
    parts = contributions(bench.model, batch.images, targets=batch.labels)
    gap = (parts.total() - parts.logit).abs().max()
    rows = [
        ContributionRow(f"L{layer}.H{head}", "head", value, layer, head)
        for layer, values in enumerate(parts.heads.mean(0).tolist())
        for head, value in enumerate(values)
        if finite(value) is not None
    ]
    rows += [
        ContributionRow(f"L{layer}.MLP", "MLP", value, layer) for layer, value in enumerate(parts.mlps.mean(0).tolist())
    ]
    rows.append(ContributionRow("rest", "rest", float((parts.embedding + parts.bias + parts.rest).mean())))
    logit = LogitRow(len(batch.labels), float(parts.logit.mean()), float(gap))
    return {"contributions": tuple(rows), "logit": (logit,)}


def pruned(bench: Bench, importance: Importance, folder: Path) -> tuple[Estimate, Parts]:
    """Prune the least important share of the heads, save the model, and compare it with the whole one: the share of the
    parameters that was cut, and the rows. Raises InputError for a share that cuts no head."""
    share, ranking = bench.options.prune or 0.0, list(reversed(importance.ranking("head")))
    count = round(share * len(ranking))
    if not 0 < count <= len(ranking):
        raise InputError(f"expected --prune with a share that cuts at least one of {len(ranking)} heads, found {share}")
    cut: dict[int, set[int]] = {}
    for unit in ranking[:count]:
        cut.setdefault(unit.layer, set()).add(int(unit.head or 0))
    small = prune_heads(bench.model, cut)
    save(small, folder / WEIGHTS_FILE)
    copy_training_images(bench.model, folder)
    return Estimate(1 - small.parameter_count() / bench.model.parameter_count()), {
        "pruned": tuple(_pruned_rows(bench, small, heads=len(ranking), cut=count)),
        "pruned_heads": tuple(PrunedHeadsRow(layer, tuple(sorted(heads))) for layer, heads in sorted(cut.items())),
    }


def _pruned_rows(bench: Bench, small: Model, *, heads: int, cut: int) -> Iterator[PrunedRow]:
    timed = torch.arange(min(_TIMED, len(bench.split)))
    (batch,) = bench.split.pick(timed).batches(_TIMED, device=bench.model.device)
    models: dict[Literal["whole", "pruned"], Model] = {"whole": bench.model, "pruned": small}
    times: dict[str, list[Latency]] = {name: [] for name in models}
    for _ in range(_ROUNDS):
        for name, model in models.items():
            times[name].append(latency(model, batch.images, repeats=5))
    for name, model in models.items():
        best = min(times[name], key=lambda each: each.median)
        time = Estimate(1000 * best.median, 1000 * best.low, 1000 * best.high, len(batch.images), "ms")
        kept = heads - (cut if name == "pruned" else 0)
        yield PrunedRow(name, kept, model.parameter_count(), _accuracy(bench, model), time)


def _accuracy(bench: Bench, model: Model) -> Estimate:
    whole = replace(bench, processes=Processes(0, 1, bench.model.device))  # all images
    right = []
    with torch.no_grad():
        for batch in whole.batches():
            right.append((model(batch.images).argmax(-1) == batch.labels).cpu())
    return accuracy(torch.cat(right))
