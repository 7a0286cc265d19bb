"""Localisation without masks: composites of the given images, explained by every method."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.answers.classes import label_columns
from vitlens.analysis.answers.evaluate import accuracy, fitting_batch_size
from vitlens.analysis.answers.paired import estimates, intervals
from vitlens.analysis.faithfulness.cascade import ENOUGH
from vitlens.analysis.faithfulness.composite_kinds import COMPOSITE_KINDS, FEWEST, CompositeKind, composite_kind
from vitlens.analysis.faithfulness.composites import COMPOSITE_SCORES, Composites, confident_images, recognised
from vitlens.analysis.faithfulness.league import BASELINES, random_maps
from vitlens.analysis.faithfulness.localisation import centre_maps, pointing_rate
from vitlens.analysis.faithfulness.masking import resized
from vitlens.analysis.faithfulness.resampled import removal_grid
from vitlens.commands.explain.evidence_record import (
    COMPOSITE,
    COMPOSITE_MAPS,
    COMPOSITE_SETS,
    COMPOSITES,
    RECOGNISED,
    CompositeArrays,
    CompositeRow,
    CompositeSetRow,
)
from vitlens.commands.explain.measure.evidence import EvidenceRows
from vitlens.commands.explain.measure.subject import Subject
from vitlens.commands.explain.options import AUTO, NONE
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import Advance, progress
from vitlens.devices import evaluating
from vitlens.errors import DataError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Maps, Masks
from vitlens.uncertainty import Estimate, Side, beyond, widened

_DRAWN: Final = 4  # maps of each kind that are drawn


def composite_names(chosen: Sequence[str], *, has_masks: bool) -> tuple[str, ...]:
    """The kinds of `--composites`: "auto" is the default kinds where masks are not known."""
    names = [name for name in chosen if name not in (AUTO, NONE)]
    if AUTO in chosen and not has_masks:
        names += [kind.name for kind in COMPOSITE_KINDS.values() if kind.default]
    return tuple(name for name in COMPOSITE_KINDS if name in names)


def composite_rows(
    folder: RunFolder, checked: Subject, *, kinds: Sequence[str], count: int, options: RunOptions
) -> EvidenceRows:
    """Make the composites of each kind, explain them by every method, and write the metrics; returns the rows."""
    rows: EvidenceRows = {COMPOSITE_SETS: [], COMPOSITES: []}
    if not kinds:
        return rows
    labels, words = _labels(checked)
    images = resized(checked.model, checked.images)
    usable = confident_images(_logits(checked.model, images), labels).cpu()
    classes = len(set(labels[usable].tolist()))
    masks = None if checked.masks is None else _in_size(checked.masks, images)
    total = len(kinds) * len(checked.functions)
    with progress("Explaining composites", total, unit="methods", quiet=options.quiet) as advance:
        for name in kinds:
            kind, seed = composite_kind(name), checked.settings.seed
            refused = _refusal(kind, len(usable), classes, masks)
            made = None
            if not refused:
                own = None if masks is None else masks[usable]
                made = kind.make(images[usable], labels[usable], own, count=count, seed=seed, **kind.arguments)
            rows[COMPOSITE_SETS].append(_set_row(folder, checked, kind, made, refused, words, len(usable), classes))
            if made is not None:
                maps = dict(_maps(checked, made, advance))
                rows[COMPOSITES].extend(_method_rows(folder, checked, kind, made, maps))
                _save(folder, checked, kind, made, maps)
    return rows


def _labels(checked: Subject) -> tuple[Labels, str]:
    """The class of each image as a column of the logits, and whether it is a label or a prediction."""
    if checked.split.labels is not None:
        try:
            return label_columns(checked.model.classes, checked.split).cpu(), "labels"
        except DataError:
            pass  # the labels are not the model's classes, and its predictions are explained instead
    return _logits(checked.model, checked.images).argmax(-1).cpu(), "predictions"


def _logits(model: Model, images: Images) -> Logits:
    with evaluating(model), torch.no_grad():
        return torch.cat([model(part).float().cpu() for part in images.split(fitting_batch_size(model))])


def _in_size(masks: Masks, images: Images) -> Masks:
    if masks.shape[-2:] == images.shape[-2:]:
        return masks
    return F.interpolate(masks[:, None].float(), size=images.shape[-2:], mode="nearest-exact")[:, 0] > 0.5


def _refusal(kind: CompositeKind, usable: int, classes: int, masks: Masks | None) -> str:
    """Why there are no composites of a kind, in a line; empty where there are."""
    if kind.needs_masks and masks is None:
        return "the objects' masks are not known"
    least = max(FEWEST, kind.classes)
    if classes < least:
        return (
            f"expected confidently and correctly classified images of at least {least} distinct classes, found "
            f"{usable} of {classes}"
        )
    return ""


def _set_row(
    folder: RunFolder,
    checked: Subject,
    kind: CompositeKind,
    made: Composites | None,
    refused: str,
    words: str,
    usable: int,
    classes: int,
) -> CompositeSetRow:
    alias, seed = checked.model.alias, checked.settings.seed
    guessed = min(1.0, kind.classes / len(checked.model.classes))
    share = None if made is None else _recognised(checked.model, made, kind, seed)
    if share is not None:
        folder.metric(RECOGNISED(model=alias, kind=kind.name), share)
    return CompositeSetRow(
        model=alias,
        kind=kind.name,
        refused=refused,
        labels=words,
        usable=usable,
        classes=classes,
        composites=0 if made is None else len(made.images),
        maps=0 if made is None else len(made),
        chance=None if made is None else round(made.chance, 6),
        recognised=None if share is None else round(share.value, 4),
        guessed=round(guessed, 6),
        seen=share is not None and beyond(share, guessed) is Side.ABOVE,
        seed=seed,
    )


def _recognised(model: Model, made: Composites, kind: CompositeKind, seed: int) -> Estimate:
    """How often an explained class is among the most probable ones of its composite, as many as it has classes."""
    named = recognised(_logits(model, made.images)[made.which], made.targets, kind.classes).float()
    return accuracy(named > 0.5, groups=made.which, seed=seed)


def _maps(checked: Subject, made: Composites, advance: Advance) -> Iterator[tuple[str, Maps]]:
    """The maps of every method and baseline; values that are not finite count as 0."""
    targets = made.targets.to(checked.model.device)
    images = made.images[made.which.to(made.images.device)]
    for name, explain in checked.functions.items():
        with evaluating(checked.model):
            yield name, explain(checked.model, images, targets).cpu().float().nan_to_num(0.0, 0.0, 0.0)
        advance(1)
    grid = removal_grid(checked.model)
    yield BASELINES[0], random_maps(len(made), grid, seed=checked.settings.seed)
    yield BASELINES[1], centre_maps(len(made), grid)


def _method_rows(
    folder: RunFolder, checked: Subject, kind: CompositeKind, made: Composites, maps: Mapping[str, Maps]
) -> Iterator[CompositeRow]:
    """The scores of every method with their intervals, the greatest mass first."""
    alias, seed = checked.model.alias, checked.settings.seed
    scores = {name: torch.stack([score(own, made.masks) for own in maps.values()]) for name, score in _SCORES}
    means = {name: estimates(values, groups=made.which, seed=seed) for name, values in scores.items()}
    means["pointing"] = [pointing_rate(hits, groups=made.which, seed=seed) for hits in scores["pointing"]]
    mass = dict(zip(maps, scores["mass"].double()))
    rows = []
    for place, method in enumerate(maps):
        for score, every in means.items():
            folder.metric(COMPOSITE(model=alias, kind=kind.name, score=score, method=method), every[place])
        own = {score: round(every[place].value, 6) for score, every in means.items()}
        rest = [base for base in BASELINES if base != method]
        above = tuple(base for base in rest if _exceeds(mass[method] - mass[base], made.which, len(checked.functions)))
        rows.append(CompositeRow(alias, kind.name, method, method in BASELINES, **own, above=above))
    yield from sorted(rows, key=lambda row: -row.mass)


_SCORES: Final = tuple(COMPOSITE_SCORES.items())


def _exceeds(difference: Tensor, groups: Tensor, looks: int) -> bool:
    """Whether a paired difference is above 0 at the interval that so many looks require."""
    if len(groups.unique()) < ENOUGH:
        return False
    low, high = intervals(difference[None], groups=groups)
    estimate = Estimate(float(difference.mean()), float(low[0]), float(high[0]), len(difference))
    return beyond(widened(estimate, looks), 0.0) is Side.ABOVE


def _save(folder: RunFolder, checked: Subject, kind: CompositeKind, made: Composites, maps: Mapping[str, Maps]) -> None:
    """Write the first composites with the maps of every method."""
    shown = slice(0, min(_DRAWN, len(made)))
    pixels = (made.images[made.which[shown]].cpu() * 255).round().to(torch.uint8)
    own = {name: values for name, values in maps.items() if name not in BASELINES}
    arrays = CompositeArrays(
        images=pixels.numpy(),
        masks=made.masks[shown].numpy(),
        maps={place: values[shown].numpy() for place, values in enumerate(own.values())},
        methods=np.array(list(own)),
        targets=np.array([checked.model.classes[int(target)] for target in made.targets[shown]]),
    )
    folder.save(COMPOSITE_MAPS, arrays, kind=kind.name, model=checked.model.alias)
