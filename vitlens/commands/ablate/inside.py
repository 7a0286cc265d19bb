"""Inside one model: labels of its heads, activation patching, the logit lens, direct contributions; and pruning."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.cost.latency import Latency, latency
from vitlens.analysis.heads.labels import LABELS, head_words
from vitlens.analysis.heads.specialisation import specialise
from vitlens.analysis.heads.statistics import Stream
from vitlens.analysis.patching.contribution import accuracy_by_depth, contributions, logits_by_depth
from vitlens.analysis.patching.corruption import corrupt
from vitlens.analysis.patching.patching import patch_parts
from vitlens.commands.ablate.bench import Bench, LabelledBatch, finite, name_of
from vitlens.commands.ablate.record import ContributionRow, LensRow, PatchingArrays, PatchingRow, PrunedRow
from vitlens.commands.run.unseen import copy_training_images
from vitlens.data.catalogue import load_images
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.rebuilding.pruning import prune_heads
from vitlens.models.saved import WEIGHTS_FILE, save
from vitlens.processes import Processes
from vitlens.uncertainty import Estimate, wilson

IMAGES: Final = 64  # on which heads are labelled, of the lens and the contributions, at most; the pair is one of them
_TRIED: Final = 8  # images that are corrupted in search of one whose prediction changes
_CORRUPTED: Final = {"blur": "blurred", "shuffle": "tiles shuffled", "noise": "with noise"}  # tried in this order
_ROUNDS: Final = 3  # of timing, alternating between the whole and the pruned model
_TIMED: Final = 8  # images in the batch that is timed

Parts = dict[str, Any]  # fields of the record


def head_labels(bench: Bench) -> dict[tuple[int, int], str]:
    """What each head attends to, by layer and head; none for attention without a place in the image."""
    split = bench.split.pick(torch.arange(min(IMAGES, len(bench.split))))
    stream = Stream(bench.model, groups=split.groups)
    try:
        for batch in split.batches(bench.batch_size, device=bench.model.device):
            stream.add(batch.images, masks=None if split.masks is None else split.masks[batch.indices])
    except UnsupportedError:  # attention between channels, or heads of several shapes in one layer
        return {}
    return {
        (layer, head): given.label
        if LABELS[given.label].function
        else head_words(given.label, given.best, given.other or None, given.score)
        for layer, heads in enumerate(specialise(stream.result()).given)
        for head, given in enumerate(heads)
    }


def inside(bench: Bench) -> tuple[Parts, tuple[str, ...]]:
    """Activation patching, the logit lens and the contributions of heads and MLPs to the logits; and the reasons why
    one of these is not defined for the model."""
    found, undone = Parts(), []
    first = torch.arange(len(bench.split))[:IMAGES]
    (images,) = bench.split.pick(first).batches(len(first), device=bench.model.device)
    batch = LabelledBatch(images.images, bench.labels[first], 0)
    for part in (_patching, _lens, _contributions):
        try:
            found |= part(bench, batch)
        except UnsupportedError as error:
            undone.append(str(error))
        except InputError as error:
            if bench.options.clean is not None:
                raise
            undone.append(str(error))
    return found, tuple(dict.fromkeys(undone))


def _patching(bench: Bench, batch: LabelledBatch) -> Parts:
    clean, corrupted, names, corruption = _pair(bench, batch)
    layout, classes = bench.model.anatomy.layout, bench.model.classes
    patched = patch_parts(bench.model, clean, corrupted)
    row = PatchingRow(
        clean=names[0],
        corrupted=names[1],
        target=classes[int(patched.targets[0])],
        other=classes[int(patched.others[0])],
        difference_clean=float(patched.clean[0]),
        difference_corrupted=float(patched.corrupted[0]),
        corruption=corruption,
        note=patched.note,
        grid=None if layout is None else (layout.grid[0], layout.grid[1]),
        prefix=None if layout is None else tuple(layout.prefix),
    )
    restored = {part: patched.restored(part).numpy() for part in ("heads", "blocks", "mlps", "positions")}
    arrays = PatchingArrays(clean=clean[0].cpu().numpy(), corrupted=corrupted[0].cpu().numpy(), **restored)
    return {"patching": (row,), "patched": arrays}


def _pair(bench: Bench, batch: LabelledBatch) -> tuple[Tensor, Tensor, tuple[str, str], str]:
    """The images of --clean and --corrupted; or the correctly classified image of highest confidence whose prediction a
    corruption changes, and its corrupted copy, so that positions correspond. (1, 3, height, width) each, with their
    names and the corruption."""
    model, options = bench.model, bench.options
    if options.clean is not None and options.corrupted is not None:
        paths = [options.clean, options.corrupted]
        split = load_images(paths, preprocessing=model.preprocessing)
        if len(split) != 2:
            raise InputError(f"expected two images that can be read, found {len(split)} of {paths[0]} and {paths[1]}")
        (both,) = split.batches(2, device=model.device)
        return both.images[:1], both.images[1:], (paths[0].name, paths[1].name), ""
    confidence, predicted = _predictions(model, batch.images)
    correct = (predicted.cpu() == batch.labels.cpu()).nonzero().flatten().tolist()
    for index in sorted(correct, key=lambda index: -float(confidence[index]))[:_TRIED]:
        clean, name = batch.images[index : index + 1], model.classes[int(batch.labels[index])]
        for how, words in _CORRUPTED.items():
            corrupted = corrupt(clean, how)
            if int(_predictions(model, corrupted)[1]) != int(batch.labels[index]):
                return clean, corrupted, (name, f"{name}, {words}"), how
    raise InputError(
        "expected a correctly classified image whose prediction a corruption changes, found none; give --clean and "
        "--corrupted"
    )


@torch.no_grad()
def _predictions(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    """The confidence and the class of each prediction, (batch,)."""
    confidence, predicted = model(images).float().softmax(-1).max(-1)
    return confidence, predicted


def _lens(bench: Bench, batch: LabelledBatch) -> Parts:
    right = accuracy_by_depth(logits_by_depth(bench.model, batch.images).float().cpu(), batch.labels).tolist()
    n = len(batch.labels)
    shares = [replace(wilson(round(share * n), n), value=share) for share in right]
    return {"lens": tuple(LensRow(depth, share) for depth, share in enumerate(shares))}


def _contributions(bench: Bench, batch: LabelledBatch) -> Parts:
    parts = contributions(bench.model, batch.images, targets=batch.labels)
    rows = [
        ContributionRow(f"L{layer}.H{head}", "head", value, layer, head)
        for layer, values in enumerate(parts.heads.mean(0).tolist())
        for head, value in enumerate(values)
        if finite(value) is not None
    ]
    mlps = enumerate(parts.mlps.mean(0).tolist())
    rows += [ContributionRow(f"L{layer}.MLP", "MLP", value, layer) for layer, value in mlps]
    rows.append(ContributionRow("rest", "rest", float((parts.embedding + parts.bias + parts.rest).mean())))
    return {"contributions": tuple(rows)}


def pruned(bench: Bench, importance: Importance, folder: Path) -> tuple[Estimate, tuple[PrunedRow, ...]]:
    """Prune the least important share of the heads, save the model, and compare it with the whole one: the share of the
    parameters that was cut, and the rows. Raises InputError for a share that cuts no head."""
    share, ranking = bench.options.prune or 0.0, importance.ranking("head")[::-1]
    least = ranking[: round(share * len(ranking))]
    if not least:
        raise InputError(f"expected --prune with a share that cuts at least one of {len(ranking)} heads, found {share}")
    cut: dict[int, set[int]] = {}
    for unit in least:
        cut.setdefault(unit.layer, set()).add(int(unit.head or 0))
    small = prune_heads(bench.model, cut)
    save(small, folder / WEIGHTS_FILE)
    copy_training_images(bench.model, folder)

    every = replace(bench, processes=Processes(0, 1, bench.model.device))  # all images
    (timed,) = bench.split.pick(torch.arange(min(_TIMED, len(bench.split)))).batches(_TIMED, device=bench.model.device)
    models: dict[Literal["whole", "pruned"], Model] = {"whole": bench.model, "pruned": small}
    times: dict[str, list[Latency]] = {name: [] for name in models}
    for _ in range(_ROUNDS):
        for name, model in models.items():
            times[name].append(latency(model, timed.images, repeats=5))
    rows = []
    for name, model in models.items():
        best = min(times[name], key=lambda each: each.median)
        time = Estimate(1000 * best.median, 1000 * best.low, 1000 * best.high, len(timed.images), "ms")
        removed = tuple(map(name_of, sorted(least, key=importance.units.index))) if name == "pruned" else ()
        right = [(_predictions(model, batch.images)[1] == batch.labels).cpu() for batch in every.batches()]
        kept = len(ranking) - len(removed)
        rows.append(PrunedRow(name, kept, model.parameter_count(), accuracy(torch.cat(right)), time, removed))
    return Estimate(1 - small.parameter_count() / bench.model.parameter_count()), tuple(rows)
