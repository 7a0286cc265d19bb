"""Changes inside each model for the images that fool it: maps, attention, and the outputs of blocks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.faithfulness.map_shares import as_shares
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.analysis.robustness.inside import MapAgreement, Shift, cosines, halfway_block, map_agreement, shifts
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.explain import explain, methods_for, preferred_method
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.attack.measure.sample import AttackSample, evenly_spaced, logits_of
from vitlens.commands.attack.measure.sweep import ModelAttack
from vitlens.commands.attack.record import BLOCKS, EXAMPLES, MAP_AGREEMENT, PARTING_BLOCK, SHIFTS
from vitlens.commands.attack.record.arrays import AttackExampleArrays
from vitlens.commands.attack.record.rows import AttentionShiftRow, BlockCosineRow, Counterpart
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.uncertainty import Estimate, bootstrap_mean

MEASURED: Final = 64  # fooled images whose maps, attention and blocks are compared
SHOWN: Final = 5  # of them with their maps in the figure
_DRAWS: Final = 2000  # of a bootstrap: there is one for every block and layer
_ALSO: Final = "rollout"  # compared too where the model has attention, as a method that explains no class
_ADVERSARIAL: Final = "adversarial"
_NOISE: Final = "noise"
_ANOTHER: Final = "another image"


@dataclass(frozen=True)
class InsideChange:
    """One model on images that fool it. places: their indices in the sample (k,); clean, changed: the images; method,
    before, after: maps of the true class (k, rows, columns); agreements: by name; paths: cosines by block, by kind of
    counterpart; shifts: of attention."""

    places: Tensor
    clean: Tensor
    changed: Tensor
    method: str
    before: Tensor
    after: Tensor
    agreements: Mapping[str, MapAgreement]
    paths: Mapping[Counterpart, Tensor]
    shifts: tuple[Shift, ...]


def write_inside(folder: RunFolder, works: Sequence[ModelAttack], sample: AttackSample) -> None:
    """Write agreements of maps, cosines and the halfway block, shifts by layer, and the arrays of the examples."""
    blocks: list[BlockCosineRow] = []
    layers: list[AttentionShiftRow] = []
    for index, work in enumerate(works):
        change = inside_change(work, sample, index) if work.options.inside else None
        if change is not None:
            _write_metrics(folder, work, change)
            blocks += _blocks(work, change)
            layers += _layers(work, change)
            _save_examples(folder, work, sample, change)
    folder.write(BLOCKS, blocks)
    folder.write(SHIFTS, layers)


def inside_change(work: ModelAttack, sample: AttackSample, index: int) -> InsideChange | None:
    """The changes inside one model; None where no image of the sample fools it."""
    places = evenly_spaced(sample.fooled[index].nonzero().flatten(), MEASURED)
    if not len(places):
        return None
    clean, changed = sample.clean[places], sample.adversarial[index][places]
    truth = work.labels[sample.indices[places]]
    model, size = work.model, work.run.batch_size
    method = preferred_method(model)
    before, after = (_maps(work, images, truth, method) for images in (clean, changed))
    wrong = logits_of(work, changed).argmax(-1)
    agreements = {
        f"{method} for the true class": map_agreement(before, after),
        f"{method} for each prediction": map_agreement(before, _maps(work, changed, wrong, method)),
    }
    if _ALSO in methods_for(model) and method != _ALSO:
        agreements[_ALSO] = map_agreement(*(_maps(work, images, truth, _ALSO) for images in (clean, changed)))
    others: dict[Counterpart, Tensor] = {
        _ADVERSARIAL: changed,
        _NOISE: with_noise(clean, changed, ATTACKS[sample.attack].norm, seed=work.run.seed),
    }
    if len(places) > 1:
        others[_ANOTHER] = clean.roll(len(places) // 2, 0)  # half the sample away, so mostly of another class
    measured = cosines(model, clean, {str(kind): images for kind, images in others.items()}, batch_size=size)
    paths = {kind: measured[kind] for kind in others}
    moved = shifts(model, clean, changed, batch_size=size)
    return InsideChange(places, clean, changed, method, before, after, agreements, paths, moved)


def _maps(work: ModelAttack, images: Tensor, targets: Tensor, name: str) -> Tensor:
    maps = explain(work.model, images, targets=targets, method=name, batch_size=work.run.batch_size, seed=work.run.seed)
    return maps.detach().cpu()


def with_noise(clean: Tensor, changed: Tensor, norm: str, *, seed: int) -> Tensor:
    """The clean images with random noise of each perturbation's norm, as a baseline for the effect of its size."""
    generator = torch.Generator().manual_seed(seed)
    change = changed - clean
    if norm == "linf":
        signs = torch.randint(0, 2, clean.shape, generator=generator) * 2.0 - 1
        return (clean + signs * change.flatten(1).abs().amax(1)[:, None, None, None]).clamp(0, 1)
    noise = torch.randn(clean.shape, generator=generator)
    target, drawn = (values.flatten(1).norm(dim=1)[:, None, None, None] for values in (change, noise))
    noisy: Tensor = (clean + noise * target / drawn).clamp(0, 1)
    return noisy


