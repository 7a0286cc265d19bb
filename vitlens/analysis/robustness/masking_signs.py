"""Signs of masked gradients in the results: a weaker attack that breaks more."""

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.robustness.checks import SIGNIFICANT
from vitlens.analysis.robustness.curve import Outcome
from vitlens.analysis.robustness.verdict import Check
from vitlens.uncertainty import mcnemar

PerImage = Float[Tensor, " batch"]


def stronger_in_order(weaker: Outcome, stronger: Outcome, *, reason: str) -> Check:
    """An attack that should be the weaker one leaves at least as many images robust, at every epsilon, but for chance.

    reason: why it should be ("one step against many"). Both must have tried the same epsilons; others are left out.
    """
    worst, where = 1.0, None
    both = [epsilon for epsilon in weaker.epsilons if epsilon in stronger.epsilons]
    for epsilon in both:
        one, other = weaker.robust(epsilon), stronger.robust(epsilon)
        more, fewer = int((~one & other).sum()), int((one & ~other).sum())
        p = min(1.0, len(both) * mcnemar(more, fewer))  # Bonferroni: the worst of them is looked at
        if more > fewer and p < worst:
            worst, where = p, (epsilon, more, fewer)
    found = "nowhere weaker"
    if where is not None:
        found = f"at {where[0]:.3g}, {where[1]} broken by {weaker.name} alone, {where[2]} by {stronger.name} alone"
    return Check(
        reason, f"{weaker.name}, {stronger.name}", f"{stronger.name} breaks at least what {weaker.name} does",
        f"{found}{'' if where is None else f' (p = {worst:.2g})'}", worst > SIGNIFICANT,
        conclusive=any(_broke(one, epsilon) for one in (weaker, stronger) for epsilon in both),
    )  # fmt: skip


def _broke(outcome: Outcome, epsilon: float) -> bool:
    return bool((outcome.clean & ~outcome.robust(epsilon)).any())


def never_rises(outcome: Outcome) -> Check:
    """Robust accuracy falls or stays as epsilon grows."""
    counts = [int(outcome.robust(epsilon).sum()) for epsilon in (0.0, *outcome.epsilons)]
    rises = sum(after > before for before, after in pairwise(counts))
    return Check(
        "curve", outcome.name, "never rises", f"{' '.join(map(str, counts))} images right", rises == 0,
        conclusive=len(set(counts)) > 1,
    )  # fmt: skip


def same_from_below(attack: str, above: PerImage, below: PerImage) -> Check:
    """Whether what stands at one epsilon stands at all smaller ones, which a sweep from the largest takes for granted.

    above, below: the smallest epsilon that breaks each image, found from the largest and from the smallest.
    """
    sooner = int((below < above).sum())
    return Check(
        "from below", attack, "tried from the smallest epsilon up, no image breaks at a smaller one",
        f"{sooner} of {len(below)} do", sooner == 0, conclusive=bool((above.isfinite() | below.isfinite()).any()),
    )  # fmt: skip
