"""How much each command will ask of a model: images passed through it, counted from what was asked for.

A resumed run has done a part already: these counts are upper limits.
"""

from vitlens.analysis.attention.registry import WITH_WEIGHTS
from vitlens.commands.scaffold.expected import Part
from vitlens.runs.stats_learning import IMAGES, MOMENTS


def stats_parts(images: int, *, moments: int) -> tuple[Part, ...]:
    """All attention weights of all images; and, for so many sets of weights kept over training, of some images."""
    over = WITH_WEIGHTS * min(moments, MOMENTS) * min(images, IMAGES)
    return (
        Part("watching heads", WITH_WEIGHTS * images),
        *([Part("over training", over, shorter="leave out --over-training")] if moments else []),
    )
