"""Why two models differ in robustness: candidate causes, each tested by a change of the attack.

All images are those that both models classify correctly, under one attack at one epsilon. A
candidate is tested by an intervention and its control. It accounts for as many points of the
difference in robust accuracy as the intervention removes and the control leaves.

- Frequency content: the perturbations without their higher frequencies, which hold half of their
  energy. Control: without half of the energy at random frequencies. Both are scaled to the length
  (L2) that they had.
- Patch grid: the attacked images shifted by half a patch. Control: shifted by a whole patch.
- Gradient, margin, and their ratio: the budget of each model on each image is scaled so that the
  two models are equal in it. Control: the same budget for both.

Margins and gradients are divided by the spread of a model's logits. Scaling the logits scales all
three alike and changes no attack, so it must not change what is compared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.failures.operations import frequency_bands
from vitlens.attacks.losses import is_misclassified, margin
from vitlens.attacks.registry import UNIT
from vitlens.attacks.robustness import ROUNDING, Outcome
from vitlens.commands.attack.epsilon import typed_epsilon
from vitlens.commands.attack.reason_rows import CandidateRow, RobustnessGapRow, UntestedGapRow
from vitlens.commands.attack.sample import AttackSample
from vitlens.commands.attack.sweep import Victim
from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.report.claims import FEWEST
from vitlens.shapes import Images, Labels, Logits
from vitlens.uncertainty import Estimate, holm, mean_points, paired_test, student_test

PerImage = Float[Tensor, " batch"]
Right = Bool[Tensor, " batch"]
# share of Nyquist's frequency above which detail is fine, as in the cues of `vitlens.analysis`
CUTOFF: Final = 0.3
_LARGEST_FACTOR: Final = 4.0  # by which a budget is multiplied or divided at most
_STEPS_PER_DOUBLING: Final = 2  # budgets are rounded to powers of 2 ** (1 / 2)
_TINY: Final = 1e-12  # keeps a division by 0 finite
_BATCH_SIZE: Final = 64  # images in a forward pass


@dataclass(frozen=True)
class Target:
    """One of two attacked models, with n images that both classify correctly.

    labels: (n,).
    clean: (n, 3, height, width) in [0, 1].
    adversarial: (n, 3, height, width) in [0, 1]; equal to `clean` where the attack failed.
    epsilon: the budget with which `adversarial` was made, in pixel units.
    robust_at: takes a budget for each image, in pixel units, and returns whether the model is
        correct on each image under the attack.
    """

    model: Model
    labels: Labels
    clean: Images
    adversarial: Images
    epsilon: float
    robust_at: Callable[[PerImage], Right]

    def logits(self, images: Images) -> Logits:
        """Return the model's logits in fp32, on the CPU."""
        with evaluating(self.model), torch.no_grad():
            parts = [self.model(part.to(self.model.device)) for part in images.split(_BATCH_SIZE)]
        return torch.cat(parts).float().cpu()

    def is_right(self, images: Images) -> Right:
        """Return which versions of the images are classified correctly."""
        return ~is_misclassified(self.logits(images), self.labels)

    def margins(self) -> PerImage:
        """Return the margin of each clean image, in spreads of the logits."""
        logits = self.logits(self.clean)
        return margin(logits, self.labels) / _spread(logits)

    def gradients(self) -> PerImage:
        """Return the largest change of each margin by a change of every pixel by 1/255.

        It is to first order, in spreads of the logits: the L1 norm of the gradient.
        """
        norms = []
        logits = []
        with evaluating(self.model), torch.enable_grad():
            batches = zip(self.clean.split(_BATCH_SIZE), self.labels.split(_BATCH_SIZE))
            for images, labels in batches:
                pixels = images.to(self.model.device).requires_grad_(True)
                output = self.model(pixels).float()
                total = margin(output, labels.to(output.device)).sum()
                (gradient,) = torch.autograd.grad(total, pixels)
                norms.append(gradient.flatten(1).abs().sum(1).float().cpu())
                logits.append(output.detach().cpu())
        return torch.cat(norms) / _spread(torch.cat(logits)) / UNIT


