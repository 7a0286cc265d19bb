"""Signs of masked gradients in the outcomes of attacks, such as a weaker attack that breaks more images."""

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.robustness.checks import SIGNIFICANT
from vitlens.analysis.robustness.curve import Outcome
from vitlens.analysis.robustness.verdict import Check
from vitlens.uncertainty import mcnemar

PerImage = Float[Tensor, " batch"]


def weaker_breaks_no_more(weaker: Outcome, stronger: Outcome, *, reason: str) -> Check:
    """The weaker of two attacks breaks no more images than the stronger at any epsilon, but for chance.

    reason: why it is the weaker one ("one step against many"). Only the epsilons that both tried are compared.
    """
    least_p, worst = 1.0, None
    against = of = 0
    both = [epsilon for epsilon in weaker.epsilons if epsilon in stronger.epsilons]
    for epsilon in both:
        by_weaker, by_stronger = ~weaker.robust(epsilon), ~stronger.robust(epsilon)
        only_weaker = int((by_weaker & ~by_stronger).sum())
        only_stronger = int((~by_weaker & by_stronger).sum())
        p = min(1.0, len(both) * mcnemar(only_weaker, only_stronger))  # Bonferroni, as the least is taken
        if only_weaker > only_stronger and p < least_p:
            least_p, worst = p, (epsilon, only_weaker, only_stronger)
            against, of = only_weaker, only_weaker + only_stronger
    result = "nowhere weaker"
    if worst is not None:
        result = (
            f"at {worst[0]:.3g}, {worst[1]} broken by {weaker.name} alone, {worst[2]} by {stronger.name} alone "
            f"(p = {least_p:.2g})"
        )
    return Check(
        reason, f"{weaker.name}, {stronger.name}", f"{stronger.name} breaks at least what {weaker.name} does",
        result, least_p > SIGNIFICANT,
        conclusive=any(_broke(outcome, epsilon) for outcome in (weaker, stronger) for epsilon in both),
        against=against, of=of,
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


def same_in_ascending_order(attack: str, above: PerImage, below: PerImage) -> Check:
    """An image that is robust at one epsilon is robust at all smaller ones, as a sweep from the largest assumes.

    above, below: the smallest epsilon that breaks each image, tried in descending and in ascending order.
    """
    sooner = int((below < above).sum())
    return Check(
        "from below", attack, "tried from the smallest epsilon up, no image breaks at a smaller one",
        f"{sooner} of {len(below)} do", sooner == 0, conclusive=bool((above.isfinite() | below.isfinite()).any()),
    )  # fmt: skip
