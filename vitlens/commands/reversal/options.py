"""The options of `vitlens reversal`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import bundle, option
from vitlens.commands.run.options import RunOptions
from vitlens.names import SequencePositions, SequenceTask

_LAYER = "Task and layer"


@dataclass(frozen=True, kw_only=True)
class ReversalOptions:
    """The task, the layer and its training."""

    task: SequenceTask = option(
        "--task", "What the layer does with random vectors.", default="reverse", panel=_LAYER
    )
    length: int = option(
        "--length", "Vectors in a sequence.", default=10, metavar="N", low=2, panel=_LAYER
    )
    heads: int = option(
        "--heads", "Heads, a divisor of 64.", default=4, metavar="N", low=1, panel=_LAYER
    )
    positions: SequencePositions = option(
        "--positions",
        "What is added to the vectors before queries and keys are computed.",
        default="learned",
        panel=_LAYER,
    )
    steps: int = option(
        "--steps",
        "Training steps, of 32 sequences.",
        default=1000,
        metavar="N",
        low=1,
        panel=_LAYER,
    )
    run: RunOptions = bundle(RunOptions)