def _spread(logits: Logits) -> float:
    """Return the standard deviation of logits over classes, mean over images."""
    return max(float(logits.std(1).mean()), _TINY)


@dataclass(frozen=True)
class RobustnessReasons:
    """The difference of two models in robustness with its candidate causes: three tables.

    gap: one row, or none if the difference was not explained.
    candidates: one row for each candidate cause that was tested.
    untested: one row with the reason why the difference was not explained, or none.
    """

    gap: tuple[RobustnessGapRow, ...] = ()
    candidates: tuple[CandidateRow, ...] = ()
    untested: tuple[UntestedGapRow, ...] = ()


def robustness_reasons(victims: Sequence[Victim], sample: AttackSample) -> RobustnessReasons:
    """Return the difference of two models and its candidate causes, or why it was not explained.

    All tables are empty for another number of models than two.
    """
    if len(victims) != 2:
        return RobustnessReasons()
    first, second = victims
    aliases = (first.model.alias, second.model.alias)
    entry = sample.attack
    if entry.norm != "linf" or entry.kind != "budget":
        reason = "no attack with an L∞ budget was run"
        return RobustnessReasons(untested=(UntestedGapRow(*aliases, reason),))
    outcomes = [victim.outcomes[entry.name] for victim in victims]
    both_right = outcomes[0].clean & outcomes[1].clean
    is_usable = both_right[sample.indices]
    count = int(is_usable.sum())
    if count < FEWEST:
        reason = f"both models classify only {count} attacked images correctly"
        return RobustnessReasons(untested=(UntestedGapRow(*aliases, reason),))
    indices = sample.indices[is_usable]
    targets = []
    for victim, adversarial, outcome in zip(victims, sample.adversarial, outcomes):
        target = Target(
            model=victim.model,
            labels=victim.labels[indices].cpu(),
            clean=sample.clean[is_usable],
            adversarial=adversarial[is_usable],
            epsilon=sample.epsilon,
            robust_at=_Budgets(victim, outcome, entry.name, indices).robust,
        )
        targets.append(target)
    groups = None
    if first.run.split.groups is not None:
        groups = first.run.split.groups.cpu()[indices].numpy()
    gap, candidates = explained_gap(
        targets, attack=entry.title, groups=groups, patch=_patch_of(victims)
    )
    return RobustnessReasons(gap=(gap,), candidates=candidates)


def _patch_of(victims: Sequence[Victim]) -> tuple[int, int] | None:
    """Return the patch of the first model with patches, in px of the attacked images; None without.

    A model of another input size resizes the attacked images, so its patch has other sides on them.
    """
    for victim in victims:
        layout = victim.model.anatomy.layout
        is_native_size = victim.model.preprocessing.size == victim.run.split.size
        if layout is not None and is_native_size:
            return layout.patch_size
    return None


@dataclass(frozen=True)
class _Budgets:
    """Robustness of a model at any budgets, read off the sweep where that decides it.

    indices: (n,) of the images into the split.
    """

    victim: Victim
    outcome: Outcome
    attack: str
    indices: Tensor

    def robust(self, budgets: PerImage) -> Right:
        """Return whether the model is correct on each image under the attack at its budget."""
        broken_at = self.outcome.broken_at[self.indices].double()
        # the largest epsilon of the sweep that each image survived
        survived = torch.zeros_like(broken_at)
        for epsilon in self.outcome.epsilons:  # ascending
            survived[broken_at > epsilon + ROUNDING] = epsilon
        # Three cases: broken at or below its budget (not robust); survived an epsilon of at least
        # its budget (robust); else the sweep does not decide, and the attack is run at the budget.
        robust = broken_at > budgets + ROUNDING
        is_decided = survived >= budgets - ROUNDING
        undecided = robust & ~is_decided
        images = self.victim.images(self.indices)
        labels = self.victim.labels[self.indices]
        for budget in budgets[undecided].unique().tolist():
            is_tried = undecided & (budgets == budget)
            attempt = self.victim.attempt(self.attack)
            result = attempt(images[is_tried], labels[is_tried], epsilon=budget)
            robust[is_tried] = ~result.success.cpu()
        return robust


