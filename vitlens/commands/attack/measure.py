"""Accuracy of models under attack over epsilon and under common corruptions, and examples with their maps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.failures.common_corruptions import Corrupted, on_corrupted
from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.analysis.robustness.curve import paired
from vitlens.analysis.robustness.transfer import transfer
from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import ATTACKS, Attack, NormName, members_of
from vitlens.attribution.explain import explain, preferred_method
from vitlens.commands.attack import record as rows
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.sweep import AttackSample, ModelAttack, attack_sample, checked, evenly_spaced, sweep_all
from vitlens.commands.run.load import load_split
from vitlens.commands.run.resume import resumable
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of
from vitlens.data.split import Split
from vitlens.errors import UnknownNameError
from vitlens.models.model import Model
from vitlens.processes import share_of

SHOWN: Final = 5  # fooled images with their maps in the figure


def measure(options: AttackOptions, models: Sequence[Model] = (), split: Split | None = None) -> Path | None:
    """Attack models on the same images and write the report; returns its path.

    models, split: where they are loaded already. All models are attacked at the input size of the first model. Of
    several processes each takes its share of the images; all but the first return None. Raises InputError (or one of
    its kind) before anything is written.
    """
    run = Run("attack", options, images=False, load=(lambda _: tuple(models)) if models else None)
    if split is None:
        with run.processes.main_process_first():
            split = load_split(
                run.model, options=run.run, data=options.data, images=options.images, beside=run.models[1:]
            )
    run.splits = [split] * len(run.models)
    for model, name in product(run.models, options.attacks):
        for member in members_of(name):  # refused here: too few classes for an attack, too large a patch
            algorithm_of(member, Setting(1, len(model.classes), split.size, side=options.patch_side))
    predicted, baseline = options.predicted, options.baseline
    labels = [labels_of(each, split, predicted=predicted, doing="attack", options=run.run) for each in run.models]
    if baseline is not None and baseline not in run.aliases:
        raise UnknownNameError("model for --baseline", baseline, run.aliases)
    baseline = baseline or next((each.alias for each in run.models if each.anatomy.family == "cnn"), run.aliases[0])
    _ = run.shares  # fewer images than processes are refused before anything is written
    order = -1 if options.downwards else 1  # in which epsilons are tried
    settings = {
        "attacks": list(options.attacks), "epsilons": list(options.linf)[::order],
        "epsilons_l2": list(options.l2)[::order], "single_epsilons": dict(options.single_epsilons or {}),
        "steps": dict(options.steps) if isinstance(options.steps, Mapping) else options.steps,
        "restarts": options.restarts, "patch": [options.patch_side, options.patch_anywhere],
    }  # fmt: skip
    with resumable(run, "Adversarial robustness of", options.resume, **settings) as (writing, store):
        works = [ModelAttack(model, own, run, store) for model, own in zip(run.models, labels)]
        for work in works:
            sweep_all(work)
        corrupted = [_on_corruptions(work) for work in works] if options.corruptions else []
        return writing.publish(lambda: _record(works, corrupted, baseline))


def _on_corruptions(work: ModelAttack) -> Corrupted:
    """A model on all kinds at all severities, each process on its share of the images. With --predicted, an image
    counts as correct where its prediction stays the same."""
    run, processes, split = work.run, work.run.processes, work.run.split
    if run.options.predicted:
        split = replace(split, labels=work.labels.cpu(), classes=work.model.classes)
    share = share_of(split, processes)
    keys = torch.arange(processes.index, len(split), processes.count) + (run.run.seed << 20)
    total = len(share) * len(CORRUPTIONS) * len(SEVERITIES)
    with run.progress(f"{work.model.alias} on corruptions", total) as advance:
        part = on_corrupted(work.model, share, keys=keys, **run.passes, advance=advance)
    return Corrupted(work.model.alias, processes.gathered(part).permute(1, 2, 0).contiguous(), split.groups)


def _record(works: Sequence[ModelAttack], corrupted: Sequence[Corrupted], baseline: str) -> rows.AttackRecord:
    """The record of the first process, after all images have been attacked."""
    sample, seed = attack_sample(works), works[0].run.run.seed
    curves = tuple(row for work in works for row in _curve_rows(work))
    checks = tuple(
        rows.AttackCheckRow(
            work.model.alias, check.name, check.attack, check.expected, check.found, check.state.value, check.against,
            check.of,
        )
        for work in works for check in checked(work)
    )  # fmt: skip
    of_corrupted, overall = {each.alias: each for each in corrupted}, []
    for work, fooled in zip(works, sample.fooled):
        alias, norm, own = work.model.alias, sample.attack.norm, of_corrupted.get(work.model.alias)
        judged = rows.strongest((row for row in curves if row.model == alias), rows.JUDGED)
        row = rows.AttackedModelRow(
            alias, accuracy(work.clean, groups=work.run.split.groups, seed=seed),
            None if judged is None else judged.accuracy,
            sum((check.model, check.state) == (alias, "failed") for check in checks),
            f"{title_of(sample.attack)} at {rows.epsilon_words(rows.typed_epsilon(sample.epsilon, norm), norm)}",
            int(fooled.sum()),
        )  # fmt: skip
        if own is not None:  # its errors are relative where the baseline makes errors of every kind
            relative = own.relative_error(of_corrupted[baseline], seed=seed) if len(corrupted) > 1 else None
            mean, lost = own.mean_error(seed=seed), own.lost(work.clean, seed=seed)
            row = replace(row, mean_error=mean, lost=lost, baseline=baseline, relative_error=relative)
        overall.append(row)
    return rows.AttackRecord(
        overall=tuple(overall),
        curves=curves,
        attacks=tuple(row for work in works for row in _attack_rows(work)),
        pairs=tuple(_pair_rows(works)),
        transfer=tuple(_transfer_rows(works, sample)),
        checks=checks,
        corruptions=tuple(
            rows.CorruptionRow(
                found.alias, name, kind.title, kind.description, severity, kind.strengths[severity - 1],
                found.accuracy(name, severity, seed=seed),
            )
            for found in corrupted for (name, kind), severity in product(CORRUPTIONS.items(), SEVERITIES)
        ),
        attacked={
            work.model.alias: rows.AttackedArrays(
                work.clean.numpy(),
                {result.outcome.name: result.outcome.broken_at.numpy() for result in work.swept},
                {result.outcome.name: result.distance.numpy() for result in work.swept},
            )
            for work in works
        },
        examples={
            work.model.alias: found for index, work in enumerate(works) if (found := _examples(work, sample, index))
        },
    )  # fmt: skip


def title_of(entry: Attack) -> str:
    """An attack with its norm, in a few words: "PGD L∞", "C&W L2"."""
    norm = {"linf": " L∞", "l2": " L2"}.get(entry.norm, "")
    return entry.title.partition(" (")[0] + norm


def _curve_rows(work: ModelAttack) -> Iterator[rows.AttackCurveRow]:
    """Clean accuracy and accuracy at each epsilon."""
    seed = work.run.run.seed
    for swept in work.swept:
        entry, outcome = ATTACKS[swept.attack], swept.outcome
        clean = accuracy(outcome.clean, groups=outcome.groups, seed=seed)
        for pixels, estimate in zip((0.0, *outcome.epsilons), (clean, *outcome.accuracies(seed=seed))):
            epsilon = rows.typed_epsilon(pixels, entry.norm)
            yield rows.AttackCurveRow(work.model.alias, outcome.name, title_of(entry), entry.norm, epsilon, estimate)


def _attack_rows(work: ModelAttack) -> Iterator[rows.AttackRow]:
    for swept in work.swept:
        entry, outcome = ATTACKS[swept.attack], swept.outcome
        yield rows.AttackRow(
            work.model.alias, outcome.name, swept.attack, title_of(entry), entry.norm, entry.kind, entry.paper,
            work.steps_of(entry), work.run.options.restarts if entry.random_start else 1,
            right=int(outcome.clean.sum()),
            broken=int((outcome.clean & outcome.broken_at.isfinite()).sum()),
            median=outcome.median_distance(unit=1 / rows.scale_of(entry.norm)),
            forwards=swept.forwards, backwards=swept.backwards, seconds=round(swept.seconds, 3),
        )  # fmt: skip


def _pair_rows(works: Sequence[ModelAttack]) -> Iterator[rows.RobustPairRow]:
    """Paired tests of the models under every attack at every epsilon, all corrected together."""
    matched = [
        (result.outcome, other.outcome)
        for first, second in combinations(works, 2) for result, other in zip(first.swept, second.swept)
    ]  # fmt: skip
    entries = {result.outcome.name: ATTACKS[result.attack] for result in works[0].swept}
    for test in paired(matched, seed=works[0].run.run.seed) if matched else ():
        entry = entries.get(test.name)
        norm: NormName = "linf" if entry is None else entry.norm
        yield rows.RobustPairRow(
            test.name, "none" if entry is None else title_of(entry), norm, rows.typed_epsilon(test.epsilon, norm),
            test.first, test.second, test.only_first, test.only_second, test.difference, test.p, test.p_holm,
        )  # fmt: skip


def _transfer_rows(works: Sequence[ModelAttack], sample: AttackSample) -> Iterator[rows.TransferRow]:
    """Every model on the adversarial images of every model; no rows for one model."""
    run = works[0].run
    if len(works) < 2 or not run.options.transfer:
        return
    labels = [work.labels[sample.indices] for work in works]

    def correct(images: Tensor) -> Tensor:
        return torch.stack([work.logits(images).argmax(-1) == own for work, own in zip(works, labels)])

    groups, seed = run.split.groups, run.run.seed
    matrix = transfer(
        run.aliases, correct(sample.clean), [correct(images) for images in sample.adversarial],
        torch.stack(sample.fooled), groups=None if groups is None else groups[sample.indices],
    )  # fmt: skip
    for source, target in product(range(len(works)), repeat=2):
        yield rows.TransferRow(
            run.aliases[source], run.aliases[target], matrix.rate(source, target, seed=seed),
            matrix.accuracy(source, target, seed=seed), matrix.clean_accuracy(target, seed=seed),
        )  # fmt: skip


def _examples(work: ModelAttack, sample: AttackSample, index: int) -> rows.AttackExampleArrays | None:
    """Pixels, perturbations, maps of the true class and predictions of images that fool a model; None without any."""
    places = evenly_spaced(sample.fooled[index].nonzero().flatten(), SHOWN)
    if not len(places) or not work.run.options.inside:
        return None
    run, clean, changed = work.run.run, sample.clean[places], sample.adversarial[index][places]
    image = sample.indices[places]
    before, after = (
        explain(
            work.model, images, targets=work.labels[image], method=preferred_method(work.model),
            batch_size=run.batch_size, seed=run.seed,
        ).detach().cpu().float().nan_to_num(0.0, 0.0, 0.0).clamp_min(0).numpy()
        for images in (clean, changed)
    )  # fmt: skip
    probabilities = [work.logits(images).softmax(-1) for images in (clean, changed)]
    return rows.AttackExampleArrays(
        (clean * 255).round().byte().numpy(), (changed - clean).half().numpy(), before, after,
        answers=np.array(
            [[work.model.classes[int(each)] for each in of_images.argmax(-1)] for of_images in probabilities]
        ),
        probability=torch.stack([of_images.amax(-1) for of_images in probabilities]).numpy(), image=image.numpy(),
    )  # fmt: skip
