"""Measurements of some studies of small models: receptive fields, an image cut into patches, sinks,
position embeddings.

Each `measure_...` is called once, after all trainings, for the kinds whose `extra` names it. It
returns fields of the record.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from vitlens.analysis.attention.positions import (
    RankCorrelations,
    position_similarity,
    rank_correlation,
)
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


def measure_fields(setup: Setup, _variants: Mapping[str, VariantRow]) -> dict[str, Any]:
    """Return the receptive field of every layer of every variant, from the trainings with the first
    seed.
    """
    images = setup.test.pick(torch.arange(min(_FIELD_IMAGES, len(setup.test))))
    (batch,) = images.batches(len(images), device=setup.device)
    fields = {}
    for variant in setup.variants:
        model = setup.load_trained(variant.label)
        field = receptive_field(model, batch.images, groups=images.groups)
        fields[variant.label, variant.words] = field
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
        # one value for each seed: means over layers, heads and images that have one
        high_norm = []
        sink_mass = []
        register_mass = []
        for model in setup.load_all_trained(variant.label):
            measured = statistics(model, images, evidence=False)
            high_norm.append(float(measured.high_norm_patches.nanmean()))
            sink_mass.append(float(measured.sink_mass.nanmean()))
            register_mass.append(float(measured.register_mass.nanmean()))
        row = SinkRow(
            variant.label,
            variant.words,
            high_norm=student_mean(high_norm, unit="tokens", least=0.0),
            sink_mass=student_mean(sink_mass, least=0.0, most=1.0),
            register_mass=student_mean(register_mass, least=0.0, most=1.0),
        )
        rows.append(row)
    return {"sinks": tuple(rows)}


def measure_positions(setup: Setup, _variants: Mapping[str, VariantRow]) -> dict[str, Any]:
    """Return how well the position embeddings of each variant follow the places of the patches,
    after training.
    """
    rows = []
    maps = {}
    for index, variant in enumerate(setup.variants):
        models = setup.load_all_trained(variant.label)
        similarity = position_similarity(models[0])
        if similarity is not None:  # None: the variant has no position embeddings
            maps[index] = similarity.float().numpy()
            rows.append(_position_row(setup, variant, models))
    return {
        "position_order": tuple(rows),
        "position_similarity": OrderArrays(maps) if maps else None,
    }


def _position_row(setup: Setup, variant: Variant, models: Sequence[Model]) -> PositionRow:
    """Return the rank correlations of a variant; models: trained, one for each seed."""
    after = [_rank_correlations(model) for model in models]
    before = []
    for seed in setup.seeds:
        initial = _rank_correlations(setup.initial_model(variant, seed=seed))
        if initial.all is not None:
            before.append(initial.all)
    return PositionRow(
        variant.label,
        variant.words,
        seeds=len(models),
        all=_mean_over_seeds([correlations.all for correlations in after]),
        rows=_mean_over_seeds([correlations.rows for correlations in after]),
        columns=_mean_over_seeds([correlations.columns for correlations in after]),
        before=sum(before) / len(before) if before else None,
    )


def _rank_correlations(model: Model) -> RankCorrelations:
    similarity = position_similarity(model)
    assert similarity is not None  # all seeds have embeddings if the first has
    return rank_correlation(similarity, model.layout)


def _mean_over_seeds(values: Sequence[float | None]) -> Estimate | None:
    """Return the mean with Student's interval; None if no value is defined."""
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    if len(set(defined)) == 1:  # fixed embeddings, the same for every seed: no interval
        return Estimate(defined[0], unit="")
    return student_mean(defined, unit="", least=-1.0, most=1.0)
