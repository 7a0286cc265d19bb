"""What `vitlens rollout` is told."""

from dataclasses import dataclass
from typing import Annotated

from vitlens.analysis.attention.defaults import ALPHA
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.commands.scaffold.flags import bundle, choices, option
from vitlens.commands.scaffold.options import ModelOptions, RunOptions, data_option, images_option, one_model
from vitlens.names import FUSIONS, Fusion, Readout
from vitlens.schema import Given


@dataclass(frozen=True)
class RolloutOptions:
    """Attention followed to the image: rollout (Abnar & Zuidema 2020), relevance (Chefer 2021) and similar methods.

    method: none for the usual ones that the model has; target: whose logit gradients are of, "predicted", "true" or a
    class by name or index; layer: whose attention the method attention shows (None: the last).
    """

    model: str = one_model()
    images: tuple[str, ...] = images_option()
    data: str | None = data_option()
    method: tuple[str, ...] = choices(
        "--method",
        f"Comma-separated: {', '.join(ATTENTION_METHODS)}.",
        tuple(ATTENTION_METHODS),
        default=(),
        shown="rollout and, of a model with a classifier, relevance",
    )
    target: Annotated[str, Given()] = option(
        "--target", "Of gradients: predicted, true, or a class (name or index).", default="predicted", metavar="CLASS"
    )
    fusion: tuple[Fusion, ...] = choices(
        "--fusion", "How heads become one in rollout: mean, max, min.", FUSIONS, default=FUSIONS
    )
    discard: float = option(
        "--discard", "Fraction of the lowest weights to drop (rollout).", default=0.0, low=0, high=0.99
    )
    alpha: float = option("--alpha", "Share of the identity (the residual connection).", default=ALPHA, low=0, high=1)
    start_layer: int = option("--start-layer", "First layer of the product, from 0.", default=0, metavar="N", low=0)
    layer: int | None = option(
        "--layer", "Of method attention, from 0 (default: the last).", default=None, metavar="N", low=0
    )
    readout: Readout | None = option(
        "--readout", "Row to read (default: what the model's classifier reads).", default=None
    )
    model_options: ModelOptions = bundle(ModelOptions)
    run: RunOptions = bundle(RunOptions)
