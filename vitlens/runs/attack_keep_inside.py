"""What `vitlens attack` writes down of what changes inside: agreements of maps, paths by depth, shifts, examples."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.faithfulness.map_shares import as_shares
from vitlens.analysis.robustness.inside import parting
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.runs.attack_inside import KINDS, Inside
from vitlens.runs.attack_sample import Sample, logits_of, spread
from vitlens.runs.attack_sweep import Work
from vitlens.uncertainty import Estimate, bootstrap_mean

SHOWN: Final = 5  # images with their maps in the figure
_DRAWS: Final = 2000  # of a bootstrap: there is one for every block and layer

Row = dict[str, object]


def keep_inside(folder: RunFolder, works: Sequence[Work], sample: Sample, found: Sequence[Inside | None]) -> None:
    """Agreements of maps, cosines by block, shifts by layer, the block where paths part; the arrays of the examples."""
    several = len(works) > 1
    blocks: list[Row] = []
    layers: list[Row] = []
    for work, inside in zip(works, found):
        if inside is None:
            continue
        middle = f"/{work.model.alias}" if several else ""
        for name, estimate in _metrics(inside, seed=work.options.seed):
            first, *rest = name.split("/")
            folder.metric("/".join([f"{first}{middle}", *rest]), estimate)
        blocks += _blocks(work, inside)
        layers += _layers(work, inside)
        _keep_examples(folder, work, sample, inside)
    folder.table("blocks", blocks)
    folder.table("shifts", layers)


def _metrics(inside: Inside, *, seed: int) -> Iterator[tuple[str, Estimate]]:
    for name, one in inside.agreements.items():
        if bool(one.usable.any()):
            for measure, values, unit in (("spearman", one.spearman, ""), ("top", one.top, "fraction")):
                estimate = bootstrap_mean(values[one.usable].double().numpy(), seed=seed, unit=unit)
                yield f"map_agreement/{measure}/{name.replace(' ', '-')}", estimate
    if KINDS[2] in inside.paths:
        block = parting(inside.paths[KINDS[0]], inside.paths[KINDS[2]])
        if block is not None:
            yield "parting_block", Estimate(float(block), n=len(inside.places), unit="")


def _blocks(work: Work, inside: Inside) -> Iterator[Row]:
    for kind, cosine in inside.paths.items():
        for block, values in enumerate(cosine):
            row: Row = {"model": work.model.alias, "block": block, "kind": kind}
            yield row | _ends(values, work.options.seed)


def _layers(work: Work, inside: Inside) -> Iterator[Row]:
    for shift in inside.shifts:
        for layer, (before, after) in enumerate(zip(shift.before, shift.after)):
            if bool(before.isfinite().all() and after.isfinite().all()):
                row: Row = {"model": work.model.alias, "statistic": shift.name, "layer": layer}
                yield row | {"before": float(before.mean())} | _ends(after - before, work.options.seed)


def _ends(values: Tensor, seed: int) -> Row:
    found = bootstrap_mean(values.double().numpy(), seed=seed, unit="", draws=_DRAWS)
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n}


def _keep_examples(folder: RunFolder, work: Work, sample: Sample, inside: Inside) -> None:
    """Pixels, perturbations, maps and answers of a few images."""
    some = spread(torch.arange(len(inside.places)), SHOWN)
    clean, changed = inside.clean[some], inside.changed[some]
    grid = int(inside.before.shape[-2]), int(inside.before.shape[-1])
    size = grid[0] * -(-clean.shape[-2] // grid[0]), grid[1] * -(-clean.shape[-1] // grid[1])
    probabilities = [logits_of(work, images).softmax(-1) for images in (clean, changed)]
    names = work.model.classes
    folder.arrays(
        f"examples-{work.model.alias}",
        pixels=(clean * 255).round().byte().numpy(),
        change=(changed - clean).half().numpy(),
        before=as_shares(inside.before[some], size=size, grid=grid).float().numpy(),
        after=as_shares(inside.after[some], size=size, grid=grid).float().numpy(),
        answers=[[names[int(index)] for index in one.argmax(-1)] for one in probabilities],
        probability=torch.stack([one.amax(-1) for one in probabilities]).numpy(),
        image=sample.indices[inside.places[some]].numpy(),
        method=ATTRIBUTIONS[inside.method].title,
    )
