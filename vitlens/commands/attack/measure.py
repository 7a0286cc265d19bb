"""Robust accuracy of models over epsilon and under common corruptions, and the changes inside the
models.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlens.analysis.failures.disturbances import CORRUPTIONS, SEVERITIES
from vitlens.analysis.failures.operations import Corrupted, correct_after
from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import ATTACKS
from vitlens.commands.attack.checks import self_checks
from vitlens.commands.attack.inside import changes_inside
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.reasons import robustness_reasons
from vitlens.commands.attack.record import AttackCheckRow, AttackRecord
from vitlens.commands.attack.sample import AttackSample, attack_sample
from vitlens.commands.attack.survivors import follow_up
from vitlens.commands.attack.sweep import Victim, sweep_all
from vitlens.commands.attack.tables import Measurements, record_of
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import ImageRequest, load_split
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import ProgressStore, phase
from vitlens.commands.run.resume import resumable, with_its_settings
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of, require_label_source
from vitlens.data.split import Split
from vitlens.errors import UnknownNameError
from vitlens.files import named_file, write_atomically
from vitlens.models.model import Model
from vitlens.processes import share_of


def measure(
    options: AttackOptions, models: Sequence[Model] = (), split: Split | None = None
) -> Path | None:
    """Attack models on the same images, write the report and return its path.

    models, split: if they are loaded already. All models are attacked at the input size of the
    first. Each of several processes takes its share of the images, and all but the first return
    None. Raises InputError (or a subclass) before anything is written.
    """
    options = with_its_settings(options, "attack")
    needs_labels = not options.predicted and options.run.labels is None
    if split is None and needs_labels:
        require_label_source(options.data, options.images, doing="attack")
    # first without images, because `_load_images` reads them at the size of the first model
    run = Run("attack", options, load=_loader(models))
    if split is None:
        split = _load_images(run)
    run = run.with_images([split] * len(run.models))
    _require_possible_attacks(run)
    labels = []
    for model in run.models:
        labels.append(
            labels_of(
                model, split, predicted=options.predicted, doing="attack", options=run.run_options
            )
        )
    baseline = _baseline(run)
    _ = run.shares  # raises now, before anything is written, if images are fewer than processes
    settings = _settings(options)
    resumable_run = resumable(run, "Adversarial robustness of", options.resume, **settings)
    with resumable_run as (writing, store):
        victims = _victims(run, labels, store)
        for victim in victims:
            sweep_all(victim)
        survivors = follow_up(victims)
        corrupted = []
        if options.corruptions:
            corrupted = [_on_corruptions(victim) for victim in victims]
        if writing.folder is None:
            return None
        with phase("Adversarial images, and what changes inside the models"):
            sample = attack_sample(victims)
            measurements = Measurements(
                victims=victims,
                sample=sample,
                inside=changes_inside(victims, sample),
                corrupted=corrupted,
                survivors=survivors,
                baseline=baseline,
            )
            record = record_of(measurements)
        with phase("Why the models differ in robustness"):
            reasons = robustness_reasons(victims, sample)
            record = replace(
                record,
                robustness_gap=reasons.gap,
                robustness_candidates=reasons.candidates,
                robustness_untested=reasons.untested,
            )
        if options.save_images:
            _save_images(victims, sample, writing.folder)
        if options.self_checks == "all":
            # all checks can take longer than the attacks: publish the results before them
            writing.publish(lambda: record, final=False)
        checks = _check_rows(victims)
        return writing.publish(lambda: _with_checks(record, checks))


def _loader(models: Sequence[Model]) -> Callable[[RunOptions], tuple[Model, ...]] | None:
    """Return a function that returns these models instead of loading the named ones.

    Returns None without models.
    """
    if not models:
        return None
    return lambda _options: tuple(models)


def _load_images(run: Run[AttackOptions]) -> Split:
    options = run.options
    with run.processes.main_process_first():
        return load_split(
            run.model,
            options=run.run_options,
            data=options.data,
            images=options.images,
            request=ImageRequest(scenes=1),
            other_models=run.models[1:],
        )


def _require_possible_attacks(run: Run[AttackOptions]) -> None:
    """Refuse an attack that needs more classes than a model has, and a patch larger than the
    images.
    """
    options = run.options
    size = run.split.size
    for model, name in product(run.models, options.attacks):
        setting = Setting(steps=1, classes=len(model.classes), size=size, side=options.patch_side)
        for component_attack in ATTACKS[name].parts:
            algorithm_of(component_attack, setting)  # raises if the attack is impossible


def _baseline(run: Run[AttackOptions]) -> str:
    """Return the alias of the model that corruption errors are relative to.

    Raises UnknownNameError if --baseline names none of the models.
    """
    baseline = run.options.baseline
    if baseline is not None and baseline not in run.aliases:
        raise UnknownNameError("model for --baseline", baseline, run.aliases)
    if baseline:
        return baseline
    for model in run.models:
        if model.anatomy.family == "cnn":
            return model.alias
    return run.aliases[0]


def _settings(options: AttackOptions) -> dict[str, Any]:
    """Return the settings that a run and its continuation share.

    Epsilons are in the order in which they are tried.
    """
    linf = list(options.linf)
    l2 = list(options.l2)
    if options.downwards:
        linf.reverse()
        l2.reverse()
    steps = options.steps
    if isinstance(steps, Mapping):
        steps = dict(steps)
    return {
        "attacks": list(options.attacks),
        "epsilons": linf,
        "epsilons_l2": l2,
        "single_epsilons": dict(options.single_epsilons or {}),
        "steps": steps,
        "restarts": options.restarts,
        "step": options.step,
        "patch": [options.patch_side, options.patch_anywhere],
    }


def _victims(
    run: Run[AttackOptions], labels: Sequence[Tensor], store: ProgressStore
) -> list[Victim]:
    victims = []
    for model, model_labels in zip(run.models, labels):
        victims.append(Victim(model, model_labels, run, store))
    return victims


def _on_corruptions(victim: Victim) -> Corrupted:
    """Return which corrupted images a model classifies correctly.

    Each process takes its share of the images. With --predicted, an image counts as correct if
    its prediction stays the same.
    """
    run = victim.run
    processes = run.processes
    split = run.split
    if run.options.predicted:
        split = replace(split, labels=victim.labels.cpu(), classes=victim.model.classes)
    share = share_of(split, processes)
    # the images of `share`: of n processes, each takes every n-th image
    indices = torch.arange(processes.index, len(split), processes.count)
    # The seed is in the bits above the 20 of the index. So no two seeds share a key of the random
    # numbers if there are fewer than 2**20 images.
    keys = indices + (run.run_options.seed << 20)
    changes = []
    for corruption in CORRUPTIONS.values():
        for strength in corruption.levels:
            changes.append((corruption.operation, strength))
    title = f"{victim.model.alias} on corruptions"
    with run.progress(title, len(share) * len(changes)) as advance:
        part = correct_after(victim.model, share, changes, keys=keys, **run.passes, advance=advance)
    # `part` is (changes, images). `gathered` joins the first axis, and returns the order of the
    # split: so images come first there.
    correct = processes.gathered(part.T.contiguous()).T.contiguous()
    by_severity = correct.view(len(CORRUPTIONS), len(SEVERITIES), -1)  # (kinds, severities, images)
    return Corrupted(victim.model.alias, by_severity, split.groups)


def _save_images(victims: Sequence[Victim], sample: AttackSample, folder: RunFolder) -> None:
    """Write the sampled images that fool each model as PNG, rounded to 8 bits, to
    adversarial/<model>/.
    """
    for victim, images, fooled in zip(victims, sample.adversarial, sample.fooled):
        subfolder = named_file(victim.model.alias, suffix="")
        for position in fooled.nonzero().flatten().tolist():
            pixels = (images[position] * 255).round().byte()
            picture = np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())
            name = f"{int(sample.indices[position]):05}.png"
            path = folder.place("adversarial", subfolder, name)
            with write_atomically(path) as temporary:
                Image.fromarray(picture).save(temporary, format="PNG")


def _check_rows(victims: Sequence[Victim]) -> list[AttackCheckRow]:
    rows = []
    for victim in victims:
        for check in self_checks(victim):
            # the other fields of the row are those of the check
            rows.append(AttackCheckRow(victim.model.alias, **vars(check)))
    return rows


def _with_checks(record: AttackRecord, checks: Sequence[AttackCheckRow]) -> AttackRecord:
    """Return the record with the self-checks of all models."""
    failures = Counter(check.model for check in checks if check.state == "failed")
    overall = [replace(row, failed=failures[row.model]) for row in record.overall]
    return replace(record, overall=tuple(overall), checks=tuple(checks))
