"""Accuracy of models under attack over epsilon and under common corruptions, and the changes inside the models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.failures.common_corruptions import Corrupted, on_corrupted
from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.analysis.faithfulness.map_shares import as_shares
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.analysis.robustness.curve import paired, robust_by_class
from vitlens.analysis.robustness.inside import cosines, halfway_block, map_agreement, shifts
from vitlens.analysis.robustness.transfer import transfer
from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import ATTACKS, Attack, NormName, members_of
from vitlens.attribution.explain import explain, methods_for, preferred_method
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import (
    JUDGED,
    AttackCheckRow,
    AttackCurveRow,
    AttackedArrays,
    AttackedModelRow,
    AttackExampleArrays,
    AttackRecord,
    AttackRow,
    AttackSampleRow,
    AttentionShiftRow,
    BlockDistanceRow,
    CorruptionRow,
    Counterpart,
    MapAgreementRow,
    RobustClassRow,
    RobustPairRow,
    TransferRow,
    scale_of,
    strongest,
    typed_epsilon,
)
from vitlens.commands.attack.sweep import (
    AttackSample,
    ModelAttack,
    SweptAttack,
    attack_sample,
    checked,
    evenly_spaced,
    sweep_all,
)
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.digests import model_digest
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.commands.scaffold.progress.store import PROGRESS, ProgressStore
from vitlens.commands.scaffold.publish import publish
from vitlens.commands.scaffold.resume import require_same
from vitlens.commands.scaffold.targets import labels_of
from vitlens.data.split import Split
from vitlens.errors import UnknownNameError
from vitlens.models.model import Model
from vitlens.processes import Processes, share_of
from vitlens.uncertainty import Estimate, bootstrap_mean

MEASURED: Final = 64  # fooled images whose maps, attention and blocks are compared
SHOWN: Final = 5  # of them with their maps in the figure
_DRAWS: Final = 2000  # of a bootstrap: there is one for every block and layer
_ALSO: Final = "rollout"  # compared too where the model has attention, as a method that explains no class


def measure(options: AttackOptions) -> Path | None:
    """Attack models on the same images and write the report; returns its path.

    All models are attacked at the input size of the first model. Of several processes each takes its share
    of the images; all but the first return None. Raises InputError (or one of its kind) before anything is written.
    """
    processes, run = join_run(options.run)
    with processes.main_process_first():
        models = load_models(options.models, command="attack", model_options=options.model_options, options=run)
        split = load_split(models[0], options=run, data=options.data, images=options.images, beside=models[1:])
    return measured(options, models, split, processes=processes, run=run)


def measured(
    options: AttackOptions, models: Sequence[Model], split: Split, *, processes: Processes, run: RunOptions
) -> Path | None:
    """Attack images that are loaded already; returns the report's path, None in all processes but the first.

    run: the run options as they hold in this process, with `processes` as join_run gives them.
    """
    for model, name in product(models, options.attacks):
        for member in members_of(name):  # refused here: too few classes for an attack, too large a patch
            algorithm_of(member, Setting(1, len(model.classes), split.size, side=options.patch_side))
    labels = [labels_of(model, split, predicted=options.predicted, doing="attack", options=run) for model in models]
    baseline = baseline_of(models, options.baseline)
    share_of(split, processes)
    identity = _identity(models, split, options, processes, run)
    require_same(options.resume, "attack", identity)
    with processes.main_process_first():
        folder = _folder(options, run, models, split, identity) if processes.is_first else None
    place = options.resume or run.out if folder is None else folder.path
    store = ProgressStore(None if place is None else place / PROGRESS, processes.index)
    works = [ModelAttack(model, split, own, options, run, processes, store) for model, own in zip(models, labels)]
    if folder is None:
        for work in works:
            sweep_all(work)
        _on_corruptions(works)
        return None
    with folder:
        swept = [sweep_all(work) for work in works]
        folder.keep(_record(works, swept, _on_corruptions(works), baseline))
        report = publish(folder)
        store.forget()
        return report


def baseline_of(models: Sequence[Model], alias: str | None) -> str:
    """The alias of the model that mean corruption errors are relative to: as given, else the first CNN, else the first.

    Raises UnknownNameError for a model that is not among them.
    """
    aliases = [model.alias for model in models]
    if alias is not None:
        if alias not in aliases:
            raise UnknownNameError("model for --baseline", alias, aliases)
        return alias
    return next((model.alias for model in models if model.anatomy.family == "cnn"), aliases[0])


def _folder(
    options: AttackOptions, run: RunOptions, models: Sequence[Model], split: Split, identity: Mapping[str, object]
) -> RunFolder:
    """The run's folder: a new one, or that of the resumed run."""
    config = settings(options, run, models=models, split=split, identity=dict(identity))
    if options.resume is not None:
        return RunFolder.reopen(options.resume, needs={"data": None}, config=config)
    aliases = [model.alias for model in models]
    return RunFolder.create(
        "attack",
        name_parts=(*aliases, split.name),
        title=f"Adversarial robustness of {' and '.join(aliases)} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=config,
        formats=run.formats,
    )


