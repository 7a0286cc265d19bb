"""What all measurements of `vitlens ablate` share; and those inside the model: labels, patching, lens, pruning."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.ablation import bench as ablation
from vitlens.analysis.ablation.bench import Memory, Removal, Stored, Unit
from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.cost.passes import passes, quartiles
from vitlens.analysis.evaluation.evaluate import accuracy, fitting_batch_size
from vitlens.analysis.heads.registry import MIXED, UNLABELLED, head_words
from vitlens.analysis.heads.specialisation import specialise
from vitlens.analysis.heads.statistics import Stream
from vitlens.analysis.patching.contribution import (
    above_mean,
    direct_logit_attribution,
    key_contributions,
    label_contributions,
    logits_by_depth,
)
from vitlens.analysis.patching.patching import corrupt, patch_parts
from vitlens.arrays import Form
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.ablate.record import (
    ContributionRow,
    ExemplarArrays,
    ExemplarRow,
    LensRow,
    PatchingArrays,
    PatchingRow,
    PrunedRow,
)
from vitlens.commands.run.progress import ProgressStore, phase
from vitlens.commands.run.resume import batch_digest
from vitlens.commands.run.run import Run
from vitlens.commands.run.unseen import copy_training_images
from vitlens.data.catalogue import load_images
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.capture import Means
from vitlens.models.model import Model
from vitlens.models.rebuild import prune_heads
from vitlens.models.saved import WEIGHTS_FILE, save
from vitlens.names import Replacement
from vitlens.pixels import Streamed
from vitlens.uncertainty import Estimate, finite

IMAGES: Final = 64  # on which heads are labelled, of the lens and the contributions, at most; the pair is one of them
EXEMPLARS: Final = 2  # of each head
_LARGEST: Final = 96  # px of a side of an exemplar that is kept: it is shown small
_TRIED: Final = 8  # images that are corrupted in search of one whose prediction changes
_CORRUPTED: Final = {"blur": "blurred", "shuffle": "tiles shuffled", "noise": "with noise"}  # tried in this order
_ROUNDS: Final = 3  # of timing, alternating between the whole and the pruned model
_TIMED: Final = 8  # images in the batch that is timed


@dataclass(frozen=True)
class Bench:
    """What is measured on. labels: (n,), columns of the model's logits; the run's options have their default
    replacement chosen."""

    run: Run[AblateOptions]
    labels: Tensor
    units: tuple[Unit, ...]
    store: ProgressStore
    means: Means | None = None

    @property
    def heads(self) -> tuple[Unit, ...]:
        """Return the units that are heads."""
        return tuple(unit for unit in self.units if unit.kind == "head")

    @property
    def replacement(self) -> Replacement:
        """Return the replacement of the figures, and of all measurements that use only one."""
        return self.run.options.replace[0]

    @property
    def batch_size(self) -> int:
        """Images at a time."""
        return self.run.run.batch_size or fitting_batch_size(self.run.model)

    def groups(self, indices: Tensor | None = None) -> Tensor | None:
        """Return the groups of the images (n,), or of those at these indices; None where images have no groups."""
        groups = self.run.split.groups
        return groups if groups is None or indices is None else groups[indices]

    def by(self, replacement: Replacement) -> ablation.Bench:
        """Return what the analysis measures with, for one of the replacements."""
        run = self.run
        return ablation.Bench(
            run.model,
            Streamed(run.split, run.model.pixel_dtype),
            self.labels,
            replacement,
            self.groups(),
            run.run.seed,
            self.batch_size,
            run.processes,
            means=self.means,
            progress=run.progress,
            memory=self._memory,
        )

    def measured_means(self) -> Means | None:
        """Return the mean outputs over all processes, where they are needed; None where one batch holds all images,
        whose clean pass gives them."""
        options = self.run.options
        if "mean" not in options.replace:
            return None
        bench = self.by("mean")
        return (
            None if bench.one_batch and not options.curves and not options.pairs else bench.with_means(self.units).means
        )

    def _memory(self, name: str, images: Tensor, labels: Tensor) -> Memory:
        """Return the stored outcomes of one batch, in parts for the units of one layer.

        It raises InputError where they are of other images, or damaged.
        """
        digest = batch_digest(images, labels)

        def remembered(sets: Sequence[Removal], measure: Callable[[], Stored]) -> Stored:
            units = ",".join("+".join(unit.name for unit in each) for each in sets)
            key = f"{name}-{hashlib.sha256(units.encode()).hexdigest()[:16]}"
            sides = (len(sets), len(labels))
            forms = {"log_odds": Form("f", sides), "correct": Form("b", sides), "cost": Form("iu")}
            arrays = self.store.recall(key, digest, forms)
            if arrays is not None:
                odds, correct = (torch.from_numpy(np.asarray(arrays[name])) for name in ("log_odds", "correct"))
                return Stored(odds, correct, int(arrays["cost"]))
            found = measure()
            stored = {
                "log_odds": found.log_odds.numpy(),
                "correct": found.correct.numpy(),
                "cost": np.array(found.cost),
            }
            self.store.remember(key, digest, stored)
            return found

        return remembered


def name_of(unit: Unit) -> str:
    """Return a unit as it is recorded: L3.H7, L3.MLP, L3.block."""
    part = f"H{unit.head}" if unit.kind == "head" else "MLP" if unit.kind == "mlp" else unit.kind
    return f"L{unit.layer}.{part}"


@phase("What each head attends to")
def head_labels(bench: Bench) -> dict[tuple[int, int], str]:
    """Return what each head attends to, by layer and head; none for attention without a place in the image."""
    split = bench.run.split.pick(torch.arange(min(IMAGES, len(bench.run.split))))
    stream = Stream(bench.run.model, groups=split.groups)
    try:
        for batch in split.batches(bench.batch_size, device=bench.run.model.device):
            stream.add(batch.images, masks=None if split.masks is None else split.masks[batch.indices])
    except UnsupportedError:  # attention between channels, or heads of several shapes in one layer
        return {}
    return {
        (layer, head): given.label
        if given.label not in (MIXED, UNLABELLED)
        else head_words(given.label, given.best, given.other or None, given.score)
        for layer, heads in enumerate(specialise(stream.result()).given)
        for head, given in enumerate(heads)
    }


def inside(bench: Bench) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what is measured inside the model as fields of the record, and why some of it is not defined for it.

    Activation patching, the logit lens, the contributions of heads and MLPs to the logits, and exemplars of the heads.
    """
    found: dict[str, Any] = {}
    undone: list[str] = []
    first = torch.arange(len(bench.run.split))[:IMAGES]
    (images,) = bench.run.split.pick(first).batches(len(first), device=bench.run.model.device)
    parts: tuple[Callable[[Bench, Tensor, Tensor], dict[str, Any]], ...] = (
        _patching,
        _lens,
        _contributions,
        _exemplars,
    )
    for part in parts:
        try:
            found |= part(bench, images.images, bench.labels[first])
        except (UnsupportedError, InputError) as error:
            if bench.run.options.clean is not None and not isinstance(error, UnsupportedError):
                raise
            undone.append(str(error))
    return found, tuple(dict.fromkeys(undone))


