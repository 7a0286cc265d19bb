"""--prune: the least important heads are removed from the weights, the smaller model is saved and timed."""

from dataclasses import replace
from typing import Final, Literal

import torch

from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.cost.latency import Latency, latency
from vitlens.commands.ablate.measure.work import AblationRun
from vitlens.commands.ablate.record import PARAMETERS_CUT, PRUNED, PRUNED_HEADS
from vitlens.commands.ablate.record.rows import PrunedHeadsRow, PrunedRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.unseen import copy_training_images
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.rebuilding.pruning import prune_heads
from vitlens.models.saved import WEIGHTS_FILE, save
from vitlens.processes import Processes
from vitlens.uncertainty import Estimate

_ROUNDS: Final = 3  # of timing, alternating between the whole and the pruned model
_TIMED: Final = 8  # images in the batch that is timed


def write_pruned(folder: RunFolder, ablation: AblationRun, importance: Importance | None) -> None:
    """Prune the least important share of the heads, save the model, and compare it with the whole one; no rows without
    --prune."""
    if ablation.options.prune is None or importance is None:
        folder.write(PRUNED, [])
        folder.write(PRUNED_HEADS, [])
        return
    ranking = list(reversed(importance.ranking("head")))
    count = round(ablation.options.prune * len(ranking))
    if not 0 < count <= len(ranking):
        raise InputError(
            f"expected --prune with a share that cuts at least one of {len(ranking)} heads, found "
            f"{ablation.options.prune}"
        )
    cut: dict[int, set[int]] = {}
    for unit in ranking[:count]:
        cut.setdefault(unit.layer, set()).add(int(unit.head or 0))
    pruned = prune_heads(ablation.model, cut)
    place = ablation.options.save / WEIGHTS_FILE if ablation.options.save else folder.place("pruned", WEIGHTS_FILE)
    save(pruned, place)
    copy_training_images(ablation.model, place.parent)
    folder.write(PRUNED, _rows(ablation, pruned, heads=len(ranking), cut=count))
    folder.write(PRUNED_HEADS, [PrunedHeadsRow(layer, tuple(sorted(heads))) for layer, heads in sorted(cut.items())])
    share = 1 - pruned.parameter_count() / ablation.model.parameter_count()
    folder.metric(PARAMETERS_CUT(model=ablation.model.alias), Estimate(share))


def _rows(ablation: AblationRun, pruned: Model, *, heads: int, cut: int) -> list[PrunedRow]:
    timed = torch.arange(min(_TIMED, len(ablation.split)))
    (batch,) = ablation.split.pick(timed).batches(_TIMED, device=ablation.model.device)
    models: dict[Literal["whole", "pruned"], Model] = {"whole": ablation.model, "pruned": pruned}
    times: dict[str, list[Latency]] = {name: [] for name in models}
    for _ in range(_ROUNDS):
        for name, model in models.items():
            times[name].append(latency(model, batch.images, repeats=5))
    rows = []
    for name, model in models.items():
        best, right = min(times[name], key=lambda latency: latency.median), _accuracy(ablation, model)
        rows.append(
            PrunedRow(
                model=name,
                heads=heads - (cut if name == "pruned" else 0),
                parameters=model.parameter_count(),
                milliseconds=1000 * best.median,
                low=1000 * best.low,
                high=1000 * best.high,
                images=len(batch.images),
                accuracy=right.value,
                accuracy_low=right.low,
                accuracy_high=right.high,
                n=right.n or 0,
            )
        )
    return rows


def _accuracy(ablation: AblationRun, model: Model) -> Estimate:
    whole = replace(ablation, processes=Processes(0, 1, ablation.model.device))  # all images
    right = []
    with torch.no_grad():
        for batch in whole.batches():
            right.append((model(batch.images).argmax(-1) == batch.labels).cpu())
    return accuracy(torch.cat(right))
