"""Activation patching, direct logit contributions and the logit lens, on images of the data or the user's own."""

from typing import Any

import torch
from torch import Tensor

from vitlens.analysis.patching.contribution import accuracy_by_depth, contributions, logit_lens
from vitlens.analysis.patching.patching import Patching, patch
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.data.catalogue import load_images
from vitlens.errors import InputError, UnsupportedError
from vitlens.runs.ablate_keep import number
from vitlens.runs.ablate_work import Work
from vitlens.uncertainty import wilson

LENSED = 64  # images of the logit lens and of the contributions, at most
SHOWN = 5  # classes in the logit lens
_CANDIDATES = 64  # images among which a pair is looked for


def keep_inside(folder: RunFolder, work: Work) -> None:
    """Write what a clean run brings back in another one, and what heads write straight into the logits.

    A family for which one of these is not defined gets a note that says so in its place.
    """
    notes: list[str] = []
    for step in (_keep_patching, _keep_lens, _keep_contributions):
        try:
            step(folder, work)
        except UnsupportedError as error:
            notes.append(str(error))
        except InputError as error:
            if work.choices.clean is not None:
                raise
            notes.append(str(error))
    folder.table("inside_notes", [{"note": note} for note in dict.fromkeys(notes)])


def _pair(work: Work) -> tuple[Tensor, Tensor, tuple[str, str]]:
    """A clean and a corrupted image (1, 3, height, width): the user's, or the two surest right ones of two classes."""
    if work.choices.clean is not None and work.choices.corrupted is not None:
        paths = [work.choices.clean, work.choices.corrupted]
        split = load_images(paths, preprocessing=work.model.preprocessing)
        if len(split) != 2:
            raise InputError(f"expected two images that can be read, found {len(split)} of {paths[0]} and {paths[1]}")
        (batch,) = split.batches(2, device=work.model.device)
        return batch.images[:1], batch.images[1:], (paths[0].name, paths[1].name)
    some = torch.arange(len(work.split))[:_CANDIDATES]
    (batch,) = work.split.pick(some).batches(len(some), device=work.model.device)
    with torch.no_grad():
        sure, predicted = work.model(batch.images).float().softmax(-1).max(-1)
    labels = work.labels[some].to(predicted.device)
    right = ((predicted == labels).nonzero().flatten()).tolist()
    order = sorted(right, key=lambda index: -float(sure[index]))
    other = next((index for index in order[1:] if labels[index] != labels[order[0]]), None) if order else None
    if other is None:
        raise InputError("expected two images of different classes that the model has right, found none; give --clean")
    chosen = [order[0], other]
    names = [work.model.classes[int(labels[index])] for index in chosen]
    return batch.images[chosen[:1]], batch.images[chosen[1:]], (names[0], names[1])


def _keep_patching(folder: RunFolder, work: Work) -> None:
    clean, corrupted, names = _pair(work)
    found = patch(work.model, clean, corrupted)
    arrays: dict[str, Any] = {
        "clean": clean[0].cpu().numpy(), "corrupted": corrupted[0].cpu().numpy(),
        "heads": found.restored("heads").numpy(), "blocks": found.restored("blocks").numpy(),
        "mlps": found.restored("mlps").numpy(), "positions": found.restored("positions").numpy(),
    }  # fmt: skip
    folder.arrays("patching", **arrays)
    folder.table("patching", [_patching_row(work, found, names)])


def _patching_row(work: Work, found: Patching, names: tuple[str, str]) -> dict[str, object]:
    layout = work.model.anatomy.layout
    return {
        "clean": names[0],
        "corrupted": names[1],
        "target": work.model.classes[int(found.targets[0])],
        "other": work.model.classes[int(found.others[0])],
        "difference_clean": number(found.clean[0]),
        "difference_corrupted": number(found.corrupted[0]),
        "grid": None if layout is None else list(layout.grid),
        "prefix": None if layout is None else list(layout.prefix),
        "note": found.note,
    }


def _some(work: Work) -> tuple[Tensor, Tensor]:
    some = torch.arange(len(work.split))[:LENSED]
    (batch,) = work.split.pick(some).batches(len(some), device=work.model.device)
    return batch.images, work.labels[some]


def _keep_lens(folder: RunFolder, work: Work) -> None:
    images, labels = _some(work)
    lens = logit_lens(work.model, images).float().cpu()  # (batch, depths, classes)
    right = accuracy_by_depth(lens, labels)
    rows = []
    for depth, share in enumerate(right.tolist()):
        estimate = wilson(round(share * len(labels)), len(labels))
        rows.append({"depth": depth, "accuracy": share, "low": estimate.low, "high": estimate.high, "n": len(labels)})
    folder.table("lens", rows)
    top = lens[0, -1].topk(min(SHOWN, lens.shape[-1])).indices
    folder.arrays("lens", probability=lens[0].softmax(-1)[:, top].numpy(), accuracy=right.numpy())
    folder.table("lens_classes", [{"class": work.model.classes[int(index)]} for index in top])


def _keep_contributions(folder: RunFolder, work: Work) -> None:
    images, labels = _some(work)
    found = contributions(work.model, images, targets=labels)
    gap = (found.total() - found.logit).abs().max()
    rest = (found.embedding + found.bias + found.rest).mean()
    folder.arrays(
        "contributions",
        heads=found.heads.mean(0).numpy(),
        mlps=found.mlps.mean(0).numpy(),
        rest=rest.numpy(),
    )
    row = {"images": len(labels), "logit": number(found.logit.mean()), "largest_gap": number(gap), "rest": number(rest)}
    folder.table("contributions", [row])
