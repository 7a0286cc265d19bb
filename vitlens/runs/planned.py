"""How much each command will ask of a model: images passed through it, counted from what was asked for.

Attacks stop early on images that break, and a resumed run has done a part already: these counts are upper limits.
"""

from collections.abc import Iterator, Sequence

from vitlens.analysis.ablation.effects import Unit
from vitlens.analysis.attention.registry import WITH_WEIGHTS
from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.attacks.registry import members_of
from vitlens.commands.scaffold.expected import Part
from vitlens.runs.ablate_choices import AblateChoices
from vitlens.runs.ablate_look import CURVED, POINTS, RANDOM_ORDERS
from vitlens.runs.attack_choices import AttackChoices
from vitlens.runs.stats_learning import IMAGES, MOMENTS


def stats_parts(images: int, *, moments: int) -> tuple[Part, ...]:
    """All attention weights of all images; and, for so many sets of weights kept over training, of some images."""
    over = WITH_WEIGHTS * min(moments, MOMENTS) * min(images, IMAGES)
    return (
        Part("watching heads", WITH_WEIGHTS * images),
        *([Part("over training", over, shorter="leave out --over-training")] if moments else []),
    )


def features_parts(images: int, bank: int) -> tuple[Part, ...]:
    """The features of the test images, and of the training images that answer for them."""
    answering = [Part("features of the bank", bank, shorter="a smaller --bank")] if bank else []
    return (Part("features", images), *answering)


def ablate_parts(units: Sequence[Unit], images: int, choices: AblateChoices) -> Iterator[Part]:
    """Each unit removed, by replaying the layers above it; then the curves, and pairs of heads."""
    depth = 1 + max(unit.layer for unit in units)
    # a head is replayed from the middle of its layer on, an MLP or a block from the layer's end
    each = sum((depth - unit.layer - (0.5 if unit.kind == "head" else 1.0)) / depth for unit in units)
    if choices.top is not None:
        yield Part("telling heads apart", each * images)
        return
    replacements = len(choices.replace) or 1  # none named: the one that so many images allow
    yield Part("removing each unit", (1 + each) * replacements * images, replacements * images, "--units head")
    heads = sum(unit.kind == "head" for unit in units)
    if choices.curves and heads > 1:
        orders = 3 + RANDOM_ORDERS
        yield Part("removing heads in order", orders * POINTS * min(images, CURVED), 0.0, "--no-curves")
        if choices.greedy:
            yield Part("ranking again after each removal", heads * 12 / 2 * min(images, CURVED), 0.0, "no --greedy")
    if choices.pairs and heads > 1:
        sets = choices.pairs * (choices.pairs + 1) / 2
        yield Part("removing pairs of heads", sets * min(images, CURVED), 0.0, "--pairs 0")


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
