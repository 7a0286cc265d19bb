"""`vitlens.reliance`: the cues that models rely on, by interventions with matched controls."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import require_labels
from vitlens.analysis.reliance.cues import CUES, interventions_of
from vitlens.analysis.reliance.measure import Plan, Viewer, measure_reliance
from vitlens.analysis.reliance.rows import (
    LeftOutCueRow,
    ReliancePairRow,
    RelianceRow,
    rank_interventions,
    rank_pairs,
)
from vitlens.classes import reading
from vitlens.data.catalogue import read_split
from vitlens.data.split import Split
from vitlens.errors import InputError, UnknownNameError
from vitlens.inputs import with_labels
from vitlens.models.model import Model, require_model
from vitlens.pixels import AnyImages
from vitlens.shapes import Labels, Masks
from vitlens.summary import Line, Table
from vitlens.uncertainty import Estimate


@dataclass(frozen=True, repr=False)
class Reliance(Table):
    """The cues that models rely on.

    models: the aliases of the models.
    rows: the effect of each intervention on each model.
    pairs: the differences between two models for each intervention.
    left_out: the cues that could not be tested, with the reason.
    """

    models: tuple[str, ...]
    rows: tuple[RelianceRow, ...]
    pairs: tuple[ReliancePairRow, ...]
    left_out: tuple[LeftOutCueRow, ...]

    def relied_on(self, model: str | None = None) -> tuple[str, ...]:
        """Return the cues that a model relies on, the largest effect first.

        model: the alias of the model (None: the first model).
        """
        return tuple(row.cue for row in rank_interventions(self.rows, model or self.models[0]))

    @property
    def differences(self) -> tuple[tuple[str, str], ...]:
        """Return the model that relies more on a cue, and the cue, the largest difference first."""
        return tuple((row.more, row.cue) for row in rank_pairs(self.pairs))

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each model and intervention; an estimate has value, low and high."""
        for row in self.rows:
            record: dict[str, object] = {}
            for name, value in asdict(row).items():
                if isinstance(value, dict):  # asdict makes a dictionary of an estimate
                    estimate = Estimate(**value)
                    record[name] = estimate.value
                    record[f"{name}_low"] = estimate.low
                    record[f"{name}_high"] = estimate.high
                else:
                    record[name] = value
            record["matched"] = row.is_matched
            record["relied_on"] = row.is_relied_on
            yield record

    def summary(self) -> Iterator[Line]:
        """Yield the cues that each model relies on, every effect, and the cues not tested."""
        for model in self.models:
            cues = ", ".join(self.relied_on(model))
            yield Line(f"{model} relies on", cues or "nothing that was tested")
        for more, cue in self.differences:
            yield Line(f"{more} relies more on", cue)
        for row in self.rows:
            note = "points" if row.is_matched else "points, unmatched"
            yield Line(f"{row.model}: {row.cue_and_change}", row.changed, note)
        for gap in self.left_out:
            yield Line(f"not tested: {gap.title}", gap.reason)


