"""Measurements of some studies of small models: receptive fields, an image cut into patches,
position embeddings.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from vitlens.analysis.attention.positions import position_similarity, rank_correlation
from vitlens.analysis.features.receptive_field import receptive_field
from vitlens.analysis.heads.statistics import statistics
from vitlens.commands.shared.receptive import field_rows
from vitlens.commands.study.kinds.kinds import Variant
from vitlens.commands.study.kinds.record import VariantRow
from vitlens.commands.study.kinds.setup import Setup
from vitlens.commands.study.kinds.variants.record import (
    CutArrays,
    OrderArrays,
    PositionRow,
    SinkRow,
)
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate, student_mean

_FIELD_IMAGES: Final = 16  # test images of the receptive fields
_SINK_IMAGES: Final = 200  # test images of the statistics of sinks
_OF_SINKS: Final = ("high_norm_patches", "sink_mass", "register_mass")


def measure_fields(setup: Setup, _variants: Mapping[str, VariantRow]) -> dict[str, Any]:
    """Return the receptive field of every layer of every variant, from the trainings with the first
    seed.
    """
    images = setup.test.pick(torch.arange(min(_FIELD_IMAGES, len(setup.test))))
    (batch,) = images.batches(len(images), device=setup.device)
    fields = {}
    for variant in setup.variants:
        model = setup.trained(variant.label)
        fields[variant.label, variant.words] = receptive_field(
            model, batch.images, groups=images.groups
        )
    rows, maps = field_rows(fields)
    return {"receptive_fields": rows, "field_maps": maps}


def measure_cut(setup: Setup, _variants: Mapping[str, VariantRow]) -> dict[str, Any]:
    """Return the first test image, which the report shows as the patches of each variant."""
    return {"cut": CutArrays(setup.test.source.read(torch.arange(1)).numpy())}


def measure_sinks(setup: Setup, _variants: Mapping[str, VariantRow]) -> dict[str, Any]:
    """Return the outlying tokens of each variant, after training."""
    images = setup.test.pick(torch.arange(min(_SINK_IMAGES, len(setup.test))))
    rows = []
    for variant in setup.variants:
        values = []
        for model in setup.trained_models(variant.label):
            table = statistics(model, images, evidence=False)
            values.append([float(getattr(table, name).nanmean()) for name in _OF_SINKS])
        norms, sinks, registers = zip(*values, strict=True)
        rows.append(
            SinkRow(
                variant.label,
                variant.words,
                high_norm=student_mean(norms, unit="tokens", least=0.0),
                sink_mass=student_mean(sinks, least=0.0, most=1.0),
                register_mass=student_mean(registers, least=0.0, most=1.0),
            )
        )
    return {"sinks": tuple(rows)}


def measure_positions(setup: Setup, _variants: Mapping[str, VariantRow]) -> dict[str, Any]:
    """Return how well the position embeddings of each variant follow the places of the patches,
    after training.
    """
    rows = []
    maps = {}
    for index, variant in enumerate(setup.variants):
        models = setup.trained_models(variant.label)
        similarity = position_similarity(models[0])
        if similarity is not None:
            maps[index] = similarity.float().numpy()
            rows.append(_position_row(setup, variant, models))
    return {
        "position_order": tuple(rows),
        "position_similarity": OrderArrays(maps) if maps else None,
    }


def _position_row(setup: Setup, variant: Variant, models: Sequence[Model]) -> PositionRow:
    """Return the rank correlations of a variant; models: trained, one for each seed."""
    over_all, in_rows, in_columns = zip(
        *[_rank_correlations(model) for model in models], strict=True
    )
    before = []
    for seed in setup.seeds:
        correlation, *_ = _rank_correlations(setup.begin(variant, seed=seed))
        if correlation is not None:
            before.append(correlation)
    return PositionRow(
        variant.label,
        variant.words,
        seeds=len(models),
        all=_mean_over_seeds(over_all),
        rows=_mean_over_seeds(in_rows),
        columns=_mean_over_seeds(in_columns),
        before=sum(before) / len(before) if before else None,
    )


def _rank_correlations(model: Model) -> tuple[float | None, float | None, float | None]:
    """Return the rank correlation over all pairs of patches, over those in one row, and in one
    column.
    """
    similarity = position_similarity(model)
    assert similarity is not None  # all seeds have embeddings if the first has
    return rank_correlation(similarity, model.layout)


def _mean_over_seeds(values: Sequence[float | None]) -> Estimate | None:
    """Return the mean with Student's interval; fixed embeddings are the same for every seed and
    have none.
    """
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    if len(set(defined)) == 1:
        return Estimate(defined[0], unit="")
    return student_mean(defined, unit="", least=-1.0, most=1.0)
