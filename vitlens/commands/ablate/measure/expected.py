"""How many passes through the model a run of `vitlens ablate` takes, counted from its options."""

from collections.abc import Iterator, Sequence

from vitlens.analysis.ablation.effects import Unit
from vitlens.commands.ablate.measure.removal import POINTS, RANDOM_ORDERS, REMOVAL_IMAGES, RERANKINGS
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.scaffold.expected import Part


def ablate_parts(units: Sequence[Unit], images: int, options: AblateOptions) -> Iterator[Part]:
    """Each unit removed, by replaying the layers above it; then the curves, and pairs of heads.

    An upper limit: a resumed run has done some of it before.
    """
    depth = 1 + max(unit.layer for unit in units)
    # a head is replayed from the middle of its layer on, an MLP or a block from the layer's end
    each = sum((depth - unit.layer - (0.5 if unit.kind == "head" else 1.0)) / depth for unit in units)
    if options.top is not None:
        yield Part("finding the most important heads", each * images)
        return
    replacements = len(options.replace) or 1  # none named: a default that depends on the number of images
    yield Part("removing each unit", (1 + each) * replacements * images, replacements * images, "--units head")
    heads = sum(unit.kind == "head" for unit in units)
    if options.curves and heads > 1:
        orders = 3 + RANDOM_ORDERS
        yield Part("removing heads in order", orders * POINTS * min(images, REMOVAL_IMAGES), 0.0, "--no-curves")
        if options.greedy:
            passes = heads * RERANKINGS / 2 * min(images, REMOVAL_IMAGES)
            yield Part("ranking again after each removal", passes, 0.0, "no --greedy")
    if options.pairs and heads > 1:
        sets = options.pairs * (options.pairs + 1) / 2 + 3 * options.pairs  # of the important, and of similar heads
        yield Part("removing pairs of heads", sets * min(images, REMOVAL_IMAGES), 0.0, "--pairs 0")
