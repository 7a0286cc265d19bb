"""The attacks of a run: every attack on every image at every epsilon, resumable; one on a sample; their self-checks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.robustness.checks import (
    UNLIMITED_EPSILON,
    AttackOutput,
    Attempt,
    at_epsilon_zero,
    every_image_broken,
    gradients_not_zero,
    more_steps,
    same_distances,
    same_in_any_batch,
    unlimited_budget,
    within_budget,
)
from vitlens.analysis.robustness.curve import Outcome, halving_epsilon
from vitlens.analysis.robustness.masking_signs import never_rises, same_in_ascending_order, weaker_breaks_no_more
from vitlens.analysis.robustness.verdict import Check
from vitlens.archives import Form
from vitlens.attacks.attack import attack, fitting_batch
from vitlens.attacks.registry import ATTACKS, Attack
from vitlens.attacks.self_checks import checks_of, comparisons
from vitlens.attacks.sweep import Sweep, sweep
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.scaffold.digests import batch_digest
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress.bar import Advance, progress
from vitlens.commands.scaffold.progress.store import ProgressStore
from vitlens.data.split import Split
from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.processes import Processes

PART_BATCHES = 4  # batches that are attacked, and stored, together: the queue is refilled from all of them
SAMPLED: Final = 256  # images of the sample, at most
CHECKED: Final = 16  # correctly classified images on which the attacks are checked
_SLOW: Final = (6, 2)  # images and steps of slow attacks
_SEARCHED: Final = (6, 20)  # images of the full search of C&W, and its steps in other checks


@dataclass(frozen=True)
class ModelAttack:
    """One model with everything that its attacks need. labels: (n,), columns of the model's logits; run: the run
    options of this process."""

    model: Model
    split: Split
    labels: Tensor
    options: AttackOptions
    run: RunOptions
    processes: Processes
    store: ProgressStore

    @property
    def batch_size(self) -> int:
        """Images at a time."""
        return self.run.batch_size or fitting_batch(self.model)

    def images(self, indices: Tensor) -> Tensor:
        """The pixels of these images (n, 3, height, width) in [0, 1], on the CPU."""
        return self.split.source.read(indices).float().div_(255)

    def logits(self, images: Tensor) -> Tensor:
        """The model's logits for images in fp32, (n, classes), on the CPU."""
        with evaluating(self.model), torch.no_grad():
            return torch.cat(
                [self.model(part.to(self.model.device)).float().cpu() for part in images.split(self.batch_size)]
            )

    def steps_of(self, entry: Attack) -> int:
        """The number of steps of an attack; 1 for a single-step attack."""
        return (self.options.steps_for(entry.name) or entry.steps) if entry.steps else 1

    def attempt(self, name: str) -> Attempt:
        """An attack of the registry, as the checks call it; a patch is bounded by its size, not epsilon."""
        bounded, options, run = ATTACKS[name].takes_epsilon, self.options, self.run

        def attempt(
            images: Tensor, labels: Tensor, *, epsilon: float, steps: int | None = None, batch_size: int | None = None
        ) -> AttackOutput:
            return attack(
                self.model, images, labels, method=name, epsilon=epsilon if bounded else None,
                steps=steps or options.steps_for(name), restarts=options.restarts, seed=run.seed,
                batch_size=batch_size or self.batch_size, precision=run.precision,
                side=options.patch_side, aligned=not options.patch_anywhere,
            )  # fmt: skip

        return attempt


@dataclass(frozen=True)
class SweptAttack:
    """The results of one attack on one model, on all images. outcome: by epsilon; distance: (n,), of the smallest
    perturbation found, in the attack's norm; silent: (n,), where all gradients that the attack used were zero;
    forwards, backwards: images passed through the model; seconds: of all processes together."""

    attack: str
    outcome: Outcome
    distance: Tensor
    silent: Tensor
    forwards: int
    backwards: int
    seconds: float


