"""How many forward passes a run of `vitlens stats` takes, counted from its options."""

from vitlens.analysis.attention.registry import WITH_WEIGHTS
from vitlens.commands.scaffold.expected import Part
from vitlens.commands.stats.measure.training import CHECKPOINTS, IMAGES


def stats_parts(images: int, *, checkpoints: int) -> tuple[Part, ...]:
    """The attention weights of all images; and, for each checkpoint of a training, of some of them."""
    over = WITH_WEIGHTS * min(checkpoints, CHECKPOINTS) * min(images, IMAGES)
    return (
        Part("statistics of heads", WITH_WEIGHTS * images),
        *([Part("over training", over, shorter="leave out --over-training")] if checkpoints else []),
    )
