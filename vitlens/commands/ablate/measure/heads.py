"""What single heads do: their labels, what replacing them by a mean hides, and which class needs them."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from vitlens.analysis.ablation.importance import Importance, mean_changes
from vitlens.analysis.heads.specialisation import specialise
from vitlens.analysis.heads.statistics import Stream
from vitlens.commands.ablate.judgement import of_judgement, smallest_effect
from vitlens.commands.ablate.measure.effects import UnitEffects, unit_rows
from vitlens.commands.ablate.measure.work import AblationRun, finite
from vitlens.commands.ablate.record import BROKEN_CLASSES, HEAD_LABELS, HIDDEN, NO_EFFECT
from vitlens.commands.ablate.record.head_rows import BrokenClassRow, HeadLabelRow, ReplacementDifferenceRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.errors import UnsupportedError
from vitlens.names import Replacement
from vitlens.uncertainty import Estimate, wilson

LABEL_IMAGES: Final = 64  # on which heads are labelled, at most
_HEADS: Final = 5  # whose most affected class is written
_OF_A_CLASS: Final = 10  # images from which on a class is compared


def write_heads(folder: RunFolder, ablation: AblationRun, measured: Mapping[Replacement, UnitEffects]) -> None:
    """Write labels, what the mean hides, affected classes, and the share of heads without an effect; no rows with
    --top."""
    main = measured.get(ablation.replacement)
    folder.write(HEAD_LABELS, list(_labels(ablation)) if main is not None and ablation.heads else [])
    folder.write(HIDDEN, list(hidden_by_mean(ablation, measured)))
    folder.write(BROKEN_CLASSES, [] if main is None else list(_broken_classes(ablation, main.importance)))
    if main is None or not ablation.heads or len(ablation.split) < 2:
        return
    smallest = smallest_effect(Estimate(main.importance.clean_loss, unit="nats"))
    heads = [row for row in unit_rows(ablation.replacement, main.importance) if row.kind == "head"]
    without = len(of_judgement(heads, smallest, "no effect"))
    folder.metric(NO_EFFECT(model=ablation.model.alias), wilson(without, len(heads)))


def _labels(ablation: AblationRun) -> Iterator[HeadLabelRow]:
    """One row for each head whose attention has a place in the image; the first process measures them alone."""
    split = ablation.split.pick(torch.arange(min(LABEL_IMAGES, len(ablation.split))))
    stream = Stream(ablation.model, groups=split.groups)
    try:
        for batch in split.batches(ablation.batch_size, device=ablation.model.device):
            masks = None if split.masks is None else split.masks[batch.indices]
            stream.add(batch.images, masks=masks)
    except UnsupportedError:  # attention between channels, or heads of several shapes in one layer: no labels
        return
    for layer, heads in enumerate(specialise(stream.result()).given):
        for head, given in enumerate(heads):
            yield HeadLabelRow(
                layer,
                head,
                given.label,
                given.score,
                finite(given.low),
                finite(given.high),
                given.best,
                given.other or None,
                finite(given.other_score),
                len(split),
            )


def hidden_by_mean(
    ablation: AblationRun, measured: Mapping[Replacement, UnitEffects]
) -> Iterator[ReplacementDifferenceRow]:
    """The rise of the loss under resampling minus that under mean ablation, where both were measured."""
    if not {"mean", "resample"} <= measured.keys():
        return
    one, two = measured["resample"].effects, measured["mean"].effects
    heads = [index for index, unit in enumerate(one.units) if unit.kind == "head"]
    if not heads:
        return
    apart = (one.delta_loss - two.delta_loss)[heads]
    groups, seed = ablation.groups(), ablation.run.seed
    (change,) = mean_changes((apart,), families=["head"] * len(heads), groups=groups, seed=seed)
    for row, index in enumerate(heads):
        yield ReplacementDifferenceRow(
            one.units[index].name,
            "resample",
            "mean",
            float(change.mean[row]),
            finite(change.low[row]),
            finite(change.high[row]),
            finite(change.p_holm[row]),
            len(ablation.split),
        )


def _broken_classes(ablation: AblationRun, importance: Importance) -> Iterator[BrokenClassRow]:
    """For each of the most important heads the class whose loss rises most, among classes of enough images."""
    by_class = importance.by_class
    if by_class is None or not importance.is_ranked("head"):
        return
    known = (by_class.images >= _OF_A_CLASS).nonzero().flatten()
    if len(known) < 2:
        return
    for unit in importance.ranking("head")[:_HEADS]:
        index = importance.units.index(unit)
        worst = int(known[by_class.loss[index, known].argmax()])
        yield BrokenClassRow(
            unit.name,
            ablation.model.classes[worst],
            int(by_class.images[worst]),
            len(known),
            float(by_class.loss[index, worst]),
            float(by_class.accuracy[index, worst]),
        )