def reliance(
    models: Model | list[Model] | tuple[Model, ...],
    images: AnyImages,
    labels: Labels | None = None,
    *,
    masks: Masks | None = None,
    groups: Tensor | None = None,
    cues: Sequence[str] | None = None,
    thorough: bool = True,
    batch_size: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> Reliance:
    """Measure what models rely on: colour, background, fine detail, layout, and more.

    Each cue is changed in all images. A control changes the pixels as much and keeps the cue. The
    predictions that change are compared between both, image by image. A model relies on a cue if
    the control is matched, the difference survives Holm's correction, and it is at least 5 points.

    models: one model, or several on the same images.
    images: a Split, or any form that `vitlens.images` takes.
    labels: class indices of the first model (n,) (None: those of the Split or the class folders).
    masks: (n, height, width), True on the object (None: those of the Split). Without masks, cues of
        objects and backgrounds are left out.
    groups: the group of each image (n,), if images share a source (None: those of the Split).
    cues: keys of `vitlens.analysis.reliance.cues.CUES` (None: all).
    thorough: False to measure only the main intervention of the most important cues.
    batch_size: the number of images at a time (None: chosen to fit into memory).
    precision: the precision of passes.
    seed: the seed of random numbers.
    advance: called with the number of finished passes over an image.

    Raises DataError without labels. Raises InputError if a model does not know the data's classes,
    and UnknownNameError for an unknown cue.

    >>> import vitlens
    >>> digits = vitlens.load_data("digits", limit=40)
    >>> result = vitlens.reliance(vitlens.load("cnn-digits"), digits, cues=["brightness"])
    >>> [row.n for row in result.rows]
    [40]
    """
    several = list(models) if isinstance(models, list | tuple) else [models]
    if not several:
        raise InputError(
            "expected at least one model, found none; give vitlens.reliance(model, images, labels)"
        )
    for model in several:
        require_model(model, images)
        model.require_classifier()
    _require_distinct(several)
    names = list(CUES) if cues is None else list(cues)
    for name in names:
        if name not in CUES:
            raise UnknownNameError("cue", str(name), CUES)
    viewers = list[Viewer]()
    mask_problems = list[str]()  # of models whose images the masks do not fit
    for model in several:
        split = with_labels(read_split(images, model.preprocessing), labels, several[0])
        split, mask_problem = _replace_masks_and_groups(split, masks, groups)
        if mask_problem:
            mask_problems.append(mask_problem)
        truth = require_labels(split).cpu().long()
        reading(model.classes, split.classes)  # raises if the model does not know the classes
        viewers.append(Viewer(model, split, truth, precision))
    left_out = list[LeftOutCueRow]()
    if mask_problems:
        left_out = [LeftOutCueRow(name, mask_problems[0]) for name in names if _needs_masks(name)]
        names = [name for name in names if not _needs_masks(name)]
        # models are compared on the same changes, so none keeps its masks
        viewers = [replace(viewer, split=replace(viewer.split, masks=None)) for viewer in viewers]
    has_masks = viewers[0].split.masks is not None
    plan = Plan(tuple(interventions_of(names, has_masks=has_masks, thorough=thorough)))
    measured = measure_reliance(viewers, plan, batch_size=batch_size, seed=seed, advance=advance)
    aliases = tuple(model.alias for model in several)
    return Reliance(aliases, measured.rows, measured.pairs, (*left_out, *measured.left_out))


def _needs_masks(name: str) -> bool:
    """Return True if no intervention on a cue is possible without masks."""
    return not any(intervention.suits(has_masks=False) for intervention in CUES[name].interventions)


def _replace_masks_and_groups(
    split: Split, masks: Masks | None, groups: Tensor | None
) -> tuple[Split, str]:
    """Return the images with these masks and groups, and the reason if the masks do not fit.

    The reason is "" if they fit. Raises InputError for groups that do not fit.
    """
    if groups is not None:
        groups = torch.as_tensor(groups)
        if groups.shape != (len(split),):
            raise InputError(
                f"expected groups of shape ({len(split)},), found {tuple(groups.shape)}"
            )
        split = replace(split, groups=groups)
    if masks is None:
        return split, ""
    masks = torch.as_tensor(masks).cpu()
    expected = (len(split), *split.size)
    if masks.shape == expected and masks.dtype == torch.bool:
        return replace(split, masks=masks), ""
    mask_problem = (
        f"expected masks of shape {expected} of torch.bool, found {tuple(masks.shape)} of "
        f"{masks.dtype}"
    )
    return replace(split, masks=None), mask_problem


def _require_distinct(models: Sequence[Model]) -> None:
    """Raise InputError if two models have the same alias, which would confuse the rows."""
    aliases = [model.alias for model in models]
    if len(set(aliases)) < len(aliases):
        raise InputError(f"expected models with different aliases, found {', '.join(aliases)}")