def explained_gap(
    targets: Sequence[Target],
    *,
    attack: str,
    groups: NDArray[np.integer] | None = None,
    patch: tuple[int, int] | None = None,
) -> tuple[RobustnessGapRow, tuple[CandidateRow, ...]]:
    """Return the difference in robust accuracy of two models, and what accounts for it.

    groups: the source of each image. patch: sides of a patch; None leaves the grid out.
    """
    first, second = targets
    epsilon = first.epsilon
    budgets = torch.full((len(first.clean),), epsilon, dtype=torch.float64)
    same_budget = [target.robust_at(budgets) for target in targets]
    gap = _points(same_budget)
    gap_row = RobustnessGapRow(
        first=first.model.alias,
        second=second.model.alias,
        attack=attack,
        epsilon=typed_epsilon(epsilon, "linf"),
        difference=mean_points(gap, groups=groups),
        robust_first=float(same_budget[0].float().mean()),
        robust_second=float(same_budget[1].float().mean()),
        p=paired_test(same_budget[0].numpy(), same_budget[1].numpy(), groups=groups),
    )
    # the rows of candidates are the more robust model minus the other
    sign = 1 if gap_row.difference.value >= 0 else -1
    rows = []
    for tested in _candidates(targets, same_budget, patch):
        tested_groups = None if groups is None else groups[tested.images.numpy()]
        rows.append(_row(gap_row, tested, sign, tested_groups))
    p_values = holm([row.p for row in rows])
    return gap_row, tuple(replace(row, p_holm=p) for row, p in zip(rows, p_values))


@dataclass(frozen=True)
class _Tested:
    """A candidate with which images are correct under its intervention and under its control.

    values: what the candidate measures, of the first and of the second model.
    control, after: for each of the two models, (images,) True where it is correct under the
        control, and under the intervention.
    images: indices of the images for which it can be tested.
    """

    name: str
    values: tuple[float, float]
    control: Sequence[Right]
    after: Sequence[Right]
    images: Tensor


def _row(
    gap: RobustnessGapRow, tested: _Tested, sign: int, groups: NDArray[np.integer] | None
) -> CandidateRow:
    """Return the row of a candidate, with p before the correction.

    sign: 1 if the first model is the more robust one, else -1.
    groups: of the images for which the candidate was tested.
    """
    before = _points(tested.control)
    after = _points(tested.after)
    accounted = sign * (before - after)
    return CandidateRow(
        first=gap.first,
        second=gap.second,
        candidate=tested.name,
        value_first=tested.values[0],
        value_second=tested.values[1],
        control=mean_points(sign * before, groups=groups),
        after=mean_points(sign * after, groups=groups),
        accounted=_mean_change(accounted, groups),
        p=_p_of(accounted, groups),
    )


def _p_of(points: NDArray[np.float64], groups: NDArray[np.integer] | None) -> float:
    """Return the two-sided p of the hypothesis that changes of a difference have mean 0.

    If the change is the same on all images, so that its error is 0, it is that of the sign test.
    """
    is_same_change = len(points) > 0 and np.ptp(points) == 0 and points[0] != 0
    if is_same_change:
        independent = len(points) if groups is None else len(np.unique(groups))
        return float(2.0 ** (1 - independent))  # all signs equal: 2 of 2 ** independent outcomes
    return student_test(points, groups=groups)


def _mean_change(points: NDArray[np.float64], groups: NDArray[np.integer] | None) -> Estimate:
    """Return the mean of changes of a difference, each between -200 and 200 points."""
    half = mean_points(points / 2, groups=groups)  # it expects points between -100 and 100
    low = None if half.low is None else 2 * half.low
    high = None if half.high is None else 2 * half.high
    return Estimate(2 * half.value, low, high, half.n, "points")


