"""Of a run of `vitlens attack`: all models on everyday damage, and mean corruption errors."""

from collections.abc import Sequence

import torch

from vitlens.analysis.failures.common_corruptions import Corrupted, on_corrupted
from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress import progress
from vitlens.errors import UnknownNameError
from vitlens.models.model import Model
from vitlens.processes import share_of
from vitlens.runs.attack_sweep import Work


def on_all_corruptions(works: Sequence[Work]) -> list[Corrupted]:
    """Each model on all kinds of damage at all severities, each process on its share of the images."""
    found = []
    for work in works:
        mine = share_of(work.split, work.processes)
        keys = torch.arange(work.processes.index, len(work.split), work.processes.count) + (work.options.seed << 20)
        total = len(mine) * len(CORRUPTIONS) * len(SEVERITIES)
        with progress(f"{work.model.alias} on corruptions", total, quiet=work.options.quiet) as advance:
            part = on_corrupted(
                work.model, mine, keys=keys, batch_size=work.options.batch_size,
                precision=work.options.precision, advance=advance,
            )  # fmt: skip
        whole = work.processes.gathered(part).permute(1, 2, 0).contiguous()
        found.append(Corrupted(work.model.alias, whole, work.split.groups))
    return found


def baseline_of(models: Sequence[Model], asked: str | None) -> str:
    """The alias of the model that mean corruption errors are relative to: as asked, else the first CNN, else the first.

    Raises UnknownNameError for a model that is not among them.
    """
    aliases = [model.alias for model in models]
    if asked is not None:
        if asked not in aliases:
            raise UnknownNameError("model for --baseline", asked, aliases)
        return asked
    return next((one.alias for one in models if one.anatomy.family == "cnn"), aliases[0])


def keep_corruptions(folder: RunFolder, found: Sequence[Corrupted], *, baseline: str, seed: int) -> None:
    """Accuracy by kind and severity, mean errors, and for several models mean corruption errors."""
    rows: list[dict[str, object]] = []
    several = len(found) > 1
    (reference,) = (one for one in found if one.alias == baseline)
    for one in found:
        middle = f"/{one.alias}" if several else ""
        for kind in CORRUPTIONS:
            for severity in SEVERITIES:
                estimate = one.accuracy(kind, severity, seed=seed)
                folder.metric(f"corruption_accuracy{middle}/{kind}/{severity}", estimate)
                rows.append(
                    {
                        "model": one.alias, "kind": kind, "severity": severity, "accuracy": estimate.value,
                        "low": estimate.low, "high": estimate.high, "n": estimate.n,
                    }
                )  # fmt: skip
        folder.metric(f"mean_error_on_corruptions{middle}", one.mean_error(seed=seed))
        relative = one.relative_error(reference, seed=seed) if several else None
        if relative is not None:
            folder.metric(f"mean_corruption_error/{one.alias}/{baseline}", relative)
    folder.table("corruptions", rows)
    folder.table("corruption_kinds", [
        {"kind": name, "is": kind.description, **{str(level): kind.strengths[level - 1] for level in SEVERITIES}}
        for name, kind in CORRUPTIONS.items()
    ])  # fmt: skip
