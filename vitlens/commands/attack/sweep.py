"""The attacks of a run: every attack on every image at every epsilon, resumable; one on a sample; their self-checks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.arrays import Form
from vitlens.attacks import checks as rules
from vitlens.attacks.attack import AttackResult, attack, sweep
from vitlens.attacks.checks import Check, Trial
from vitlens.attacks.plan import AttackPlan, fitting_batch
from vitlens.attacks.registry import ATTACKS, Attack, comparisons
from vitlens.attacks.robustness import Outcome, halving_epsilon
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.run.progress import Advance, ProgressStore
from vitlens.commands.run.resume import batch_digest
from vitlens.commands.run.run import Run
from vitlens.data.split import balanced
from vitlens.devices import evaluating
from vitlens.models.model import Model

PART_BATCHES = 4  # batches that are attacked, and stored, together: the queue is refilled from all of them
_PART_PIXELS: Final = 400_000  # of these on a CPU, 8 photographs of 224 px: a stopped run loses no more than one part
SAMPLED: Final = 256  # images of the sample, at most
CHECKED: Final = 16  # correctly classified images on which the attacks are checked
_SLOW: Final = (6, 2)  # images and steps of slow attacks
_SEARCHED: Final = (6, 20)  # images of the full search of C&W, and its steps in other checks


@dataclass(frozen=True)
class ModelAttack:
    """One model with everything that its attacks need. labels: (n,), columns of the model's logits; swept: the results
    of the attacks, by their names, once `sweep_all` has run."""

    model: Model
    labels: Tensor
    run: Run[AttackOptions]
    store: ProgressStore
    swept: dict[str, Outcome] = field(default_factory=dict)

    @property
    def clean(self) -> Tensor:
        """Return which clean images are classified correctly, (n,)."""
        return next(iter(self.swept.values())).clean

    @property
    def batch_size(self) -> int:
        """Images at a time."""
        return self.run.run.batch_size or fitting_batch(self.model)

    @property
    def part_size(self) -> int:
        """Images that are attacked, and stored, together."""
        whole = PART_BATCHES * self.batch_size
        height, width = self.run.split.size
        few = max(1, _PART_PIXELS // (height * width))
        return min(whole, few) if self.model.device.type == "cpu" else whole

    def images(self, indices: Tensor) -> Tensor:
        """Return the pixels of these images (n, 3, height, width) in [0, 1], on the CPU."""
        return self.run.split.source.read(indices).float().div_(255)

    def logits(self, images: Tensor) -> Tensor:
        """Return the model's logits for images in fp32, (n, classes), on the CPU."""
        with evaluating(self.model), torch.no_grad():
            return torch.cat(
                [self.model(part.to(self.model.device)).float().cpu() for part in images.split(self.batch_size)]
            )

    def steps_of(self, entry: Attack) -> int:
        """Return the number of steps of an attack; 1 for a single-step attack."""
        return (self.run.options.steps_for(entry.name) or entry.steps) if entry.steps else 1

    def settings(self, name: str) -> dict[str, Any]:
        """Return what an attack takes beside images and epsilons."""
        options = self.run.options
        run = self.run.run
        return {
            "steps": options.steps_for(name),
            "restarts": options.restarts,
            "seed": run.seed,
            "batch_size": self.batch_size,
            "precision": run.precision,
            "side": options.patch_side,
            "aligned": not options.patch_anywhere,
            "stride": options.step,
        }

    def attempt(self, name: str) -> Callable[..., AttackResult]:
        """Return an attack of the registry, as the checks call it; a patch is bounded by its size, not epsilon."""

        def attempt(images: Tensor, labels: Tensor, *, epsilon: float, **more: Any) -> AttackResult:
            bound = epsilon if ATTACKS[name].takes_epsilon else None
            return attack(self.model, images, labels, method=name, epsilon=bound, **{**self.settings(name), **more})

        return attempt


def sweep_all(work: ModelAttack) -> None:
    """Every attack on all images, each process on its share, gathered in the order of the images."""
    run = work.run
    names = work.run.options.attacks
    size = work.part_size
    share = torch.arange(run.processes.index, len(run.split), run.processes.count)
    starts = range(0, len(share), size)
    title = f"attacking {work.model.alias}"
    with run.progress(title, len(share) * len(names)) as advance:
        for name in names:
            parts = [_part(work, name, at, share[at : at + size], advance) for at in starts]
            work.swept[name] = _gathered(work, name, parts)