def _identity(
    models: Sequence[Model], split: Split, options: AttackOptions, processes: Processes, run: RunOptions
) -> dict[str, object]:
    """What must be equal when a run is resumed; the images themselves are compared part by part."""
    order = -1 if options.downwards else 1  # in the order in which epsilons are tried
    return {
        "models": [model_digest(model) for model in models],
        "aliases": [model.alias for model in models],
        "images": len(split),
        "attacks": list(options.attacks),
        "epsilons": list(options.linf)[::order],
        "single_epsilons": dict(options.single_epsilons or {}),
        "epsilons_l2": list(options.l2)[::order],
        "steps": dict(options.steps) if isinstance(options.steps, Mapping) else options.steps,
        "restarts": options.restarts,
        "patch": [options.patch_side, options.patch_anywhere],
        "seed": run.seed,
        "batch_size": run.batch_size,
        "precision": run.precision,
        "processes": processes.count,
    }


def _record(
    works: Sequence[ModelAttack], swept: Sequence[Sequence[SweptAttack]], corrupted: Sequence[Corrupted], baseline: str
) -> AttackRecord:
    """The record of the first process, after all images have been attacked."""
    curves = [row for work, of_model in zip(works, swept) for row in _curve_rows(work, of_model)]
    checks = [row for work, of_model in zip(works, swept) for row in _check_rows(work, of_model)]
    sample = attack_sample(works, swept)
    insides = {work.model.alias: _inside(work, sample, index) for index, work in enumerate(works)}
    overall = tuple(
        replace(
            row,
            robust=None
            if (at := strongest((c for c in curves if c.model == row.model), JUDGED)) is None
            else at.accuracy,
            checks=sum(check.model == row.model for check in checks),
            failed=sum((check.model, check.state) == (row.model, "failed") for check in checks),
            inconclusive=sum((check.model, check.state) == (row.model, "inconclusive") for check in checks),
            halfway=insides[row.model].halfway,
        )
        for row in _overall_rows(works, swept, corrupted, baseline)
    )
    return AttackRecord(
        overall=overall,
        curves=tuple(curves),
        attacks=tuple(_attack_row(work, each) for work, of_model in zip(works, swept) for each in of_model),
        pairs=tuple(_pair_rows(swept, works[0].run.seed)),
        by_class=tuple(row for work, own in zip(works, swept) for row in _class_rows(work, own, sample)),
        sample=tuple(_sample_rows(works, sample)),
        transfer=tuple(_transfer_rows(works, sample)),
        checks=tuple(checks),
        agreements=tuple(row for found in insides.values() for row in found.agreements),
        blocks=tuple(row for found in insides.values() for row in found.blocks),
        shifts=tuple(row for found in insides.values() for row in found.shifts),
        corruptions=tuple(row for found in corrupted for row in _corruption_rows(found, works[0].run.seed)),
        attacked={work.model.alias: _attacked_arrays(work, of_model) for work, of_model in zip(works, swept)},
        examples={alias: found.examples for alias, found in insides.items() if found.examples is not None},
    )


def title_of(entry: Attack) -> str:
    """An attack with its norm, in a few words: "PGD L∞", "C&W L2"."""
    norm = {"linf": " L∞", "l2": " L2"}.get(entry.norm, "")
    return entry.title.partition(" (")[0] + norm


