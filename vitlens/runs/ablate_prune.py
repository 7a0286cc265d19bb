"""Heads really removed: a smaller model, written where it can be loaded, with its speed beside the whole one's."""

from dataclasses import replace

import torch

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.cost.latency import Latency, latency
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.unseen import pass_on
from vitlens.errors import InputError
from vitlens.models.pruning import prune_heads
from vitlens.models.saved import WEIGHTS_FILE, save
from vitlens.processes import Processes
from vitlens.runs.ablate_work import Found, Work
from vitlens.uncertainty import Estimate

ROUNDS = 3  # turns of timing, whole and pruned after each other
_TIMED = 8  # images at a time


def keep_pruned(folder: RunFolder, work: Work, found: Found) -> None:
    """Cut the least important share of the heads, save the model, and measure it beside the whole one."""
    share, main = work.choices.prune or 0.0, work.choices.replace[0]
    ranking = list(reversed(found.importance[main].ranking("head")))
    count = round(share * len(ranking))
    if not 0 < count <= len(ranking):
        raise InputError(f"expected --prune with a share that cuts at least one of {len(ranking)} heads, found {share}")
    cut: dict[int, set[int]] = {}
    for unit in ranking[:count]:
        cut.setdefault(unit.layer, set()).add(int(unit.head or 0))
    pruned = prune_heads(work.model, cut)
    place = work.choices.save / WEIGHTS_FILE if work.choices.save else folder.place("pruned", WEIGHTS_FILE)
    save(pruned, place)
    pass_on(work.model, place.parent)
    (batch,) = work.split.pick(torch.arange(min(_TIMED, len(work.split)))).batches(_TIMED, device=work.model.device)
    times: dict[str, list[Latency]] = {"whole": [], "pruned": []}
    for _ in range(ROUNDS):
        for name, model in (("whole", work.model), ("pruned", pruned)):
            times[name].append(latency(model, batch.images, repeats=5))
    rows = []
    for name, model in (("whole", work.model), ("pruned", pruned)):
        best = min(times[name], key=lambda one: one.median)
        rows.append(
            {
                "model": name,
                "heads": len(ranking) - (count if name == "pruned" else 0),
                "parameters": model.parameter_count(),
                "milliseconds": round(1000 * best.median, 3),
                "low": round(1000 * best.low, 3),
                "high": round(1000 * best.high, 3),
                "images": len(batch.images),
                **_answers(work, model),
            }
        )
    folder.table("pruned", rows)
    folder.table("pruned_heads", [{"layer": layer, "heads": sorted(heads)} for layer, heads in sorted(cut.items())])
    folder.metric("parameters_cut", Estimate(1 - pruned.parameter_count() / work.model.parameter_count()))


def _answers(work: Work, model: torch.nn.Module) -> dict[str, object]:
    alone = replace(work, processes=Processes(0, 1, work.model.device))  # the others are done
    right = []
    with torch.no_grad():
        for part in alone.batches():
            right.append((model(part.images).argmax(-1) == part.labels).cpu())
    found = accuracy(torch.cat(right))
    return {"accuracy": found.value, "accuracy_low": found.low, "accuracy_high": found.high, "n": found.n}