def _part(work: ModelAttack, name: str, start: int, indices: Tensor, advance: Advance) -> dict[str, NDArray[Any]]:
    """Return one attack on some of the images, or its stored result from an earlier attempt."""
    key = f"{work.model.alias}-{name}-{start}"
    digest = batch_digest(work.images(indices), work.labels[indices])
    forms = dict.fromkeys(("clean", "broken_at", "distance", "silent"), Form("bf", (len(indices),)))
    stored = work.store.recall(key, digest, forms | {"epsilons": Form("f", (None,)), "counts": Form("f", (3,))})
    if stored is not None:
        advance(len(indices))
        return stored
    result = attempted(work, name, indices, downwards=work.run.options.downwards, advance=advance)
    broken_at, distance = (each.cpu().double().numpy() for each in (result.broken_at, result.distance))
    part = {
        "clean": result.clean.cpu().numpy(),
        "broken_at": broken_at,
        "distance": distance,
        "silent": result.zero_gradients.cpu().numpy(),
        "epsilons": np.array(result.epsilons, np.float64),
        "counts": np.array([result.forwards, result.backwards, result.seconds], np.float64),
    }
    work.store.remember(key, digest, part)
    return part


def attempted(
    work: ModelAttack, name: str, indices: Tensor, *, advance: Advance = lambda _: None, **more: Any
) -> Outcome:
    """Return one attack on these images at all epsilons; more: fields of the plan."""
    return sweep(
        work.model,
        work.images(indices),
        work.labels[indices],
        AttackPlan(**{**work.settings(name), **more}),
        attack=name,
        epsilons=work.run.options.epsilons_of(name),
        indices=indices.tolist(),
        on_progress=advance,
    )


def _gathered(work: ModelAttack, name: str, parts: Sequence[Mapping[str, NDArray[Any]]]) -> Outcome:
    processes = work.run.processes
    clean, broken_at, distance, silent = (
        processes.gathered(torch.from_numpy(np.concatenate([part[key] for part in parts])))
        for key in ("clean", "broken_at", "distance", "silent")
    )
    forwards, backwards, seconds = processes.total(torch.from_numpy(sum(part["counts"] for part in parts))).tolist()
    if ATTACKS[name].kind == "minimum":  # its distances are finer than the epsilons
        broken_at = torch.where(clean.bool(), distance, torch.zeros_like(broken_at))
    epsilons = tuple(parts[0]["epsilons"].tolist())
    return Outcome(
        ATTACKS[name].slug,
        work.model.alias,
        epsilons,
        clean.bool(),
        broken_at,
        distance,
        silent.bool(),
        int(forwards),
        int(backwards),
        seconds,
        groups=work.run.split.groups,
    )


@dataclass(frozen=True)
class AttackSample:
    """One attack at one epsilon (pixel units) on some images. indices: (m,) into the split; clean: (m, 3, height,
    width); adversarial: of each model the images found, or the clean ones where the attack failed; fooled: (m,) of each
    model."""

    attack: Attack
    epsilon: float
    indices: Tensor
    clean: Tensor
    adversarial: tuple[Tensor, ...]
    fooled: tuple[Tensor, ...]


def example_attack(names: Sequence[str]) -> str:
    """Return the attack of these names that makes the examples, by its rank in the registry."""
    return min(names, key=lambda name: ATTACKS[name].examples or len(ATTACKS) + 1)


