"""The options of `vitlens walkthrough`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import SharedOptions, data_option, images_option, one_model

_HEAD = "Head (layers and heads count from 0)"


@dataclass(frozen=True)
class WalkthroughOptions(SharedOptions):
    """Model, image and head.

    layer: None for the middle one.
    head: None for the one of the layer with the lowest attention entropy.
    """

    model: str = one_model()
    images: tuple[str, ...] = images_option()
    data: str | None = data_option()
    layer: int | None = option(
        "--layer",
        "Layer (default: the middle one).",
        default=None,
        metavar="N",
        low=0,
        shown=False,
        panel=_HEAD,
    )
    head: int | None = option(
        "--head",
        "Head of that layer (default: the one with the lowest attention entropy).",
        metavar="N",
        low=0,
        shown=False,
        panel=_HEAD,
    )