def sweep_all(work: ModelAttack) -> list[SweptAttack]:
    """Every attack on all images, each process on its share, gathered in the order of the images."""
    share = torch.arange(work.processes.index, len(work.split), work.processes.count)
    names, size = work.options.attacks, PART_BATCHES * work.batch_size
    title = f"attacking {work.model.alias}"
    with progress(title, len(share) * len(names), unit="images", quiet=work.run.quiet) as advance:
        return [
            _gathered(
                work,
                name,
                [_part(work, name, at, share[at : at + size], advance) for at in range(0, len(share), size)],
            )
            for name in names
        ]


def _part(work: ModelAttack, name: str, start: int, indices: Tensor, advance: Advance) -> dict[str, Tensor]:
    """One attack on some of the images, or its stored result from an earlier attempt."""
    key = f"{work.model.alias}-{name}-{start}"
    digest = batch_digest(work.images(indices), work.labels[indices])
    each = Form("bf", (len(indices),))
    forms = dict.fromkeys(("clean", "broken_at", "distance", "silent"), each)
    forms |= {"epsilons": Form("f", (None,)), "counts": Form("f", (3,))}
    stored = work.store.recall(key, digest, forms)
    if stored is not None:
        advance(len(indices))
        return {field: torch.from_numpy(np.asarray(values)) for field, values in stored.items()}
    result = attempted(work, name, indices, downwards=work.options.downwards, advance=advance)
    counts = (result.forwards[name], result.backwards[name], result.seconds[name])
    part = {
        "clean": result.clean.cpu(),
        "broken_at": result.broken_at[name].cpu().double(),
        "distance": result.distance[name].cpu().double(),
        "silent": result.zero_gradients[name].cpu(),
        "epsilons": torch.tensor(result.epsilons[name], dtype=torch.float64),
        "counts": torch.tensor(counts, dtype=torch.float64),
    }
    work.store.remember(key, digest, {field: values.numpy() for field, values in part.items()})
    return part


