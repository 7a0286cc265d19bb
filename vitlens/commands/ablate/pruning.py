"""Prune the least important heads, and compare the pruned model with the whole one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.ablation.units import Unit
from vitlens.analysis.cost.passes import Latency, passes, quartiles
from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.commands.ablate.ablation_setup import AblationSetup, name_of
from vitlens.commands.ablate.inside import predict
from vitlens.commands.ablate.record import PrunedRow
from vitlens.commands.run.progress import phase
from vitlens.commands.run.unseen import copy_training_images
from vitlens.errors import InputError
from vitlens.models.derived import prune_heads
from vitlens.models.model import Model
from vitlens.models.saved import WEIGHTS_FILE, save
from vitlens.uncertainty import Estimate

_ROUNDS: Final = 3  # rounds of timing, which alternate between the whole and the pruned model
_PASSES: Final = 5  # timed passes of a model in a round
_WARM_UP: Final = 3  # passes before them that are not timed
_TIMED: Final = 8  # images in the timed batch

Models = dict[Literal["whole", "pruned"], Model]  # the two models that are compared


@dataclass(frozen=True)
class Pruning:
    """The share of the parameters that was pruned, and the rows of both models.

    None and empty without --prune.
    """

    parameters_cut: Estimate | None = None
    rows: tuple[PrunedRow, ...] = ()


@phase("Pruning, and timing the pruned model")
def prune(setup: AblationSetup, importance: Importance, share: float, folder: Path) -> Pruning:
    """Prune the least important share of the heads, save the model, and compare it with the whole
    one.

    Raises InputError for a share that prunes no head.
    """
    ranking = importance.ranking("head")
    count = round(share * len(ranking))
    if count == 0:
        raise InputError(
            f"expected --prune with a share that cuts at least one of {len(ranking)} heads, found "
            f"{share}"
        )
    least_important = ranking[::-1][:count]
    model = setup.run.model
    pruned = _save_without(model, least_important, folder)
    models: Models = {"whole": model, "pruned": pruned}
    times = _time(setup, models)
    rows = []
    for name, compared in models.items():
        removed: tuple[str, ...] = ()
        if name == "pruned":
            in_order = sorted(least_important, key=importance.units.index)
            removed = tuple(name_of(unit) for unit in in_order)
        row = PrunedRow(
            model=name,
            heads=len(ranking) - len(removed),
            parameters=compared.parameter_count(),
            accuracy=accuracy(_correct(setup, compared), groups=setup.groups()),
            time=times[name],
            cut=removed,
        )
        rows.append(row)
    parameters_cut = Estimate(1 - pruned.parameter_count() / model.parameter_count())
    return Pruning(parameters_cut, tuple(rows))


def _save_without(model: Model, heads: tuple[Unit, ...], folder: Path) -> Model:
    """Return a copy of the model without some heads, which is saved in a folder."""
    heads_by_layer: dict[int, set[int]] = {}
    for unit in heads:
        assert unit.head is not None  # the units are heads
        heads_by_layer.setdefault(unit.layer, set()).add(unit.head)
    pruned = prune_heads(model, heads_by_layer)
    save(pruned, folder / WEIGHTS_FILE)
    copy_training_images(model, folder)
    return pruned


def _time(setup: AblationSetup, models: Models) -> dict[str, Estimate]:
    """Return the time of a batch for each model, in milliseconds.

    It is that of the round with the lowest median, which other processes disturbed least.
    """
    split = setup.run.split.pick(setup.first_images(_TIMED))
    [batch] = split.batches(_TIMED, device=setup.run.model.device)
    rounds: dict[str, list[Latency]] = {name: [] for name in models}
    for _ in range(_ROUNDS):
        for name, model in models.items():
            seconds = passes(model, batch.images, _PASSES, warm_up=_WARM_UP)
            rounds[name].append(quartiles(seconds, len(batch.images)))
    times: dict[str, Estimate] = {}
    for timed, latencies in rounds.items():
        best = min(latencies, key=lambda latency: latency.median)  # in seconds
        times[timed] = Estimate(
            value=1000 * best.median,
            low=1000 * best.low,
            high=1000 * best.high,
            n=len(batch.images),
            unit="ms",
        )
    return times


def _correct(setup: AblationSetup, model: Model) -> Tensor:
    """Return True for each image (n,) that a model classifies correctly."""
    correct = []
    for batch in setup.run.split.batches(setup.batch_size, device=model.device):
        _, predictions = predict(model, batch.images)
        correct.append(predictions.cpu() == setup.labels[batch.indices].cpu())
    return torch.cat(correct)
