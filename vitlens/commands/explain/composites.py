"""Localisation without masks: composites of the images, explained by every method."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy, fitting_batch_size
from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.checks import ENOUGH
from vitlens.analysis.faithfulness.defaults import BASELINES, COMPOSITE_KINDS, FEWEST, CompositeKind
from vitlens.analysis.faithfulness.league import compute_maps
from vitlens.analysis.faithfulness.localisation import (
    COMPOSITE_SCORES,
    Composites,
    confident_images,
    is_recognised,
    pointing_rate,
)
from vitlens.analysis.faithfulness.removal import resize_to_model
from vitlens.classes import label_columns
from vitlens.commands.explain.options import AUTO, ExplainOptions
from vitlens.commands.explain.record import CompositeArrays, CompositeRow, CompositeSetRow
from vitlens.commands.run.progress import Advance, progress
from vitlens.commands.shared.maps.measure import CheckedMaps
from vitlens.data.split import Split
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Maps, Masks
from vitlens.uncertainty import Estimate, Side, beyond, widened

_DRAWN: Final = 4  # maps of each kind of composites that are drawn


@dataclass(frozen=True)
class Sources:
    """The images of which composites are made.

    labels: their classes, of `origin` ("labels" or "predictions").
    masks: the masks of their objects, or None.
    usable: the indices of confidently classified images.
    """

    images: Images
    labels: Labels
    origin: str
    masks: Masks | None
    usable: Tensor

    @property
    def classes(self) -> int:
        """Return the number of distinct classes of usable images."""
        return len(set(self.labels[self.usable].tolist()))

    def composites(self, kind: CompositeKind, options: ExplainOptions) -> Composites:
        """Return composites of one kind."""
        masks = self.masks
        if masks is not None:
            masks = masks[self.usable]
        composites: Composites = kind.make(
            self.images[self.usable],
            self.labels[self.usable],
            masks,
            count=options.composite_count,
            seed=options.run.seed,
        )
        return composites

    def refusal(self, kind: CompositeKind) -> str:
        """Return why there can be no composites of one kind, in a line; "" if there can."""
        if kind.needs_masks and self.masks is None:
            return "the objects' masks are not known"
        least = max(FEWEST, kind.classes)
        if self.classes >= least:
            return ""
        return (
            f"expected confidently and correctly classified images of at least {least} distinct "
            f"classes, found {len(self.usable)} of {self.classes}"
        )


def composite_names(chosen: tuple[str, ...], *, adds_defaults: bool) -> tuple[str, ...]:
    """Return the kinds of --composites.

    adds_defaults: True if "auto" stands for the default kinds, False if it stands for none.
    """
    names = set(chosen)
    if AUTO in chosen and adds_defaults:
        names |= {kind.name for kind in COMPOSITE_KINDS.values() if kind.default}
    return tuple(name for name in COMPOSITE_KINDS if name in names)


def composite_tables(
    checked: CheckedMaps, split: Split, masks: Masks | None, options: ExplainOptions
) -> dict[str, object]:
    """Return the tables and arrays of all kinds of composites; nothing without a kind."""
    by_phrase = bool(options.model_options.text)
    # "auto" adds kinds if masks are missing, but no composites explain a phrase
    adds_defaults = masks is None and not by_phrase
    names = composite_names(options.composites, adds_defaults=adds_defaults)
    if not names or not checked.functions:  # fixed maps cannot be computed for composites
        return {}
    alias = checked.model.alias
    sources = _sources(checked, split, masks)
    sets = []
    rows: list[CompositeRow] = []
    arrays = {}
    total = len(names) * len(checked.functions)
    with progress("Explaining composites", total, unit="methods", quiet=checked.quiet) as advance:
        for name in names:
            kind = COMPOSITE_KINDS[name]
            row = _set_row(checked.model, kind, sources)
            if by_phrase:
                row = replace(row, refused="they explain the class of an image, not a phrase")
            if not row.refused:
                composites = sources.composites(kind, options)
                row = _with_composites(row, checked.model, kind, composites)
                maps = _explain(checked, composites, advance)
                rows += _method_rows(checked, name, composites, maps)
                arrays[f"{name}-{alias}"] = _arrays(checked, composites, maps)
            sets.append(row)
    return {"composite_sets": tuple(sets), "composites": tuple(rows), "composite_maps": arrays}


def _sources(checked: CheckedMaps, split: Split, masks: Masks | None) -> Sources:
    """Return the images of which composites are made, at the input size of the model."""
    labels, origin = _labels(checked, split)
    images = resize_to_model(checked.model, checked.images)
    size = images.shape[-2:]
    if masks is not None and masks.shape[-2:] != size:
        enlarged = F.interpolate(masks[:, None].float(), size=size, mode="nearest-exact")
        masks = enlarged[:, 0] > 0.5
    usable = confident_images(_logits(checked.model, images), labels).cpu()
    return Sources(images=images, labels=labels, origin=origin, masks=masks, usable=usable)


def _labels(checked: CheckedMaps, split: Split) -> tuple[Labels, str]:
    """Return the class of each image as a column of the logits, and its origin: labels or
    predictions.
    """
    if split.labels is not None:
        try:
            return label_columns(checked.model.classes, split).cpu(), "labels"
        except InputError:
            pass  # the labels are not classes of the model, so its predictions are explained
    predictions = _logits(checked.model, checked.images).argmax(-1)
    return predictions.cpu(), "predictions"


def _logits(model: Model, images: Images) -> Logits:
    parts = []
    with evaluating(model), torch.no_grad():
        for part in images.split(fitting_batch_size(model)):
            parts.append(model(part).float().cpu())
    return torch.cat(parts)


def _set_row(model: Model, kind: CompositeKind, sources: Sources) -> CompositeSetRow:
    """Return the row of one kind before composites are made."""
    return CompositeSetRow(
        model=model.alias,
        kind=kind.name,
        refused=sources.refusal(kind),
        labels=sources.origin,
        usable=len(sources.usable),
        classes=sources.classes,
        composites=0,
        maps=0,
        guessed=round(_chance_level(model, kind), 6),
    )


def _chance_level(model: Model, kind: CompositeKind) -> float:
    """Return the probability that a class is among as many random classes as a composite has."""
    return min(1.0, kind.classes / len(model.classes))


def _with_composites(
    row: CompositeSetRow, model: Model, kind: CompositeKind, composites: Composites
) -> CompositeSetRow:
    """Return the row of one kind with the share of target classes that the model recognises.

    A class is recognised if it is among the most probable classes of its composite, as many as the
    composite has.
    """
    logits_of_composites = _logits(model, composites.images)
    logits = logits_of_composites[composites.which]  # (maps, classes)
    hits = is_recognised(logits, composites.targets, kind.classes)
    share = accuracy(hits, groups=composites.which)
    return replace(
        row,
        composites=len(composites.images),
        maps=len(composites),
        chance=round(composites.chance, 6),
        recognised=share,
        seen=beyond(share, _chance_level(model, kind)) is Side.ABOVE,
    )


def _explain(checked: CheckedMaps, composites: Composites, advance: Advance) -> dict[str, Maps]:
    """Return the maps of every method and baseline."""
    composite_of_map = composites.which.to(composites.images.device)
    return compute_maps(
        checked.model,
        checked.functions,
        composites.images[composite_of_map],
        composites.targets,
        seed=checked.settings.seed,
        advance=advance,
    )


def _method_rows(
    checked: CheckedMaps, kind: str, composites: Composites, maps: Mapping[str, Maps]
) -> list[CompositeRow]:
    """Return the scores of every method with their intervals, the largest mass first."""
    seed = checked.settings.seed
    groups = composites.which  # maps of the same composite are not independent
    scores = {}  # by score, (methods, maps)
    means: dict[str, list[Estimate]] = {}  # by score, for each method
    for score, function in COMPOSITE_SCORES.items():
        values = torch.stack(
            [function(method_maps, composites.masks) for method_maps in maps.values()]
        )
        scores[score] = values
        if score == "pointing":  # values are hits, of which the mean is a rate
            means[score] = [pointing_rate(hits, groups=groups, seed=seed) for hits in values]
        else:
            means[score] = estimates(values, groups=groups, seed=seed, least=0.0, most=1.0)
    above = _exceeded_baselines(checked, list(maps), scores["mass"], groups)
    rows = []
    for index, name in enumerate(maps):
        row = CompositeRow(
            model=checked.model.alias,
            kind=kind,
            method=name,
            baseline=name in BASELINES,
            mass=means["mass"][index],
            pointing=means["pointing"][index],
            roc_auc=means["roc_auc"][index],
            above=tuple(above[name]),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.mass.value)


def _exceeded_baselines(
    checked: CheckedMaps, names: list[str], mass: Tensor, groups: Tensor
) -> dict[str, list[str]]:
    """Return the baselines that the mass of each method exceeds, by method.

    Differences are paired. Their intervals are corrected for the number of methods, without the
    baselines.

    names: the methods and baselines. mass: (methods and baselines, maps).
    """
    above: dict[str, list[str]] = {name: [] for name in names}
    if len(groups.unique()) < ENOUGH:
        return above
    mass = mass.double()
    for baseline in BASELINES:
        differences = mass - mass[names.index(baseline)]
        gains = estimates(
            differences, groups=groups, seed=checked.settings.seed, least=-1.0, most=1.0
        )
        for name, gain in zip(names, gains):
            if beyond(widened(gain, len(checked.functions)), 0.0) is Side.ABOVE:
                above[name].append(baseline)
    return above


def _arrays(
    checked: CheckedMaps, composites: Composites, maps: Mapping[str, Maps]
) -> CompositeArrays:
    """Return the first composites with the maps of every method."""
    drawn = min(_DRAWN, len(composites))
    methods = [name for name in maps if name not in BASELINES]
    images = composites.images[composites.which[:drawn]].cpu() * 255
    targets = [checked.model.classes[int(target)] for target in composites.targets[:drawn]]
    return CompositeArrays(
        images=images.round().to(torch.uint8).numpy(),
        masks=composites.masks[:drawn].numpy(),
        maps={index: maps[name][:drawn].numpy() for index, name in enumerate(methods)},
        methods=np.array(methods),
        targets=np.array(targets),
    )
