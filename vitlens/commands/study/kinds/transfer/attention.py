"""How training changed the attention of every head: how far it moved, and which of its statistics
changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.weights import Moved, attention_moved
from vitlens.analysis.heads.batch import measure as measure_heads
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.commands.study.kinds.record import VariantRow
from vitlens.commands.study.kinds.setup import Setup
from vitlens.commands.study.kinds.transfer.record import HeadMovedRow, MovedRow, ShiftRow
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.uncertainty import bootstrap_mean, holm, student_test

SHOWN: Final = 64  # test images on which attention is compared
AT_ONCE: Final = 16  # images
# labels of variants
_LAST_BLOCKS: Final = "last-blocks"
_FULL: Final = "full"
# the statistics of heads whose change is tested
_SHIFTED: Final = ("distance", "normalised_entropy", "prefix_mass")

Statistics: TypeAlias = Mapping[tuple[str, int], Tensor]  # by name and layer, (images, heads)


def measure_attention(setup: Setup, variants: Mapping[str, VariantRow]) -> dict[str, Any]:
    """Return how far the attention of every head moved, and which statistics changed, as fields of
    the record.
    """
    images = setup.test.limit(SHOWN, seed=setup.run.seed)
    start = setup.model_with_new_head()
    overall = []
    heads = []
    for label in (_LAST_BLOCKS, _FULL):
        models = setup.load_all_trained(label)
        moved = _mean_over_models(attention_moved(start, models, images))
        between = None
        if len(models) > 1:
            between = _mean_over_models(attention_moved(models[0], models[1:], images))
        head_rows = list(_head_rows(variants[label], moved, between, groups_of(images)))
        heads += head_rows
        overall.append(_moved_row(variants[label], moved, head_rows, groups_of(images)))
    shifts = _shift_rows(start, setup.load_all_trained(_FULL), images)
    return {"moved": tuple(overall), "heads_moved": tuple(heads), "head_shifts": tuple(shifts)}


def _mean_over_models(by_model: Sequence[Sequence[Moved]]) -> list[Tensor]:
    """Return the mean over models: for each layer, (images, heads).

    by_model: for each model and layer, the moved attention (images, heads).
    """
    means = []
    for of_layer in zip(*by_model, strict=True):  # the same layer of every model
        means.append(torch.stack(of_layer).double().mean(0))
    return means


def groups_of(images: Split) -> NDArray[np.int64] | None:
    """Return the groups of images that are not independent (n,), or None."""
    return None if images.groups is None else images.groups.cpu().numpy()


def _head_rows(
    variant: VariantRow,
    moved: Sequence[Tensor],
    between: Sequence[Tensor] | None,
    groups: NDArray[np.int64] | None,
) -> Iterator[HeadMovedRow]:
    """Yield the moved attention of each head.

    moved: the attention that training moved: for each layer, (images, heads).
    between: the same between two seeds; None for a single seed.
    """
    for layer, values in enumerate(moved):
        for head in range(values.shape[1]):
            of_head = values[:, head].numpy()
            between_seeds = None
            if between is not None:
                between_seeds = float(between[layer][:, head].mean())
            yield HeadMovedRow(
                variant.label,
                variant.words,
                layer=layer,
                head=head,
                moved=bootstrap_mean(of_head, groups=groups, least=0.0, most=1.0),
                between=between_seeds,
            )


def _moved_row(
    variant: VariantRow,
    moved: Sequence[Tensor],
    heads: Sequence[HeadMovedRow],
    groups: NDArray[np.int64] | None,
) -> MovedRow:
    """Return the moved attention of all heads together.

    moved: for each layer, (images, heads).
    heads: the row of each head.
    """
    by_image = torch.cat(tuple(moved), 1).mean(1)  # over all heads of all layers: (images,)
    between = []
    beyond = 0
    for row in heads:
        if row.between is not None and row.moved.low is not None:
            between.append(row.between)
            if row.moved.low > row.between:
                beyond += 1
    return MovedRow(
        variant.label,
        variant.words,
        moved=bootstrap_mean(by_image.numpy(), groups=groups, least=0.0, most=1.0),
        heads=len(heads),
        between=float(np.mean(between)) if between else None,
        beyond=beyond if between else None,
    )


def _shift_rows(before: Model, after: Sequence[Model], images: Split) -> Iterator[ShiftRow]:
    """Yield the change of each statistic of each head where it is defined, paired by image and
    averaged over seeds.
    """
    statistics_before = _statistics(before, images)
    statistics_after = [_statistics(model, images) for model in after]
    groups = groups_of(images)
    for name in _SHIFTED:
        changes = _changes(name, statistics_before, statistics_after)
        corrected = holm([student_test(change, groups=groups) for change in changes.values()])
        unit = STATISTICS[name].unit
        most = 1.0 if unit == "fraction" else np.inf
        for place, p_holm in zip(changes, corrected, strict=True):
            layer, head = place
            change = changes[place]
            yield ShiftRow(
                statistic=name,
                layer=layer,
                head=head,
                before=float(statistics_before[name, layer][:, head].double().mean()),
                change=bootstrap_mean(change, groups=groups, unit=unit, least=-most, most=most),
                p_holm=p_holm,
            )


def _changes(
    name: str, before: Statistics, after: Sequence[Statistics]
) -> dict[tuple[int, int], NDArray[np.floating[Any]]]:
    """Return the change of one statistic by layer and head, (images,), mean over the models after
    training.
    """
    changes = {}
    for statistic, layer in before:
        if statistic != name:
            continue
        values = torch.stack([statistics[name, layer] for statistics in after])
        change = values.double().mean(0) - before[name, layer]  # (images, heads)
        for head in range(change.shape[1]):
            changes[layer, head] = change[:, head].numpy()
    return changes


def _statistics(model: Model, images: Split) -> Statistics:
    parts: dict[tuple[str, int], list[Tensor]] = {}
    for batch in images.batches(AT_ONCE, device=model.device):
        for (name, layer), values in measure_heads(model, batch.images).values.items():
            if name in _SHIFTED:
                parts.setdefault((name, layer), []).append(values.cpu())
    return {key: torch.cat(values) for key, values in parts.items()}
