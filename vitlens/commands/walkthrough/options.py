"""The options of `vitlens walkthrough`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import SharedOptions, data_option, images_option, one_model

_HEAD = "The head (layers and heads from 0)"


@dataclass(frozen=True)
class WalkthroughOptions(SharedOptions):
    """layer, head: which head is walked through (None: the layer in the middle, the head of the least entropy)."""

    model: str = one_model()
    images: tuple[str, ...] = images_option()
    data: str | None = data_option()
    layer: int | None = option(
        "--layer", "Layer (default: the one in the middle).", default=None, metavar="N", low=0, shown=False, panel=_HEAD
    )
    head: int | None = option(
        "--head",
        "Head of that layer (default: the one whose weights have the least entropy).",
        metavar="N",
        low=0,
        shown=False,
        panel=_HEAD,
    )
