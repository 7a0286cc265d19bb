"""Activation patching, direct logit attribution and the logit lens, on images of the data or of the user."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.patching.contribution import accuracy_by_depth, contributions, logits_by_depth
from vitlens.analysis.patching.corruption import corrupt
from vitlens.analysis.patching.patching import Patching, patch_parts
from vitlens.commands.ablate.measure.work import AblationRun, LabelledBatch
from vitlens.commands.ablate.record import (
    CONTRIBUTION_ARRAYS,
    CONTRIBUTIONS,
    INSIDE_NOTES,
    LENS,
    LENS_ARRAYS,
    LENS_CLASSES,
    PATCHING,
    PATCHING_ARRAYS,
)
from vitlens.commands.ablate.record.arrays import ContributionArrays, LensArrays, PatchingArrays
from vitlens.commands.ablate.record.rows import (
    CORRUPTED,
    ContributionRow,
    InsideNoteRow,
    LensClassRow,
    LensRow,
    PatchingRow,
)
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.data.catalogue import load_images
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.model import Model
from vitlens.records import TableOf
from vitlens.uncertainty import wilson

_IMAGES: Final = 64  # images of the logit lens and the contributions, from which the pair is chosen too, at most
_CLASSES: Final = 5  # in the logit lens
_TRIED: Final = 8  # images that are corrupted in search of one whose prediction changes
_CORRUPTIONS: Final = ("blur", "shuffle", "noise")  # in this order: blur keeps colours and places


def write_inside(folder: RunFolder, ablation: AblationRun) -> None:
    """Measure and write activation patching, the logit lens and the contributions of heads and MLPs to the logits.

    Where one of these is not defined for the model, a note gives the reason. No rows with --no-patch or --top.
    """
    tables: tuple[TableOf[Any], ...] = (PATCHING, LENS, LENS_CLASSES, CONTRIBUTIONS)
    for table in tables:
        folder.write(table, [])
    notes: list[str] = []
    parts: tuple[Callable[[RunFolder, AblationRun], None], ...] = (_write_patching, _write_lens, _write_contributions)
    enabled = ablation.options.patch and ablation.options.top is None
    for write in parts if enabled else ():
        try:
            write(folder, ablation)
        except UnsupportedError as error:
            notes.append(str(error))
        except InputError as error:
            if ablation.options.clean is not None:
                raise
            notes.append(str(error))
    folder.write(INSIDE_NOTES, [InsideNoteRow(note) for note in dict.fromkeys(notes)])


@dataclass(frozen=True)
class _Pair:
    """A clean and a corrupted image, (1, 3, height, width) each, with their names; corruption: as in PatchingRow."""

    clean: Tensor
    corrupted: Tensor
    names: tuple[str, str]
    corruption: str = ""


def _write_patching(folder: RunFolder, ablation: AblationRun) -> None:
    pair = _pair(ablation)
    patched = patch_parts(ablation.model, pair.clean, pair.corrupted)
    arrays = PatchingArrays(
        clean=pair.clean[0].cpu().numpy(),
        corrupted=pair.corrupted[0].cpu().numpy(),
        heads=patched.restored("heads").numpy(),
        blocks=patched.restored("blocks").numpy(),
        mlps=patched.restored("mlps").numpy(),
        positions=patched.restored("positions").numpy(),
    )
    folder.save(PATCHING_ARRAYS, arrays)
    folder.write(PATCHING, [_patching_row(ablation, patched, pair)])


def _pair(ablation: AblationRun) -> _Pair:
    """The images of --clean and --corrupted; or the correctly classified image of highest confidence whose prediction a
    corruption changes, and its corrupted copy, so that positions correspond; or, where none changes, the one of highest
    confidence and the one of highest confidence in another class."""
    model, options = ablation.model, ablation.options
    if options.clean is not None and options.corrupted is not None:
        paths = [options.clean, options.corrupted]
        split = load_images(paths, preprocessing=model.preprocessing)
        if len(split) != 2:
            raise InputError(f"expected two images that can be read, found {len(split)} of {paths[0]} and {paths[1]}")
        (both,) = split.batches(2, device=model.device)
        return _Pair(both.images[:1], both.images[1:], (paths[0].name, paths[1].name))
    batch = _first_images(ablation)
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


def _patching_row(ablation: AblationRun, patched: Patching, pair: _Pair) -> PatchingRow:
    layout, classes = ablation.model.anatomy.layout, ablation.model.classes
    return PatchingRow(
        clean=pair.names[0],
        corrupted=pair.names[1],
        target=classes[int(patched.targets[0])],
        other=classes[int(patched.others[0])],
        difference_clean=float(patched.clean[0]),
        difference_corrupted=float(patched.corrupted[0]),
        grid=None if layout is None else (layout.grid[0], layout.grid[1]),
        prefix=None if layout is None else tuple(layout.prefix),
        note=patched.note,
        corruption=pair.corruption,
    )


def _first_images(ablation: AblationRun) -> LabelledBatch:
    first = torch.arange(len(ablation.split))[:_IMAGES]
    (batch,) = ablation.split.pick(first).batches(len(first), device=ablation.model.device)
    return LabelledBatch(batch.images, ablation.labels[first], 0)


def _write_lens(folder: RunFolder, ablation: AblationRun) -> None:
    batch, classes = _first_images(ablation), ablation.model.classes
    lens = logits_by_depth(ablation.model, batch.images).float().cpu()  # (batch, depths, classes)
    right, n = accuracy_by_depth(lens, batch.labels), len(batch.labels)
    intervals = [wilson(round(share * n), n) for share in right.tolist()]
    folder.write(
        LENS,
        [
            LensRow(depth, share, interval.low, interval.high, n)
            for depth, (share, interval) in enumerate(zip(right.tolist(), intervals))
        ],
    )
    top = lens[0, -1].topk(min(_CLASSES, lens.shape[-1])).indices
    probability = lens[0].softmax(-1)[:, top].numpy()
    folder.save(LENS_ARRAYS, LensArrays(probability=probability, accuracy=right.numpy()))
    folder.write(LENS_CLASSES, [LensClassRow(classes[index]) for index in top.tolist()])


def _write_contributions(folder: RunFolder, ablation: AblationRun) -> None:
    batch = _first_images(ablation)
    parts = contributions(ablation.model, batch.images, targets=batch.labels)
    gap = (parts.total() - parts.logit).abs().max()
    rest = (parts.embedding + parts.bias + parts.rest).mean()
    arrays = ContributionArrays(
        heads=parts.heads.mean(0).numpy(), mlps=parts.mlps.mean(0).numpy(), rest=np.asarray(rest.numpy())
    )
    folder.save(CONTRIBUTION_ARRAYS, arrays)
    row = ContributionRow(
        images=len(batch.labels), logit=float(parts.logit.mean()), largest_gap=float(gap), rest=float(rest)
    )
    folder.write(CONTRIBUTIONS, [row])
