"""How many passes through the model a run of `vitlens stats` takes, counted from what was asked for."""

from vitlens.analysis.attention.registry import WITH_WEIGHTS
from vitlens.commands.scaffold.expected import Part
from vitlens.commands.stats.measure.training import IMAGES, MOMENTS


def stats_parts(images: int, *, moments: int) -> tuple[Part, ...]:
    """All attention weights of all images; and, for so many sets of weights kept over training, of some images."""
    over = WITH_WEIGHTS * min(moments, MOMENTS) * min(images, IMAGES)
    return (
        Part("statistics of heads", WITH_WEIGHTS * images),
        *([Part("over training", over, shorter="leave out --over-training")] if moments else []),
    )