def _overall_rows(
    works: Sequence[ModelAttack], swept: Sequence[Sequence[SweptAttack]], corrupted: Sequence[Corrupted], baseline: str
) -> Iterator[AttackedModelRow]:
    """Clean accuracies, and errors under corruptions, relative ones where the baseline makes errors of every kind."""
    by_alias = {each.alias: each for each in corrupted}
    for work, of_model in zip(works, swept):
        alias, seed, right = work.model.alias, work.run.seed, of_model[0].outcome.clean
        row = AttackedModelRow(alias, accuracy(right, groups=work.split.groups, seed=seed))
        if alias in by_alias:
            own, other = by_alias[alias], by_alias[baseline] if len(by_alias) > 1 else None
            relative = None if other is None else own.relative_error(other, seed=seed)
            row = replace(
                row, mean_error=own.mean_error(seed=seed), lost=own.lost(right, seed=seed), baseline=baseline,
                relative_error=relative,
            )  # fmt: skip
        yield row


def _curve_rows(work: ModelAttack, swept: Sequence[SweptAttack]) -> Iterator[AttackCurveRow]:
    """Clean accuracy and accuracy at each epsilon, of each attack."""
    clean = accuracy(swept[0].outcome.clean, groups=work.split.groups, seed=work.run.seed)
    for result in swept:
        entry, outcome = ATTACKS[result.attack], result.outcome
        for pixels, estimate in zip((0.0, *outcome.epsilons), (clean, *outcome.accuracies(seed=work.run.seed))):
            epsilon = typed_epsilon(pixels, entry.norm)
            yield AttackCurveRow(work.model.alias, outcome.name, title_of(entry), entry.norm, epsilon, estimate)


def _attack_row(work: ModelAttack, swept: SweptAttack) -> AttackRow:
    entry, outcome = ATTACKS[swept.attack], swept.outcome
    return AttackRow(
        work.model.alias, outcome.name, swept.attack, title_of(entry), entry.norm, entry.kind, entry.paper,
        entry.gradients, work.steps_of(entry), work.options.restarts if entry.random_start else 1,
        right=int(outcome.clean.sum()),
        survived=int(outcome.robust(outcome.epsilons[-1]).sum()),
        broken=int((outcome.clean & outcome.broken_at.isfinite()).sum()),
        median=outcome.median_distance(unit=1 / scale_of(entry.norm)),
        forwards=swept.forwards,
        backwards=swept.backwards,
        seconds=round(swept.seconds, 3),
    )  # fmt: skip


def _attacked_arrays(work: ModelAttack, swept: Sequence[SweptAttack]) -> AttackedArrays:
    return AttackedArrays(
        swept[0].outcome.clean.numpy(),
        work.labels.numpy(),
        {result.outcome.name: result.outcome.broken_at.numpy() for result in swept},
        {result.outcome.name: result.distance.numpy() for result in swept},
    )


def _pair_rows(swept: Sequence[Sequence[SweptAttack]], seed: int) -> Iterator[RobustPairRow]:
    """Paired tests of the models under every attack at every epsilon, all corrected together."""
    matched = [
        (result.outcome, other.outcome)
        for first, second in combinations(swept, 2)
        for result, other in zip(first, second)
    ]  # fmt: skip
    entries = {result.outcome.name: ATTACKS[result.attack] for result in swept[0]}
    for test in paired(matched, seed=seed) if matched else ():
        entry = entries.get(test.name)
        norm: NormName = "linf" if entry is None else entry.norm
        yield RobustPairRow(
            test.name, "none" if entry is None else title_of(entry), norm, typed_epsilon(test.epsilon, norm),
            test.first, test.second, test.only_first, test.only_second, test.difference, test.p, test.p_holm,
        )  # fmt: skip


def _class_rows(work: ModelAttack, swept: Sequence[SweptAttack], sample: AttackSample) -> Iterator[RobustClassRow]:
    """Clean and robust accuracy of every class under the sample's attack; no rows where images have no labels."""
    if work.options.predicted or work.split.labels is None:
        return
    (result,) = (result for result in swept if result.attack == sample.attack)
    labels, classes = work.split.labels.cpu().long(), work.split.classes
    before, after = (
        robust_by_class(result.outcome, labels, classes, epsilon=size, seed=work.run.seed)
        for size in (0.0, sample.epsilon)
    )
    epsilon = typed_epsilon(sample.epsilon, ATTACKS[sample.attack].norm)
    for clean, robust in zip(before, after):
        if clean.accuracy is not None and robust.accuracy is not None:
            yield RobustClassRow(
                work.model.alias, clean.name, result.outcome.name, epsilon, clean.accuracy, robust.accuracy
            )


