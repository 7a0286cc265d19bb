"""--top K: the most important heads alone, by sequential elimination."""

from collections.abc import Iterator

from vitlens.analysis.ablation.adaptive import Adaptive, most_important
from vitlens.commands.ablate.measure.work import AblationRun, finite
from vitlens.commands.ablate.record import ELIMINATION, FORWARDS
from vitlens.commands.ablate.record.rows import EliminationRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress import progress
from vitlens.uncertainty import Estimate


def top_heads(ablation: AblationRun) -> Adaptive:
    """The most important heads; all processes do the same work, which is too little to share."""
    (batch,) = ablation.split.batches(len(ablation.split), device="cpu")
    total = len(ablation.split) * len(ablation.heads)
    with progress("Telling heads apart", total, unit="removals", quiet=ablation.run.quiet) as advance:
        return most_important(
            ablation.model, batch.images, ablation.labels, k=ablation.options.top or 1, replace=ablation.replacement,
            units=ablation.heads, batch_size=ablation.run.batch_size, seed=ablation.run.seed, advance=advance,
        )  # fmt: skip


def write_top(folder: RunFolder, alias: str, elimination: Adaptive | None) -> None:
    """Write every head as far as it was measured, and what that cost beside measuring all; no rows without --top."""
    folder.write(ELIMINATION, [] if elimination is None else _rows(elimination))
    if elimination is not None:
        for what, cost in (("adaptive", elimination.forward_equivalents), ("exact", elimination.exact_cost)):
            folder.metric(FORWARDS(model=alias, what=what), Estimate(cost, n=elimination.n, unit="forwards"))


def _rows(elimination: Adaptive) -> Iterator[EliminationRow]:
    for rank, index in enumerate(elimination.ranking):
        unit = elimination.units[index]
        yield EliminationRow(
            rank=rank + 1,
            unit=unit.name,
            layer=unit.layer,
            head=unit.head,
            delta_loss=float(elimination.mean[index]),
            low=finite(elimination.low[index]),
            high=finite(elimination.high[index]),
            images=int(elimination.images[index]),
            settled=bool(elimination.settled[index]),
            top=rank < elimination.k,
        )