def attempted(
    work: ModelAttack,
    name: str,
    indices: Tensor,
    *,
    downwards: bool,
    steps: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Sweep:
    """One attack on these images at all epsilons; steps: None for those of the options."""
    options, run = work.options, work.run
    return sweep(
        work.model, work.images(indices), work.labels[indices], attacks=(name,), epsilons=options.linf_of(name),
        epsilons_l2=options.l2, steps=steps or options.steps_for(name), restarts=options.restarts, seed=run.seed,
        batch_size=work.batch_size, precision=run.precision, side=options.patch_side,
        aligned=not options.patch_anywhere, indices=indices.tolist(), downwards=downwards, on_progress=advance,
    )  # fmt: skip


def _gathered(work: ModelAttack, name: str, parts: list[dict[str, Tensor]]) -> SweptAttack:
    whole = {
        key: work.processes.gathered(torch.cat([part[key] for part in parts]))
        for key in ("clean", "broken_at", "distance", "silent")
    }
    forwards, backwards, seconds = work.processes.total(torch.stack([part["counts"] for part in parts]).sum(0)).tolist()
    clean, broken_at = whole["clean"].bool(), whole["broken_at"]
    if ATTACKS[name].kind == "minimum":  # its distances are finer than the epsilons
        broken_at = torch.where(clean, whole["distance"], torch.zeros_like(broken_at))
    outcome = Outcome(
        ATTACKS[name].slug, work.model.alias, tuple(parts[0]["epsilons"].tolist()), clean, broken_at,
        work.split.groups,
    )  # fmt: skip
    return SweptAttack(name, outcome, whole["distance"], whole["silent"].bool(), int(forwards), int(backwards), seconds)


@dataclass(frozen=True)
class AttackSample:
    """One attack at one epsilon on some images of each model. attack: its name; epsilon: pixel units; indices: (m,)
    into the split; clean: (m, 3, height, width); adversarial: for each model the images found, or the clean ones where
    the attack failed; fooled: for each model (m,)."""

    attack: str
    epsilon: float
    indices: Tensor
    clean: Tensor
    adversarial: tuple[Tensor, ...]
    fooled: tuple[Tensor, ...]


def example_attack(names: Sequence[str]) -> str:
    """The attack of these names that makes the examples, by its rank in the registry."""
    return min(names, key=lambda name: ATTACKS[name].examples or len(ATTACKS) + 1)


def evenly_spaced(rows: Tensor, most: int) -> Tensor:
    """At most this many of the rows, evenly spaced, as images are often sorted by class."""
    return rows if len(rows) <= most else rows[torch.arange(most) * len(rows) // most]


def attack_sample(works: Sequence[ModelAttack], swept: Sequence[Sequence[SweptAttack]]) -> AttackSample:
    """Attack a seeded, class-balanced sample at the smallest epsilon that halves the accuracy of every model (else the
    largest). Images on which the attack failed up to that epsilon are not attacked once more: they count as not fooled.
    """
    first = works[0]
    name = example_attack(first.options.attacks)
    index = first.options.attacks.index(name)
    epsilon = halving_epsilon([of_model[index].outcome for of_model in swept])
    numbered = replace(first.split, groups=torch.arange(len(first.split))).limit(SAMPLED, seed=first.run.seed)
    indices = torch.arange(len(first.split)) if numbered.groups is None else numbered.groups
    clean = first.images(indices)
    adversarial, fooled = [], []
    title = f"{ATTACKS[name].title} on a sample"
    with progress(title, len(works) * len(indices), quiet=first.run.quiet) as advance:
        for work, of_model in zip(works, swept):
            outcome = of_model[index].outcome
            open_ = (outcome.clean & ~outcome.robust(epsilon))[indices]
            images, success = clean.clone(), torch.zeros(len(indices), dtype=torch.bool)
            if bool(open_.any()):
                result = work.attempt(name)(clean[open_], work.labels[indices][open_], epsilon=epsilon)
                images[open_], success[open_] = result.images.cpu(), result.success.cpu()
            adversarial.append(images)
            fooled.append(success)
            advance(len(indices))
    return AttackSample(name, epsilon, indices, clean, tuple(adversarial), tuple(fooled))


def checked(work: ModelAttack, swept: Sequence[SweptAttack]) -> list[Check]:
    """All checks of one model: of every attack, of its gradients, and of pairs of attacks.

    Empty where the model classifies no image correctly, as there is none to attack.
    """
    right = evenly_spaced(swept[0].outcome.clean.nonzero().flatten(), CHECKED)
    if not len(right):
        return []
    images, labels = work.images(right), work.labels[right]
    checks = [gradients_not_zero(work.model, images, labels)]
    if work.options.self_checks == "few":
        return [*checks, *_of_strongest(work, swept, images, labels)]
    title = f"checking the attacks on {work.model.alias}"
    with progress(title, len(swept), unit="attacks", quiet=work.run.quiet) as advance:
        for result in swept:
            checks += _of_attack(work, result, images, labels)
            if "from below" in _planned(work, result):
                checks.append(_from_below(work, result, right))
            advance(1)
    return [*checks, *_in_order([result.outcome for result in swept], [result.attack for result in swept])]


def _of_strongest(work: ModelAttack, swept: Sequence[SweptAttack], images: Tensor, labels: Tensor) -> Iterator[Check]:
    """More steps of the strongest attack that has them, and that attack against one without."""
    able = [result for result in swept if "more steps" in _planned(work, result)]
    for strongest in sorted(able, key=lambda result: ATTACKS[result.attack].strong)[-1:]:
        if ATTACKS[strongest.attack].kind == "budget":
            yield _more_steps(work, strongest, images, labels)
        of_pairs = _in_order([result.outcome for result in swept], [result.attack for result in swept])
        yield from [check for check in of_pairs if strongest.outcome.name in check.attack.split(", ")][:1]


def _more_steps(work: ModelAttack, swept: SweptAttack, images: Tensor, labels: Tensor) -> Check:
    """At the largest epsilon that leaves an image correct, where more steps could break more."""
    outcome, steps = swept.outcome, work.steps_of(ATTACKS[swept.attack])
    open_ = [epsilon for epsilon in outcome.epsilons if outcome.robust(epsilon).any()]
    epsilon = max(open_, default=outcome.epsilons[0])
    return more_steps(outcome.name, work.attempt(swept.attack), images, labels, epsilon=epsilon, steps=steps)


def _of_attack(work: ModelAttack, swept: SweptAttack, images: Tensor, labels: Tensor) -> Iterator[Check]:
    entry, slug, planned = ATTACKS[swept.attack], swept.outcome.name, _planned(work, swept)
    attempt, epsilon = work.attempt(swept.attack), swept.outcome.epsilons[-1]
    yield never_rises(swept.outcome)
    if "gradients read" in planned:
        zero = int((swept.silent & swept.outcome.clean).sum())
        right = int(swept.outcome.clean.sum())
        yield Check(
            "gradients read", slug, "not all zero, for at least 9 images in 10",
            f"all zero for {zero} of {right}", 10 * zero <= right, against=zero, of=right,
        )  # fmt: skip
    if entry.slow:
        images, labels = evenly_spaced(images, _SLOW[0]), evenly_spaced(labels, _SLOW[0])
        attempt = _with_steps(attempt, _SLOW[1])
    steps = work.steps_of(entry)
    if entry.kind == "minimum":
        attempt = _with_steps(attempt, min(steps, _SEARCHED[1]))
    if "epsilon 0" in planned:
        yield at_epsilon_zero(slug, attempt, images, labels)
    result = attempt(images, labels, epsilon=epsilon, batch_size=len(images))
    yield within_budget(slug, work.model, result, images, labels, epsilon=epsilon, norm=entry.norm)
    if len(images) > 1:
        smaller_batches = attempt(images, labels, epsilon=epsilon, batch_size=-(-len(images) // 2))
        yield same_in_any_batch(slug, result, smaller_batches)
    everything = UNLIMITED_EPSILON if entry.norm == "linf" else float(images[0].numel()) ** 0.5
    if entry.kind == "minimum":
        searched = evenly_spaced(images, _SEARCHED[0]), evenly_spaced(labels, _SEARCHED[0])
        yield same_distances(slug, attempt, *searched, epsilon=everything, steps=steps)
        yield every_image_broken(swept.outcome)
    elif "more steps" in planned:
        yield _more_steps(work, swept, images, labels)
        yield unlimited_budget(slug, attempt, images, labels, epsilon=everything)


def _from_below(work: ModelAttack, swept: SweptAttack, rows: Tensor) -> Check:
    """The same attack from the largest epsilon downwards and from the smallest upwards."""
    slow = ATTACKS[swept.attack].slow
    rows, steps = (evenly_spaced(rows, _SLOW[0]), _SLOW[1]) if slow else (rows, None)
    above, below = (
        attempted(work, swept.attack, rows, downwards=downwards, steps=steps).broken_at[swept.attack].cpu()
        for downwards in (True, False)
    )
    return same_in_ascending_order(swept.outcome.name, above, below)


def _planned(work: ModelAttack, swept: SweptAttack) -> tuple[str, ...]:
    """The names of an attack's checks."""
    return checks_of(
        ATTACKS[swept.attack], epsilons=len(swept.outcome.epsilons), downwards=work.options.downwards
    )  # fmt: skip


def _with_steps(attempt: Attempt, number: int) -> Attempt:
    def limited(
        images: Tensor, labels: Tensor, *, epsilon: float, steps: int | None = None, batch_size: int | None = None
    ) -> AttackOutput:
        return attempt(images, labels, epsilon=epsilon, steps=steps or number, batch_size=batch_size)

    return limited


def _in_order(outcomes: Sequence[Outcome], names: Sequence[str]) -> Iterator[Check]:
    """One step compared with many, attacks without gradients with those that use them, and other pairs."""
    by_name = dict(zip(names, outcomes))
    for pair in comparisons(names):
        yield weaker_breaks_no_more(by_name[pair.weaker], by_name[pair.stronger], reason=pair.reason)