def _points(right: Sequence[Right]) -> NDArray[np.float64]:
    """Return the first model's correctness minus the second's on each image, in points."""
    first, second = right
    points: NDArray[np.float64] = 100 * (first.double() - second.double()).numpy()
    return points


def _candidates(
    targets: Sequence[Target], same_budget: Sequence[Right], patch: tuple[int, int] | None
) -> Iterator[_Tested]:
    """Yield every candidate with the results of its intervention and of its control.

    same_budget: for each model, which images are correct with the same budget for both.
    """
    yield _frequency(targets)
    if patch is not None:
        on_grid = _patch_grid(targets, patch)
        if len(on_grid.images) >= FEWEST:
            yield on_grid
    first, second = targets
    gradients = (first.gradients(), second.gradients())
    margins = (first.margins(), second.margins())
    distances = []
    for model_margins, model_gradients in zip(margins, gradients):
        distances.append(model_margins / model_gradients.clamp_min(_TINY))
    yield _match_budgets("gradient", targets, same_budget, gradients, inverse=True)
    yield _match_budgets("margin", targets, same_budget, margins)
    yield _match_budgets("distance", targets, same_budget, distances)


def _frequency(targets: Sequence[Target]) -> _Tested:
    """Return the models on perturbations without high frequencies, and without random ones."""
    control = []
    after = []
    high_shares = []
    for target in targets:
        change = target.adversarial - target.clean
        _, high = frequency_bands(change, cutoff=CUTOFF)
        energy = _energy(change)
        is_changed = energy > 0
        high_energy = _energy(high)[is_changed].sum()
        high_shares.append(float(high_energy / energy.sum().clamp_min(_TINY)))
        radii = _radii(change)
        low = _half_of_energy(change, radii)
        after.append(target.is_right(_with_length_of(target.clean, low, change)))
        generator = torch.Generator().manual_seed(0)
        random_ranks = torch.rand(radii.shape, generator=generator)
        random_half = _half_of_energy(change, random_ranks)
        control.append(target.is_right(_with_length_of(target.clean, random_half, change)))
    images = torch.arange(len(targets[0].clean))
    return _Tested(
        name="frequency",
        values=(high_shares[0], high_shares[1]),
        control=control,
        after=after,
        images=images,
    )


def _energy(change: Images) -> PerImage:
    return change.flatten(1).square().sum(1)


def _with_length_of(clean: Images, change: Images, other: Images) -> Images:
    """Return the clean images changed in this direction as far (L2) as by the other change."""
    factor = (_energy(other) / _energy(change).clamp_min(_TINY)).sqrt()
    changed: Images = (clean + change * factor[:, None, None, None]).clamp(0, 1)
    return changed


def _radii(change: Images) -> Float[Tensor, "batch frequencies"]:
    """Return the frequency of each component of `rfft2`, as a share of Nyquist's."""
    height, width = change.shape[-2:]
    vertical = 2 * torch.fft.fftfreq(height)  # Nyquist's frequency is 1/2
    horizontal = 2 * torch.fft.rfftfreq(width)
    radius = (vertical[:, None].square() + horizontal[None].square()).sqrt().flatten()
    radii: Tensor = radius.expand(len(change), -1)
    return radii


