"""How much each command will ask of a model: images passed through it, counted from what was asked for.

Attacks stop early on images that break, and a resumed run has done a part already: these counts are upper limits.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.analysis.attention.registry import WITH_WEIGHTS
from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.analysis.faithfulness.deletion import STEPS as REMOVALS
from vitlens.analysis.faithfulness.league import BASELINES, RANDOMISED
from vitlens.analysis.faithfulness.randomisation import PARTS
from vitlens.attacks.registry import members_of
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.scaffold.expected import Part
from vitlens.runs.attack_choices import AttackChoices
from vitlens.runs.stats_learning import IMAGES, MOMENTS

_SEARCHED: Final = 16  # passes an image of the search for what turns a prediction, about


def stats_parts(images: int, *, moments: int) -> tuple[Part, ...]:
    """All attention weights of all images; and, for so many sets of weights kept over training, of some images."""
    over = WITH_WEIGHTS * min(moments, MOMENTS) * min(images, IMAGES)
    return (
        Part("watching heads", WITH_WEIGHTS * images),
        *([Part("over training", over, shorter="leave out --over-training")] if moments else []),
    )


def explain_parts(methods: Sequence[str], images: int, *, verify: bool, counterfactuals: bool) -> Iterator[Part]:
    """Maps by each method, and the checks of each."""
    forwards = sum(ATTRIBUTIONS[name].forwards for name in methods)
    backwards = sum(ATTRIBUTIONS[name].backwards for name in methods)
    slow = [name for name in methods if ATTRIBUTIONS[name].slow]
    shorter = f"--method without {', '.join(slow)}" if slow else ""
    yield Part("maps", forwards * images, backwards * images, shorter)
    if verify:
        # deletion and insertion, and ROAD's two orders, of each method and baseline; maps anew at each stage
        curves = 4 * REMOVALS * (len(methods) + len(BASELINES)) * images
        again = PARTS * min(images, RANDOMISED)
        yield Part("checks", curves + forwards * again, backwards * again)
        if counterfactuals:
            searched = _SEARCHED * len(methods) * images
            yield Part("counterfactuals", searched, shorter="--no-counterfactuals")


def attack_parts(choices: AttackChoices, images: int) -> Iterator[Part]:
    """Each attack at each epsilon, on images of which none breaks early; and common corruptions."""
    for name in choices.attacks:
        forwards = backwards = 0.0
        for member in members_of(name):
            epsilons = {"linf": len(choices.linf), "l2": len(choices.l2)}.get(member.norm, 1)
            spent = member.passes(choices.steps_for(name), epsilons=epsilons, restarts=choices.restarts)
            if member.gradients:
                backwards += spent
            else:
                forwards += spent
        yield Part(f"{name} (at most)", forwards * images, backwards * images, f"--attack without {name}, or --steps")
    if choices.corruptions and not choices.predicted:
        kinds = len(CORRUPTIONS) * len(SEVERITIES)
        yield Part("common corruptions", kinds * images, 0.0, "--no-corruptions")


def compare_parts(
    method: str, images: int, *, mapped: int, watched: int, hardened: int, attentive: bool
) -> Iterator[Part]:
    """One model's share of a comparison. hardened: images shown on all levels of all disturbances."""
    cost = ATTRIBUTIONS[method]
    yield Part("answers", images)
    yield Part("maps", cost.forwards * mapped, cost.backwards * mapped, "a smaller --maps")
    if attentive:
        yield Part("attention", WITH_WEIGHTS * watched)
    if hardened:
        yield Part("harder images", hardened, 0.0, "--no-harder")