def _write_metrics(folder: RunFolder, work: ModelAttack, change: InsideChange) -> None:
    alias, seed = work.model.alias, work.run.seed
    for name, agreement in change.agreements.items():
        usable, maps = agreement.usable, name.replace(" ", "-")
        if not bool(usable.any()):
            continue
        for measure, values, unit in (("spearman", agreement.spearman, ""), ("top", agreement.top, "fraction")):
            estimate = bootstrap_mean(values[usable].double().numpy(), seed=seed, unit=unit)
            folder.metric(MAP_AGREEMENT(model=alias, measure=measure, maps=maps), estimate)
    if _ANOTHER in change.paths:
        block = halfway_block(change.paths[_ADVERSARIAL], change.paths[_ANOTHER])
        if block is not None:
            folder.metric(PARTING_BLOCK(model=alias), Estimate(float(block), n=len(change.places), unit=""))


def _blocks(work: ModelAttack, change: InsideChange) -> Iterator[BlockCosineRow]:
    for kind, by_block in change.paths.items():
        for block, values in enumerate(by_block):
            yield BlockCosineRow(work.model.alias, block, kind, *_mean_with_interval(values, work.run.seed))


def _layers(work: ModelAttack, change: InsideChange) -> Iterator[AttentionShiftRow]:
    for shift in change.shifts:
        statistic = STATISTICS[shift.name]
        for layer, (before, after) in enumerate(zip(shift.before, shift.after)):
            if bool(before.isfinite().all() and after.isfinite().all()):
                yield AttentionShiftRow(
                    work.model.alias, shift.name, statistic.title, statistic.unit, layer, float(before.mean()),
                    *_mean_with_interval(after - before, work.run.seed),
                )  # fmt: skip


def _mean_with_interval(values: Tensor, seed: int) -> tuple[float, float | None, float | None, int]:
    mean = bootstrap_mean(values.double().numpy(), seed=seed, unit="", draws=_DRAWS)
    return mean.value, mean.low, mean.high, len(values)


def _save_examples(folder: RunFolder, work: ModelAttack, sample: AttackSample, change: InsideChange) -> None:
    """Pixels, perturbations, maps and predictions of a few images."""
    shown = evenly_spaced(torch.arange(len(change.places)), SHOWN)
    clean, changed = change.clean[shown], change.changed[shown]
    grid = int(change.before.shape[-2]), int(change.before.shape[-1])
    size = grid[0] * -(-clean.shape[-2] // grid[0]), grid[1] * -(-clean.shape[-1] // grid[1])
    probabilities = [logits_of(work, images).softmax(-1) for images in (clean, changed)]
    names = work.model.classes
    arrays = AttackExampleArrays(
        pixels=(clean * 255).round().byte().numpy(),
        change=(changed - clean).half().numpy(),
        before=as_shares(change.before[shown], size=size, grid=grid).float().numpy(),
        after=as_shares(change.after[shown], size=size, grid=grid).float().numpy(),
        answers=np.array([[names[int(index)] for index in of_images.argmax(-1)] for of_images in probabilities]),
        probability=torch.stack([of_images.amax(-1) for of_images in probabilities]).numpy(),
        image=sample.indices[change.places[shown]].numpy(),
        method=np.array(ATTRIBUTIONS[change.method].title),
    )
    folder.save(EXAMPLES, arrays, model=work.model.alias)