@phase("Activation patching")
def _patching(bench: Bench, images: Tensor, labels: Tensor) -> dict[str, Any]:
    clean, corrupted, names, corruption = _pair(bench, images, labels)
    layout = bench.run.model.anatomy.layout
    classes = bench.run.model.classes
    patched = patch_parts(bench.run.model, clean, corrupted)
    row = PatchingRow(
        *names,
        classes[int(patched.targets[0])],
        classes[int(patched.others[0])],
        float(patched.clean[0]),
        float(patched.corrupted[0]),
        corruption,
        grid=None if layout is None else (layout.grid[0], layout.grid[1]),
        prefix=None if layout is None else tuple(layout.prefix),
    )
    restored = (patched.restored("heads").numpy(), patched.restored("positions").numpy())
    arrays = PatchingArrays(clean[0].cpu().numpy(), corrupted[0].cpu().numpy(), *restored)
    return {"patching": (row,), "patched": arrays}


def _pair(bench: Bench, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, tuple[str, str], str]:
    """Return the images of --clean and --corrupted; or the correctly classified image of highest confidence whose
    prediction a corruption changes, and its corrupted copy, so that positions correspond. (1, 3, height, width) each,
    with their names and the corruption."""
    model = bench.run.model
    options = bench.run.options
    if options.clean is not None and options.corrupted is not None:
        paths = [options.clean, options.corrupted]
        split = load_images(paths, preprocessing=model.preprocessing)
        if len(split) != 2:
            raise InputError(f"expected two images that can be read, found {len(split)} of {paths[0]} and {paths[1]}")
        (both,) = split.batches(2, device=model.device)
        return both.images[:1], both.images[1:], (paths[0].name, paths[1].name), ""
    confidence, predicted = _predictions(model, images)
    correct = (predicted.cpu() == labels.cpu()).nonzero().flatten().tolist()
    for index in sorted(correct, key=lambda index: -float(confidence[index]))[:_TRIED]:
        clean = images[index : index + 1]
        name = model.classes[int(labels[index])]
        for how, words in _CORRUPTED.items():
            corrupted = corrupt(clean, how)
            if int(_predictions(model, corrupted)[1]) != int(labels[index]):
                return clean, corrupted, (name, f"{name}, {words}"), how
    raise InputError(
        "expected a correctly classified image whose prediction a corruption changes, found none; give --clean and "
        "--corrupted"
    )