def _sample_rows(works: Sequence[ModelAttack], sample: AttackSample) -> Iterator[AttackSampleRow]:
    entry = ATTACKS[sample.attack]
    for work, fooled in zip(works, sample.fooled):
        epsilon = typed_epsilon(sample.epsilon, entry.norm)
        count = len(sample.indices)
        yield AttackSampleRow(
            work.model.alias, entry.slug, title_of(entry), entry.norm, epsilon, count, int(fooled.sum())
        )


def _transfer_rows(works: Sequence[ModelAttack], sample: AttackSample) -> Iterator[TransferRow]:
    """Every model on the adversarial images of every model; no rows for one model."""
    if len(works) < 2 or not works[0].options.transfer:
        return
    labels = [work.labels[sample.indices] for work in works]

    def correct(images: Tensor) -> Tensor:
        return torch.stack([work.logits(images).argmax(-1) == own for work, own in zip(works, labels)])

    groups, seed = works[0].split.groups, works[0].run.seed
    matrix = transfer(
        [work.model.alias for work in works], correct(sample.clean), [correct(images) for images in sample.adversarial],
        torch.stack(sample.fooled), groups=None if groups is None else groups[sample.indices],
    )  # fmt: skip
    for source, made_for in enumerate(matrix.aliases):
        for target, shown_to in enumerate(matrix.aliases):
            yield TransferRow(
                made_for, shown_to, matrix.rate(source, target, seed=seed), matrix.accuracy(source, target, seed=seed),
                matrix.clean_accuracy(target, seed=seed),
            )  # fmt: skip


def _check_rows(work: ModelAttack, swept: Sequence[SweptAttack]) -> Iterator[AttackCheckRow]:
    for each in checked(work, swept):
        yield AttackCheckRow(
            work.model.alias, each.name, each.attack, each.expected, each.found, each.state.value, each.against, each.of
        )


def _on_corruptions(works: Sequence[ModelAttack]) -> list[Corrupted]:
    """Each model on all kinds at all severities, each process on its share of the images; nothing with
    --no-corruptions. With --predicted, an image counts as correct where its prediction stays the same."""
    found = []
    for work in works if works[0].options.corruptions else ():
        split, processes = work.split, work.processes
        if work.options.predicted:
            split = replace(split, labels=work.labels.cpu(), classes=work.model.classes)
        share = share_of(split, processes)
        keys = torch.arange(processes.index, len(work.split), processes.count) + (work.run.seed << 20)
        total = len(share) * len(CORRUPTIONS) * len(SEVERITIES)
        with progress(f"{work.model.alias} on corruptions", total, quiet=work.run.quiet) as advance:
            part = on_corrupted(
                work.model, share, keys=keys, batch_size=work.run.batch_size, precision=work.run.precision,
                advance=advance,
            )  # fmt: skip
        whole = processes.gathered(part).permute(1, 2, 0).contiguous()
        found.append(Corrupted(work.model.alias, whole, work.split.groups))
    return found


def _corruption_rows(found: Corrupted, seed: int) -> Iterator[CorruptionRow]:
    for (name, kind), severity in product(CORRUPTIONS.items(), SEVERITIES):
        estimate = found.accuracy(name, severity, seed=seed)
        strength = kind.strengths[severity - 1]
        yield CorruptionRow(found.alias, name, kind.title, kind.description, severity, strength, estimate)


@dataclass(frozen=True)
class _Inside:
    """The changes inside one model for the images that fool it, empty where none does."""

    agreements: list[MapAgreementRow] = field(default_factory=list)
    blocks: list[BlockDistanceRow] = field(default_factory=list)
    shifts: list[AttentionShiftRow] = field(default_factory=list)
    halfway: Estimate | None = None
    examples: AttackExampleArrays | None = None