def _half_of_energy(change: Images, ranks: Float[Tensor, "batch frequencies"]) -> Images:
    """Return the part of each change that has the lowest ranks, up to half of its energy."""
    height, width = change.shape[-2:]
    spectrum = torch.fft.rfft2(change.float())  # (batch, 3, height, width // 2 + 1)
    power = spectrum.abs().square().sum(1)
    # columns that stand for their conjugates, too: all but 0 and, of an even width, Nyquist's
    power[..., 1 : (width + 1) // 2] *= 2
    order = ranks.argsort(1)  # (batch, frequencies)
    cumulative = power.flatten(1).gather(1, order).cumsum(1)
    total = cumulative[:, -1:]
    is_kept = cumulative <= total / 2  # in the order of the ranks
    mask = torch.zeros_like(is_kept).scatter(1, order, is_kept)  # in the order of the spectrum
    mask = mask.unflatten(1, spectrum.shape[-2:])
    filtered: Images = torch.fft.irfft2(spectrum * mask[:, None], s=(height, width))
    return filtered


def _patch_grid(targets: Sequence[Target], patch: tuple[int, int]) -> _Tested:
    """Return the models on attacked images shifted by half a patch, and by a whole one.

    Images that a model misclassifies after a shift without an attack are left out.
    """
    half = (patch[0] // 2, patch[1] // 2)
    usable = torch.ones(len(targets[0].clean), dtype=torch.bool)
    jumps = []
    for target in targets:
        for shift in (half, patch):
            usable &= target.is_right(target.clean.roll(shift, dims=(2, 3)))
        jumps.append(_jump_at_borders(target.adversarial - target.clean, patch))
    control = []
    after = []
    for target in targets:
        shifted_by_half = target.adversarial.roll(half, dims=(2, 3))
        shifted_by_patch = target.adversarial.roll(patch, dims=(2, 3))
        after.append(target.is_right(shifted_by_half)[usable])
        control.append(target.is_right(shifted_by_patch)[usable])
    images = usable.nonzero().flatten()
    return _Tested(
        name="patch-grid",
        values=(jumps[0], jumps[1]),
        control=control,
        after=after,
        images=images,
    )


def _jump_at_borders(change: Images, patch: tuple[int, int]) -> float:
    """Return how much larger steps of a change are between patches than inside; 1 if alike."""
    ratios = []
    for axis, other_axis, side in ((2, 3, patch[0]), (3, 2, patch[1])):  # down, then across
        steps = change.diff(dim=axis).abs().mean((0, 1, other_axis))
        # step i is between pixels i and i + 1, which starts a patch if it is a multiple of the side
        is_border = (torch.arange(len(steps)) + 1) % side == 0
        if is_border.any() and not is_border.all():
            between = steps[is_border].mean()
            inside = steps[~is_border].mean().clamp_min(_TINY)
            ratios.append(float(between / inside))
    if not ratios:
        return 1.0
    return float(np.mean(ratios))


def _match_budgets(
    name: str,
    targets: Sequence[Target],
    same_budget: Sequence[Right],
    values: Sequence[PerImage],
    *,
    inverse: bool = False,
) -> _Tested:
    """Return the models at budgets that are in the same ratio to a value for both models.

    Then budget_1 / budget_2 = value_1 / value_2.

    inverse: True to make the product of budget and value equal, not their ratio: then
        budget_1 / budget_2 = value_2 / value_1.
    """
    first, second = (value.double().clamp_min(_TINY) for value in values)
    if inverse:
        ratio = second / first
    else:
        ratio = first / second
    # one budget is multiplied and the other divided by the root, so together they change by ratio
    factor = ratio.sqrt()
    after = [
        targets[0].robust_at(_budgets(targets[0].epsilon, factor)),
        targets[1].robust_at(_budgets(targets[1].epsilon, 1 / factor)),
    ]
    means = (float(values[0].mean()), float(values[1].mean()))
    all_images = torch.arange(len(factor))
    return _Tested(name, values=means, control=same_budget, after=after, images=all_images)


def _budgets(epsilon: float, factors: PerImage) -> PerImage:
    """Return the budget of each image, rounded to a few so that they can be attacked together."""
    factors = factors.clamp(1 / _LARGEST_FACTOR, _LARGEST_FACTOR)
    exponents = (factors.log2() * _STEPS_PER_DOUBLING).round() / _STEPS_PER_DOUBLING
    budgets: PerImage = epsilon * 2**exponents
    return budgets
