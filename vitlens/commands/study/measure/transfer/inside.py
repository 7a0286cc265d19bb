"""What training changed inside a model: the attention of every head, the features of every layer, the maps."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.attention.change import Moved, attention_moved
from vitlens.analysis.heads.measure import measure as measure_heads
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.study.measure.transfer.setup import TransferSetup
from vitlens.commands.study.transfer.record import (
    CLASS_CHANGES,
    HEAD_CHANGES,
    HEAD_SHIFTS,
    MOVED,
    ClassChangeRow,
    HeadChangeRow,
    HeadShiftRow,
)
from vitlens.commands.study.transfer.regimes import FULL, LAST, SHOWN, STATISTICS, Regime
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.uncertainty import bootstrap_mean, holm, student_test

_AT_ONCE = 16  # images


def write_attention(folder: RunFolder, setup: TransferSetup) -> None:
    """Write how far the attention of every head moved, which statistics of it changed, and on which classes."""
    images, before = shown(setup), setup.start()
    changes: list[HeadChangeRow] = []
    for regime in (LAST, FULL):
        after = [setup.trained(folder.path, regime, seed=seed) for seed in setup.seeds]
        moved = _over_seeds(attention_moved(before, after, images))
        between = _over_seeds(attention_moved(after[0], after[1:], images)) if len(after) > 1 else None
        changes += _change_rows(regime, moved, between, images)
        overall = torch.cat(moved, 1).mean(1)
        folder.metric(MOVED(model=regime.label), bootstrap_mean(overall.numpy(), groups=_groups(images)))
        if regime == FULL:
            folder.write(CLASS_CHANGES, list(_class_rows(regime, overall, images)))
            folder.write(HEAD_SHIFTS, list(_shift_rows(regime, before, after, images)))
    folder.write(HEAD_CHANGES, changes)


def shown(setup: TransferSetup) -> Split:
    """The test images on which attention is compared: a seeded, class-balanced subset."""
    return setup.test.limit(SHOWN, seed=setup.options.seed)


def _over_seeds(by_model: Sequence[Sequence[Moved]]) -> list[Tensor]:
    """The mean over models, by layer (images, heads)."""
    return [torch.stack(tuple(layers)).double().mean(0) for layers in zip(*by_model, strict=True)]


def _change_rows(
    regime: Regime, moved: Sequence[Tensor], between: Sequence[Tensor] | None, images: Split
) -> Iterator[HeadChangeRow]:
    for layer, values in enumerate(moved):
        for head in range(values.shape[1]):
            own = bootstrap_mean(values[:, head].numpy(), groups=_groups(images))
            other = None if between is None else float(between[layer][:, head].mean())
            yield HeadChangeRow(regime.label, layer, head, own.value, own.low, own.high, other)


def _class_rows(regime: Regime, moved: Tensor, images: Split) -> Iterator[ClassChangeRow]:
    """How far attention moved on the images of each class; moved: (images,), mean over all heads."""
    assert images.labels is not None
    groups = _groups(images)
    for label in images.labels.unique().tolist():
        own = (images.labels == label).numpy()
        known = None if groups is None else groups[own]
        mean = bootstrap_mean(moved.numpy()[own], groups=known)
        yield ClassChangeRow(regime.label, images.classes[label], int(own.sum()), mean.value, mean.low, mean.high)


def _groups(images: Split) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None":
    return None if images.groups is None else images.groups.cpu().numpy()


Statistics = Mapping[tuple[str, int], Tensor]  # (statistic, layer) -> (images, heads)


def _shift_rows(regime: Regime, before: Model, after: Sequence[Model], images: Split) -> Iterator[HeadShiftRow]:
    """The change of each statistic of each head where it is defined, paired by image and averaged over seeds."""
    first = _statistics(before, images)
    others = [_statistics(model, images) for model in after]
    for name in STATISTICS:
        layers = [layer for known, layer in first if known == name]
        changes = {
            (layer, head): torch.stack([other[name, layer] for other in others]).double().mean(0)[:, head]
            - first[name, layer][:, head]
            for layer in layers
            for head in range(first[name, layer].shape[1])
        }
        corrected = holm([_p(change, images) for change in changes.values()])
        for ((layer, head), change), p_holm in zip(changes.items(), corrected, strict=True):
            own = bootstrap_mean(change.numpy(), groups=_groups(images), unit="")
            level = float(first[name, layer][:, head].double().mean())
            yield HeadShiftRow(regime.label, name, layer, head, level, own.value, own.low, own.high, p_holm)


def _p(change: Tensor, images: Split) -> float:
    """Of Student's t over images; over the means of groups where images share one."""
    groups = _groups(images)
    if groups is None:
        return student_test(change.numpy())
    members = np.unique(groups, return_inverse=True)[1]
    return student_test(np.bincount(members, weights=change.numpy()) / np.bincount(members))


def _statistics(model: Model, images: Split) -> Statistics:
    parts: dict[tuple[str, int], list[Tensor]] = {}
    for batch in images.batches(_AT_ONCE, device=model.device):
        for key, values in measure_heads(model, batch.images).values.items():
            if key[0] in STATISTICS:
                parts.setdefault(key, []).append(values.cpu())
    return {key: torch.cat(values) for key, values in parts.items()}


def models_of(setup: TransferSetup, path: Path, regime: Regime) -> Iterator[Model]:
    """The models that a regime trained, one a seed, loaded one after the other."""
    for seed in setup.seeds:
        yield setup.trained(path, regime, seed=seed)
