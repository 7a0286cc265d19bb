"""How much each command will ask of a model: images passed through it, counted from what was asked for.

A resumed run has done a part already: these counts are upper limits.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.analysis.ablation.effects import Unit
from vitlens.analysis.attention.registry import WITH_WEIGHTS
from vitlens.analysis.faithfulness.deletion import STEPS as REMOVALS
from vitlens.analysis.faithfulness.league import BASELINES, RANDOMISED
from vitlens.analysis.faithfulness.randomisation import PARTS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.scaffold.expected import Part
from vitlens.runs.ablate_choices import AblateChoices
from vitlens.runs.ablate_look import CURVED, POINTS, RANDOM_ORDERS
from vitlens.runs.stats_learning import IMAGES, MOMENTS

_SEARCHED: Final = 16  # passes an image of the search for what turns a prediction, about


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