@torch.no_grad()
def _predictions(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence and the class of each prediction, (batch,)."""
    confidence, predicted = model(images).float().softmax(-1).max(-1)
    return confidence, predicted


@phase("Logit lens")
def _lens(bench: Bench, images: Tensor, labels: Tensor) -> dict[str, Any]:
    predicted = logits_by_depth(bench.run.model, images).float().cpu().argmax(-1)
    right = predicted == labels.unsqueeze(1)
    groups = bench.groups(torch.arange(len(labels)))
    return {"lens": tuple(LensRow(depth, accuracy(own, groups=groups)) for depth, own in enumerate(right.unbind(1)))}


@phase("Contributions to the logits")
def _contributions(bench: Bench, images: Tensor, labels: Tensor) -> dict[str, Any]:
    parts = direct_logit_attribution(bench.run.model, images, labels)
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


@phase("Exemplars of the heads")
def _exemplars(bench: Bench, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the images of whose label each head raises the logit most, of those where it does so."""
    model = bench.run.model
    layout = model.anatomy.layout
    added = label_contributions(model, images, labels)
    wanted = above_mean(labels, len(model.classes))
    rows: list[ExemplarRow] = []
    pictures: dict[int, int] = {}  # their places in the arrays, by image
    for unit in bench.heads:
        head = unit.head or 0
        scores = added[:, unit.layer, head]
        best = [index for index in scores.argsort(descending=True)[:EXEMPLARS].tolist() if scores[index] > 0]
        if not best:
            continue
        through = key_contributions(model, images[best], wanted[best], unit.layer, head)
        for index, keys in zip(best, through):
            patch = grid = None
            if layout is not None and len(keys) == layout.tokens and bool(keys.isfinite().all()):
                grid = (layout.grid[0], layout.grid[1])
                patch = divmod(int(keys[len(layout.prefix) :].argmax()), grid[1])
            rows.append(
                ExemplarRow(
                    unit.layer,
                    head,
                    bench.run.split.names[index],
                    model.classes[int(labels[index])],
                    float(scores[index]),
                    pictures.setdefault(index, len(pictures)),
                    patch,
                    grid,
                )
            )
    if not rows:
        return {}
    return {"exemplars": tuple(rows), "pictures": ExemplarArrays(_small(images[list(pictures)]))}


def _small(images: Tensor) -> Any:
    """Return pixels 0 to 255 of images with sides of at most _LARGEST px."""
    height, width = images.shape[-2:]
    scale = min(1.0, _LARGEST / max(height, width))
    size = (max(1, round(scale * height)), max(1, round(scale * width)))
    smaller = F.adaptive_avg_pool2d(images.float(), size)
    return (smaller * 255).round().clamp(0, 255).byte().cpu().numpy()


@phase("Pruning, and timing the pruned model")
def pruned(bench: Bench, importance: Importance, folder: Path) -> tuple[Estimate, tuple[PrunedRow, ...]]:
    """Prune the least important share of the heads, save the model, and compare it with the whole one: the share of the
    parameters that was cut, and the rows. Raises InputError for a share that cuts no head."""
    whole = bench.run.model
    split = bench.run.split
    share = bench.run.options.prune or 0.0
    ranking = importance.ranking("head")[::-1]
    least = ranking[: round(share * len(ranking))]
    if not least:
        raise InputError(f"expected --prune with a share that cuts at least one of {len(ranking)} heads, found {share}")
    cut: dict[int, set[int]] = {}
    for unit in least:
        cut.setdefault(unit.layer, set()).add(int(unit.head or 0))
    small = prune_heads(whole, cut)
    save(small, folder / WEIGHTS_FILE)
    copy_training_images(whole, folder)
    (timed,) = split.pick(torch.arange(min(_TIMED, len(split)))).batches(_TIMED, device=whole.device)
    models: dict[Literal["whole", "pruned"], Model] = {"whole": whole, "pruned": small}
    rounds = [
        [quartiles(passes(model, timed.images, 5, warm_up=3), len(timed.images)) for model in models.values()]
        for _ in range(_ROUNDS)
    ]
    rows = []
    for (name, model), times in zip(models.items(), zip(*rounds)):
        best = min(times, key=lambda each: each.median)
        time = Estimate(1000 * best.median, 1000 * best.low, 1000 * best.high, len(timed.images), "ms")
        removed = tuple(map(name_of, sorted(least, key=importance.units.index))) if name == "pruned" else ()
        batches = split.batches(bench.batch_size, device=whole.device)
        right = [_predictions(model, batch.images)[1].cpu() == bench.labels[batch.indices].cpu() for batch in batches]
        kept = len(ranking) - len(removed)
        of_split = accuracy(torch.cat(right), groups=bench.groups())
        rows.append(PrunedRow(name, kept, model.parameter_count(), of_split, time, removed))
    return Estimate(1 - small.parameter_count() / whole.parameter_count()), tuple(rows)