def _inside(work: ModelAttack, sample: AttackSample, index: int) -> _Inside:
    """Agreements of maps, distances by block, shifts of attention and the examples of one model."""
    places = evenly_spaced(sample.fooled[index].nonzero().flatten(), MEASURED)
    if not len(places) or not work.options.inside:
        return _Inside()
    model, seed, size = work.model, work.run.seed, work.run.batch_size
    clean, changed = sample.clean[places], sample.adversarial[index][places]
    truth, wrong = work.labels[sample.indices[places]], work.logits(changed).argmax(-1)
    method = preferred_method(model)

    def maps(images: Tensor, targets: Tensor, name: str) -> Tensor:
        return explain(model, images, targets=targets, method=name, batch_size=size, seed=seed).detach().cpu()

    before, after = (maps(images, truth, method) for images in (clean, changed))
    pairs = {
        f"{method} for the true class": (before, after),
        f"{method} for each prediction": (before, maps(changed, wrong, method)),
    }
    if _ALSO in methods_for(model) and method != _ALSO:
        pairs[_ALSO] = maps(clean, truth, _ALSO), maps(changed, truth, _ALSO)
    others: dict[Counterpart, Tensor] = {
        "adversarial": changed,
        "noise": with_noise(clean, changed, ATTACKS[sample.attack].norm, seed=seed),
    }
    if len(places) > 1:
        others["another image"] = clean.roll(len(places) // 2, 0)  # half the sample away, so mostly of another class
    found = cosines(model, clean, {str(kind): images for kind, images in others.items()}, batch_size=size)
    block = halfway_block(found["adversarial"], found["another image"]) if len(places) > 1 else None
    return _Inside(
        [row for title, both in pairs.items() for row in _agreement_rows(work, title, *both)],
        [
            BlockDistanceRow(model.alias, at, kind, _distance(values, seed))
            for kind in others
            for at, values in enumerate(found[kind])
        ],
        list(_shift_rows(work, clean, changed)),
        None if block is None else Estimate(float(block), n=len(places), unit=""),
        _examples(work, sample, places, clean, changed, before, after),
    )


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


def _agreement_rows(work: ModelAttack, title: str, before: Tensor, after: Tensor) -> Iterator[MapAgreementRow]:
    agreement = map_agreement(before, after)
    usable = agreement.usable
    if bool(usable.any()):
        spearman, top = (
            bootstrap_mean(values[usable].double().numpy(), seed=work.run.seed, unit=unit)
            for values, unit in ((agreement.spearman, ""), (agreement.top, "fraction"))
        )
        yield MapAgreementRow(work.model.alias, title.replace(" ", "-"), title, spearman, top)


def _distance(values: Tensor, seed: int) -> Estimate:
    """One minus the mean cosine, with its interval; at least 0."""
    mean = bootstrap_mean(values.double().numpy(), seed=seed, unit="", draws=_DRAWS)
    low, high = (None if end is None else max(0.0, 1 - end) for end in (mean.high, mean.low))
    return Estimate(max(0.0, 1 - mean.value), low, high, len(values), "")


def _shift_rows(work: ModelAttack, clean: Tensor, changed: Tensor) -> Iterator[AttentionShiftRow]:
    for shift in shifts(work.model, clean, changed, batch_size=work.run.batch_size):
        statistic = STATISTICS[shift.name]
        for layer, (before, after) in enumerate(zip(shift.before, shift.after)):
            if bool(before.isfinite().all() and after.isfinite().all()):
                change = bootstrap_mean(
                    (after - before).double().numpy(), seed=work.run.seed, unit=statistic.unit, draws=_DRAWS
                )
                yield AttentionShiftRow(
                    work.model.alias, shift.name, statistic.title, layer, float(before.mean()), change
                )


def _examples(
    work: ModelAttack, sample: AttackSample, places: Tensor, clean: Tensor, changed: Tensor, before: Tensor,
    after: Tensor,
) -> AttackExampleArrays:  # fmt: skip
    """Pixels, perturbations, maps and predictions of a few images."""
    shown = evenly_spaced(torch.arange(len(places)), SHOWN)
    clean, changed = clean[shown], changed[shown]
    grid = int(before.shape[-2]), int(before.shape[-1])
    size = grid[0] * -(-clean.shape[-2] // grid[0]), grid[1] * -(-clean.shape[-1] // grid[1])
    probabilities = [work.logits(images).softmax(-1) for images in (clean, changed)]
    names = work.model.classes
    return AttackExampleArrays(
        pixels=(clean * 255).round().byte().numpy(),
        change=(changed - clean).half().numpy(),
        before=as_shares(before[shown], size=size, grid=grid).float().numpy(),
        after=as_shares(after[shown], size=size, grid=grid).float().numpy(),
        answers=np.array([[names[int(index)] for index in of_images.argmax(-1)] for of_images in probabilities]),
        probability=torch.stack([of_images.amax(-1) for of_images in probabilities]).numpy(),
        image=sample.indices[places[shown]].numpy(),
        method=np.array(ATTRIBUTIONS[preferred_method(work.model)].title),
    )
