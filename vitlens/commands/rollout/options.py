"""The options of `vitlens rollout`."""

from dataclasses import dataclass

from vitlens.analysis.attention.registry import ALPHA, ATTENTION_METHODS
from vitlens.commands.run.flags import choices, option
from vitlens.commands.run.options import SharedOptions, data_option, images_option, one_model
from vitlens.names import FUSIONS, Fusion, Readout


@dataclass(frozen=True)
class RolloutOptions(SharedOptions):
    """The model, its images, and the methods of maps with their settings.

    method: empty for rollout and, with a classifier, relevance.
    """

    model: str = one_model()
    images: tuple[str, ...] = images_option()
    data: str | None = data_option()
    method: tuple[str, ...] = choices(
        "--method",
        f"Methods, comma-separated: {', '.join(ATTENTION_METHODS)}.",
        ATTENTION_METHODS,
        default=(),
        shown="rollout and, with a classifier, relevance",
    )
    target: str = option(
        "--target",
        "Class whose logit is differentiated: predicted, true, or a class by name or index.",
        default="predicted",
        metavar="CLASS",
    )
    fusion: tuple[Fusion, ...] = choices(
        "--fusion",
        f"Fusion of heads in rollout, comma-separated: {', '.join(FUSIONS)}.",
        FUSIONS,
        default=FUSIONS,
    )
    discard: float = option(
        "--discard",
        "Fraction of the lowest weights of each row that rollout discards.",
        default=0.0,
        low=0,
        high=0.99,
    )
    alpha: float = option(
        "--alpha",
        "Share of the identity, which represents the residual connection.",
        default=ALPHA,
        low=0,
        high=1,
    )
    start_layer: int = option(
        "--start-layer",
        "First layer of the product, counted from 0.",
        default=0,
        metavar="N",
        low=0,
    )
    layer: int | None = option(
        "--layer",
        "Layer of --method attention, counted from 0 (default: the last).",
        default=None,
        metavar="N",
        low=0,
    )
    readout: Readout | None = option(
        "--readout",
        "Tokens whose attention is read (default: those that the classifier reads).",
        default=None,
    )
