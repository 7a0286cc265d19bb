"""Accuracy of models under attack over epsilon and under common corruptions, and the changes inside the models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.failures.disturbances import CORRUPTIONS, SEVERITIES
from vitlens.analysis.failures.operations import Corrupted, correct_after
from vitlens.analysis.faithfulness.maps import map_overlap
from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import ATTACKS, Attack, NormName
from vitlens.attacks.robustness import cosines, halfway_block, transfers
from vitlens.attribution.explain import explain, methods_for, preferred_method
from vitlens.commands.attack import record as rows
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.survivors import Survivors, follow_up, survivors_rows
from vitlens.commands.attack.sweep import AttackSample, ModelAttack, attack_sample, checked, evenly_spaced, sweep_all
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import load_split
from vitlens.commands.run.progress import phase
from vitlens.commands.run.resume import resumable, with_its_settings
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of, require_label_source
from vitlens.commands.shared.comparison import compared
from vitlens.data.split import Split
from vitlens.errors import UnknownNameError
from vitlens.files import named_file, write_atomically
from vitlens.models.model import Model
from vitlens.processes import share_of
from vitlens.uncertainty import Estimate, bootstrap_mean

MEASURED: Final = 64  # fooled images whose maps, attention and blocks are compared
SHOWN: Final = 5  # of them with their maps in the figure
_DRAWS: Final = 2000  # of a bootstrap: there is one for every block and layer
_INSIDE: Final = ("agreements", "blocks")  # tables of what changes inside the models
_ALSO: Final = "rollout"  # compared too where the model has attention, as a method that explains no class


def measure(options: AttackOptions, models: Sequence[Model] = (), split: Split | None = None) -> Path | None:
    """Attack models on the same images and write the report; returns its path.

    models, split: where they are loaded already. All models are attacked at the input size of the first model. Of
    several processes each takes its share of the images; all but the first return None. Raises InputError (or one of
    its kind) before anything is written.
    """
    options = with_its_settings(options, "attack")
    if split is None and not options.predicted and options.run.labels is None:
        require_label_source(options.data, options.images, doing="attack")
    run = Run("attack", options, images=False, load=(lambda _: tuple(models)) if models else None)
    if split is None:
        with run.processes.main_process_first():
            split = load_split(
                run.model,
                options=run.run,
                data=options.data,
                images=options.images,
                scenes=1,
                beside=run.models[1:],
            )
    run.splits = [split] * len(run.models)
    for model, name in product(run.models, options.attacks):
        for member in ATTACKS[name].parts:  # refused here: too few classes for an attack, too large a patch
            algorithm_of(member, Setting(1, len(model.classes), split.size, side=options.patch_side))
    predicted = options.predicted
    baseline = options.baseline
    labels = [labels_of(each, split, predicted=predicted, doing="attack", options=run.run) for each in run.models]
    if baseline is not None and baseline not in run.aliases:
        raise UnknownNameError("model for --baseline", baseline, run.aliases)
    baseline = baseline or next((each.alias for each in run.models if each.anatomy.family == "cnn"), run.aliases[0])
    _ = run.shares  # fewer images than processes are refused before anything is written
    order = -1 if options.downwards else 1  # in which epsilons are tried
    settings = {
        "attacks": list(options.attacks),
        "epsilons": list(options.linf)[::order],
        "epsilons_l2": list(options.l2)[::order],
        "single_epsilons": dict(options.single_epsilons or {}),
        "steps": dict(options.steps) if isinstance(options.steps, Mapping) else options.steps,
        "restarts": options.restarts,
        "step": options.step,
        "patch": [options.patch_side, options.patch_anywhere],
    }
    with resumable(run, "Adversarial robustness of", options.resume, **settings) as (writing, store):
        works = [ModelAttack(model, own, run, store) for model, own in zip(run.models, labels)]
        for work in works:
            sweep_all(work)
        survivors = follow_up(works)
        corrupted = [_on_corruptions(work) for work in works] if options.corruptions else []
        if writing.folder is None:
            return None
        with phase("Adversarial images, and what changes inside the models"):
            sample = attack_sample(works)
            record = _record(works, sample, corrupted, survivors, baseline)
        if options.save_images:
            _save_images(works, sample, writing.folder)
        if options.self_checks == "all":  # they can take longer than the attacks
            writing.publish(lambda: record, final=False)
        checks = [rows.AttackCheckRow(work.model.alias, **vars(check)) for work in works for check in checked(work)]
        return writing.publish(lambda: _with_checks(record, checks))


def _on_corruptions(work: ModelAttack) -> Corrupted:
    """Return a model on all kinds at all severities, each process on its share of the images.

    With --predicted, an image counts as correct where its prediction stays the same.
    """
    run = work.run
    processes = work.run.processes
    split = work.run.split
    if run.options.predicted:
        split = replace(split, labels=work.labels.cpu(), classes=work.model.classes)
    share = share_of(split, processes)
    keys = torch.arange(processes.index, len(split), processes.count) + (run.run.seed << 20)
    changes = [(known.operation, strength) for known in CORRUPTIONS.values() for strength in known.levels]
    with run.progress(f"{work.model.alias} on corruptions", len(share) * len(changes)) as advance:
        part = correct_after(work.model, share, changes, keys=keys, **run.passes, advance=advance)
    correct = processes.gathered(part.T.contiguous()).T.contiguous()
    return Corrupted(work.model.alias, correct.view(len(CORRUPTIONS), len(SEVERITIES), -1), split.groups)


def _save_images(works: Sequence[ModelAttack], sample: AttackSample, folder: RunFolder) -> None:
    """Write the images of the sample that fool each model as PNG, rounded to 8 bits, in adversarial/<model>/."""
    for work, images, fooled in zip(works, sample.adversarial, sample.fooled):
        for at in fooled.nonzero().flatten().tolist():
            number = int(sample.indices[at])
            pixels = (images[at] * 255).round().byte().permute(1, 2, 0).numpy()
            path = folder.place("adversarial", named_file(work.model.alias, ""), f"{number:05}.png")
            with write_atomically(path) as temporary:
                Image.fromarray(np.ascontiguousarray(pixels)).save(temporary, format="PNG")


def _record(
    works: Sequence[ModelAttack],
    sample: AttackSample,
    corrupted: Sequence[Corrupted],
    survivors: Sequence[Survivors],
    baseline: str,
) -> rows.AttackRecord:
    """Return the record of the first process after all images were attacked, without the self-checks."""
    seed = works[0].run.run.seed
    insides = [_inside(work, sample, index) for index, work in enumerate(works)]
    curves = tuple(row for work in works for row in _curve_rows(work)) + _worst_case_rows(works, survivors)
    of_corrupted = {each.alias: each for each in corrupted}
    overall = []
    for work, inside, fooled in zip(works, insides, sample.fooled):
        alias = work.model.alias
        norm = sample.attack.norm
        own = of_corrupted.get(work.model.alias)
        judged = rows.strongest((row for row in curves if row.model == alias), rows.JUDGED)
        row = rows.AttackedModelRow(
            alias,
            accuracy(work.clean, groups=work.run.split.groups),
            None if judged is None else judged.accuracy,
            None,
            f"{title_of(sample.attack)} at {rows.epsilon_words(rows.typed_epsilon(sample.epsilon, norm), norm)}",
            int(fooled.sum()),
            inside.get("halfway"),
        )
        if own is not None:  # its errors are relative where the baseline makes errors of every kind
            relative = own.relative_error(of_corrupted[baseline], seed=seed) if len(corrupted) > 1 else None
            mean = own.mean_error(seed=seed)
            lost = own.lost(work.clean, seed=seed)
            row = replace(row, mean_error=mean, lost=lost, baseline=baseline, relative_error=relative)
        overall.append(row)
    within: dict[str, Any] = {name: tuple(row for each in insides for row in each.get(name, ())) for name in _INSIDE}
    return rows.AttackRecord(
        overall=tuple(overall),
        curves=curves,
        attacks=tuple(row for work in works for row in _attack_rows(work)),
        pairs=tuple(_pair_rows(works, survivors)),
        survivors=survivors_rows(works, survivors),
        corruption_pairs=_corruption_pairs(corrupted, seed),
        transfer=tuple(_transfer_rows(works, sample)),
        **within,
        corruptions=tuple(
            rows.CorruptionRow(
                found.alias,
                name,
                kind.title,
                kind.description,
                severity,
                kind.levels[severity - 1],
                found.accuracy(name, severity),
            )
            for found in corrupted
            for (name, kind), severity in product(CORRUPTIONS.items(), SEVERITIES)
        ),
        attacked={
            work.model.alias: rows.AttackedArrays(
                work.clean.numpy(),
                {outcome.name: outcome.broken_at.numpy() for outcome in work.swept.values()},
                {outcome.name: outcome.distance.numpy() for outcome in work.swept.values()},
            )
            for work in works
        },
        adversarial=_adversarial(works, sample) if works[0].run.options.save_images else {},
        examples={work.model.alias: each["examples"] for work, each in zip(works, insides) if each},
    )


def _adversarial(works: Sequence[ModelAttack], sample: AttackSample) -> dict[str, rows.AdversarialArrays]:
    """Return the exact images of the sample, by model."""
    arrays = {}
    for work, images, fooled in zip(works, sample.adversarial, sample.fooled):
        arrays[work.model.alias] = rows.AdversarialArrays(images.numpy(), fooled.numpy(), sample.indices.numpy())
    return arrays


def _with_checks(record: rows.AttackRecord, checks: Sequence[rows.AttackCheckRow]) -> rows.AttackRecord:
    """Return a record with the self-checks of all models."""
    overall = []
    for row in record.overall:
        failed = [check for check in checks if check.model == row.model and check.state == "failed"]
        overall.append(replace(row, failed=len(failed)))
    return replace(record, overall=tuple(overall), checks=tuple(checks))


def title_of(entry: Attack) -> str:
    """Return an attack with its norm, in a few words: "PGD L∞", "C&W L2"."""
    norm = {"linf": " L∞", "l2": " L2"}.get(entry.norm, "")
    return entry.title.partition(" (")[0] + norm


def _curve_rows(work: ModelAttack) -> Iterator[rows.AttackCurveRow]:
    """Clean accuracy and accuracy at each epsilon."""
    for name, outcome in work.swept.items():
        entry = ATTACKS[name]
        clean = accuracy(outcome.clean, groups=outcome.groups)
        for pixels, estimate in zip((0.0, *outcome.epsilons), (clean, *outcome.accuracies())):
            epsilon = rows.typed_epsilon(pixels, entry.norm)
            yield rows.AttackCurveRow(work.model.alias, outcome.name, title_of(entry), entry.norm, epsilon, estimate)


def _worst_case_rows(works: Sequence[ModelAttack], survivors: Sequence[Survivors]) -> tuple[rows.AttackCurveRow, ...]:
    """Return the accuracy under every L∞ attack together, where stronger ones were run on the survivors of a model."""
    found = []
    for work, each in zip(works, survivors):
        estimate = accuracy(each.after, groups=work.run.split.groups)
        epsilon = rows.typed_epsilon(each.epsilon, "linf")
        found.append(
            rows.AttackCurveRow(work.model.alias, rows.WORST_CASE, rows.WORST_TITLE, "linf", epsilon, estimate)
        )
    return tuple(found)


def _corruption_pairs(corrupted: Sequence[Corrupted], seed: int) -> tuple[rows.CorruptionPairRow, ...]:
    """Return paired tests of the models under each corruption at each severity, all corrected together."""
    tried: list[tuple[str, str, int]] = []
    pairs: list[tuple[str, str, NDArray[Any], NDArray[Any]]] = []
    for first, second in combinations(corrupted, 2):
        for place, (name, severity) in enumerate(product(CORRUPTIONS, SEVERITIES)):
            kind, level = divmod(place, len(SEVERITIES))
            one = first.correct[kind, level].numpy()
            other = second.correct[kind, level].numpy()
            tried.append((name, CORRUPTIONS[name].title, severity))
            pairs.append((first.alias, second.alias, one, other))
    if not pairs:
        return ()
    groups = None if corrupted[0].groups is None else corrupted[0].groups.numpy()
    found = []
    for (name, title, severity), row in zip(tried, compared(pairs, groups=groups, seed=seed)):
        difference = row.difference or Estimate(0.0, unit="points")
        found.append(
            rows.CorruptionPairRow(name, title, severity, row.first, row.second, difference, row.p, row.p_holm)
        )
    return tuple(found)


def _attack_rows(work: ModelAttack) -> Iterator[rows.AttackRow]:
    for name, outcome in work.swept.items():
        entry = ATTACKS[name]
        yield rows.AttackRow(
            work.model.alias,
            outcome.name,
            name,
            title_of(entry),
            entry.norm,
            entry.kind,
            entry.paper,
            work.steps_of(entry),
            work.run.options.restarts if entry.random_start else 1,
            right=int(outcome.clean.sum()),
            broken=int((outcome.clean & outcome.broken_at.isfinite()).sum()),
            median=outcome.median_distance(unit=1 / rows.scale_of(entry.norm)),
            forwards=outcome.forwards,
            backwards=outcome.backwards,
            seconds=round(outcome.seconds, 3),
        )


def _pair_rows(works: Sequence[ModelAttack], survivors: Sequence[Survivors]) -> Iterator[rows.RobustPairRow]:
    """Paired tests of the models on clean images and under every attack at every epsilon, all corrected together."""
    after = {work.model.alias: each for work, each in zip(works, survivors)}
    tried: list[tuple[str, str, NormName, float]] = []
    pairs = []
    for first, second in combinations(works, 2):
        both = first.model.alias, second.model.alias
        tried.append(("clean", "none", "linf", 0.0))
        pairs.append((*both, first.clean.numpy(), second.clean.numpy()))
        for name, outcome in first.swept.items():
            norm = ATTACKS[name].norm
            for epsilon in outcome.epsilons:
                tried.append((outcome.name, title_of(ATTACKS[name]), norm, rows.typed_epsilon(epsilon, norm)))
                one, other = (each.swept[name].robust(epsilon).numpy() for each in (first, second))
                pairs.append((*both, one, other))
        if after:
            left, right = (after[alias].after.numpy() for alias in both)
            epsilon = rows.typed_epsilon(after[both[0]].epsilon, "linf")
            tried.append((rows.WORST_CASE, rows.WORST_TITLE, "linf", epsilon))
            pairs.append((*both, left, right))
    run = works[0].run
    groups = None if run.split.groups is None else run.split.groups.numpy()
    for place, row in zip(tried, compared(pairs, groups=groups, seed=run.run.seed)):
        counts = row.only_first_right, row.only_second_right
        difference = row.difference or Estimate(0.0, unit="points")
        yield rows.RobustPairRow(*place, row.first, row.second, *counts, difference, row.p, row.p_holm)


def _transfer_rows(works: Sequence[ModelAttack], sample: AttackSample) -> Iterator[rows.TransferRow]:
    """Yield every model on the adversarial images of every model; no rows for one model."""
    run = works[0].run
    if len(works) < 2 or not run.options.transfer:
        return
    labels = [work.labels[sample.indices] for work in works]

    def correct(images: Tensor) -> Tensor:
        return torch.stack([work.logits(images).argmax(-1) == own for work, own in zip(works, labels)])

    groups = run.split.groups
    for one in transfers(
        correct(sample.clean),
        [correct(images) for images in sample.adversarial],
        torch.stack(sample.fooled),
        groups=None if groups is None else groups[sample.indices],
    ):
        yield rows.TransferRow(run.aliases[one.source], run.aliases[one.target], one.rate, one.accuracy, one.clean)


@phase("What changes inside the model")
def _inside(work: ModelAttack, sample: AttackSample, index: int) -> dict[str, Any]:
    """Return what changes inside one model for images that fool it: rows, examples, and halfway, the block from which
    on its outputs are halfway to those for another image; nothing where there are no such images."""
    places = evenly_spaced(sample.fooled[index].nonzero().flatten(), MEASURED)
    if not len(places) or not work.run.options.inside:
        return {}
    model = work.model
    seed = work.run.run.seed
    size = work.run.run.batch_size
    clean = sample.clean[places]
    changed = sample.adversarial[index][places]
    truth = work.labels[sample.indices[places]]
    wrong = work.logits(changed).argmax(-1)
    method = preferred_method(model)
    members = work.run.split.groups
    groups = None if members is None else members.cpu().numpy()[sample.indices[places].cpu().numpy()]

    def maps(images: Tensor, targets: Tensor, name: str) -> Tensor:
        return explain(model, images, targets=targets, method=name, batch_size=size, seed=seed).detach().cpu()

    before, after = (maps(images, truth, method) for images in (clean, changed))
    pairs = {
        f"{method} for the true class": (before, after),
        f"{method} for each prediction": (before, maps(changed, wrong, method)),
    }
    if _ALSO in methods_for(model) and method != _ALSO:
        pairs[_ALSO] = maps(clean, truth, _ALSO), maps(changed, truth, _ALSO)
    noise = with_noise(clean, changed, sample.attack.norm, seed=seed)
    others: dict[rows.Counterpart, Tensor] = {"adversarial": changed, "noise": noise}
    if len(places) > 1:
        others["another image"] = clean.roll(len(places) // 2, 0)  # half the sample away, so mostly of another class
    found = cosines(model, clean, {str(kind): images for kind, images in others.items()}, batch_size=size)
    block = halfway_block(found["adversarial"], found["another image"]) if len(places) > 1 else None
    return {
        "agreements": _agreement_rows(model.alias, pairs, groups, seed),
        "blocks": [
            rows.BlockDistanceRow(model.alias, at, kind, _distance(values, groups, seed))
            for kind in others
            for at, values in enumerate(found[kind])
        ],
        "examples": _examples(work, sample.indices[places], clean, changed, before, after),
        "halfway": None if block is None else Estimate(float(block), n=len(places), unit=""),
    }


def _agreement_rows(
    alias: str, pairs: Mapping[str, tuple[Tensor, Tensor]], groups: NDArray[Any] | None, seed: int
) -> Iterator[rows.MapAgreementRow]:
    for title, both in pairs.items():
        grid = (both[0].shape[-2], both[0].shape[-1])
        agreement = map_overlap(*both, size=grid, grid=grid)
        if bool(agreement.usable.any()):
            spearman, top = (
                bootstrap_mean(
                    values[agreement.usable].double().numpy(),
                    groups=None if groups is None else groups[agreement.usable.numpy()],
                    seed=seed,
                    unit=unit,
                    least=least,
                    most=1.0,
                )
                for values, unit, least in ((agreement.spearman, "", -1.0), (agreement.top, "fraction", 0.0))
            )
            yield rows.MapAgreementRow(alias, title.replace(" ", "-"), title, spearman, top)


def with_noise(clean: Tensor, changed: Tensor, norm: str, *, seed: int) -> Tensor:
    """Return the clean images with random noise of each perturbation's norm, as a baseline for the effect of its
    size."""
    generator = torch.Generator().manual_seed(seed)
    change = changed - clean
    if norm == "linf":
        signs = torch.randint(0, 2, clean.shape, generator=generator) * 2.0 - 1
        return (clean + signs * change.flatten(1).abs().amax(1)[:, None, None, None]).clamp(0, 1)
    noise = torch.randn(clean.shape, generator=generator)
    target, drawn = (values.flatten(1).norm(dim=1)[:, None, None, None] for values in (change, noise))
    noisy: Tensor = (clean + noise * target / drawn).clamp(0, 1)
    return noisy


def _distance(values: Tensor, groups: NDArray[Any] | None, seed: int) -> Estimate:
    """Return one minus the mean cosine, with its interval; at least 0."""
    cosines = values.double().numpy()
    mean = bootstrap_mean(cosines, groups=groups, seed=seed, unit="", draws=_DRAWS, least=-1.0, most=1.0)
    low, high = (None if end is None else max(0.0, 1 - end) for end in (mean.high, mean.low))
    return Estimate(max(0.0, 1 - mean.value), low, high, len(values), "")


def _examples(
    work: ModelAttack, image: Tensor, clean: Tensor, changed: Tensor, *maps: Tensor
) -> rows.AttackExampleArrays:
    """Pixels, perturbations, maps (before, after) and predictions of a few images; image: their numbers."""
    shown = evenly_spaced(torch.arange(len(clean)), SHOWN)
    names = work.model.classes
    clean = clean[shown]
    changed = changed[shown]
    before, after = (each[shown].float().nan_to_num(0.0, 0.0, 0.0).clamp_min(0).numpy() for each in maps)
    probabilities = [work.logits(images).softmax(-1) for images in (clean, changed)]
    return rows.AttackExampleArrays(
        (clean * 255).round().byte().numpy(),
        (changed - clean).half().numpy(),
        before,
        after,
        answers=np.array([[names[int(index)] for index in of_images.argmax(-1)] for of_images in probabilities]),
        probability=torch.stack([of_images.amax(-1) for of_images in probabilities]).numpy(),
        image=image[shown].numpy(),
    )