def evenly_spaced(rows: Tensor, most: int) -> Tensor:
    """At most this many of the rows, evenly spaced, as images are often sorted by class."""
    return rows if len(rows) <= most else rows[torch.arange(most) * len(rows) // most]


def attack_sample(works: Sequence[ModelAttack]) -> AttackSample:
    """Attack a seeded, class-balanced sample at the smallest epsilon that halves the accuracy of every model (else the
    largest). Images on which the attack failed up to that epsilon are not attacked once more: they count as not fooled.
    """
    run = works[0].run
    name = example_attack(run.options.attacks)
    outcomes = [work.swept[name] for work in works]
    epsilon = halving_epsilon(outcomes)
    indices = balanced(len(run.split), run.split.labels, SAMPLED, run.run.seed)
    clean = works[0].images(indices)
    adversarial = []
    fooled = []
    with run.progress(f"{ATTACKS[name].title} on a sample", len(works) * len(indices)) as advance:
        for work, outcome in zip(works, outcomes):
            open_ = (outcome.clean & ~outcome.robust(epsilon))[indices]
            images = clean.clone()
            success = torch.zeros(len(indices), dtype=torch.bool)
            if bool(open_.any()):
                result = work.attempt(name)(clean[open_], work.labels[indices][open_], epsilon=epsilon)
                images[open_], success[open_] = result.images.cpu(), result.success.cpu()
            adversarial.append(images)
            fooled.append(success)
            advance(len(indices))
    return AttackSample(ATTACKS[name], epsilon, indices, clean, tuple(adversarial), tuple(fooled))


def checked(work: ModelAttack) -> Iterator[Check]:
    """Yield all checks of one model: of its gradients, of every attack, and of pairs of attacks.

    None where the model classifies no image correctly, as there is none to attack.
    """
    right = evenly_spaced(work.clean.nonzero().flatten(), CHECKED)
    if not len(right):
        return
    images = work.images(right)
    labels = work.labels[right]
    yield rules.gradients_not_zero(work.model, images, labels)
    of_pairs = [
        rules.weaker_breaks_no_more(work.swept[weaker], work.swept[stronger], reason=reason)
        for weaker, stronger, reason in comparisons([*work.swept])
    ]
    if work.run.options.self_checks == "few":
        able = [name for name in work.swept if ATTACKS[name].takes_more_steps]
        for strongest in sorted(able, key=lambda name: ATTACKS[name].strong)[-1:]:
            if ATTACKS[strongest].kind == "budget":
                yield _more_steps(work, strongest, right)
            yield from [check for check in of_pairs if work.swept[strongest].name in check.attack.split(", ")][:1]
        return
    with work.run.progress(f"checking the attacks on {work.model.alias}", len(work.swept), "attacks") as advance:
        for name in work.swept:
            yield from _of_attack(work, name, right)
            advance(1)
    yield from of_pairs


def _more_steps(work: ModelAttack, name: str, right: Tensor) -> Check:
    """At the largest epsilon that leaves an image correct, where more steps could break more."""
    outcome = work.swept[name]
    open_ = [epsilon for epsilon in outcome.epsilons if outcome.robust(epsilon).any()]
    epsilon = max(open_, default=outcome.epsilons[0])
    groups = None if outcome.groups is None else outcome.groups[right.cpu()]
    trial = Trial(outcome.name, work.attempt(name), work.images(right), work.labels[right], groups)
    return trial.more_steps(epsilon=epsilon, steps=work.steps_of(ATTACKS[name]))


def _of_attack(work: ModelAttack, name: str, right: Tensor) -> Iterator[Check]:
    """Yield the checks of one attack; right: the images on which it is checked, fewer and in fewer steps where it is
    slow."""
    entry = ATTACKS[name]
    outcome = work.swept[name]
    attempt = work.attempt(name)
    slug = outcome.name
    epsilon = outcome.epsilons[-1]
    steps = work.steps_of(entry)
    yield rules.never_rises(outcome)
    if entry.gradients:
        zero = int((outcome.zero_gradients & work.clean).sum())
        yield rules.gradients_read("gradients read", slug, zero, int(work.clean.sum()))
    right = evenly_spaced(right, _SLOW[0]) if entry.slow else right
    images = work.images(right)
    labels = work.labels[right]
    if entry.slow or entry.kind == "minimum":
        attempt = partial(attempt, steps=min(steps, _SEARCHED[1]) if entry.kind == "minimum" else _SLOW[1])
    trial = Trial(slug, attempt, images, labels)
    if entry.kind == "budget" and entry.takes_epsilon:
        yield trial.at_epsilon_zero()
    result = trial.at(epsilon=epsilon, batch_size=len(images))
    yield trial.within_budget(work.model, result, epsilon=epsilon, norm=entry.norm)
    if len(images) > 1:
        smaller_batches = trial.at(epsilon=epsilon, batch_size=-(-len(images) // 2))
        yield rules.same_in_any_batch(slug, result, smaller_batches)
    everything = rules.UNLIMITED_EPSILON if entry.norm == "linf" else float(images[0].numel()) ** 0.5
    if entry.kind == "minimum":
        few = (evenly_spaced(each, _SEARCHED[0]) for each in (images, labels))
        yield Trial(slug, attempt, *few).same_distances(epsilon=everything, steps=steps)
        yield rules.every_image_broken(outcome)
    elif entry.takes_more_steps:
        yield _more_steps(work, name, right)
        yield trial.unlimited_budget(epsilon=everything)
    if work.run.options.downwards and entry.kind == "budget" and len(outcome.epsilons) > 1:
        more: dict[str, Any] = {"steps": _SLOW[1]} if entry.slow else {}
        above, below = (  # from the largest epsilon downwards and from the smallest upwards
            attempted(work, name, right, downwards=downwards, **more).broken_at.cpu() for downwards in (True, False)
        )
        yield rules.same_in_ascending_order(slug, above, below)
