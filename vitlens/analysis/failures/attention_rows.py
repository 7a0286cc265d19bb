"""Attention on errors compared with attention on correct predictions: quantities and rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from vitlens.record import OfModel, col
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond


@dataclass(frozen=True)
class Quantity:
    """One property of the attention of a layer on an image, as a share.

    title: its name in tables.
    term: its definition.
    more, less: what attention does on errors if the difference is positive, or negative.
    """

    title: str
    term: str
    more: str
    less: str


QUANTITIES: Final[Mapping[str, Quantity]] = MappingProxyType(
    {
        "entropy": Quantity(
            title="entropy",
            term="entropy of the attention of the token that is read, divided by the largest "
            "possible one; mean over heads",
            more="is more spread out",
            less="is more concentrated",
        ),
        "prefix": Quantity(
            title="mass on CLS and registers",
            term="attention of the token that is read on CLS and registers; mean over heads",
            more="lies more on CLS and registers",
            less="lies less on CLS and registers",
        ),
        "object": Quantity(
            title="share on the object",
            term="share of the attention on patches that lies on the object; mean over heads",
            more="lies more on the object",
            less="lies less on the object",
        ),
    }
)


@dataclass(frozen=True)
class OutcomeAttentionRow(OfModel):
    """The attention of one layer on errors, compared with correct predictions of the same class.

    quantity: the name of the quantity in QUANTITIES.
    failed, passed: the mean on errors and on correct predictions.
    difference: the mean over errors minus that over correct predictions, as a weighted mean over
        classes.
    errors, correct: the numbers of errors and of correct predictions in classes with both.
    classes: the number of classes with both.
    p: the p-value of a stratified permutation test.
    p_holm: the p-value, corrected for all rows of the model.
    """

    quantity: str = col("quantity")
    layer: int = col("layer")
    failed: float = col("on errors", unit="fraction")
    passed: float = col("on correct predictions of the same class", unit="fraction")
    difference: Estimate = col(
        "errors minus correct predictions",
        metric="attention_on_errors/{model}/{quantity}/{layer}",
        term="difference of attention between errors and correct predictions of one class, "
        "averaged over classes",
    )
    errors: int = col("errors")
    correct: int = col("correct predictions")
    classes: int = col("classes with both")
    p: float = col("p")
    p_holm: float = col("p (Holm)", default=1.0)

    @property
    def title(self) -> str:
        """Return the name of the quantity."""
        return QUANTITIES[self.quantity].title

    @property
    def quantity_and_layer(self) -> str:
        """Return the quantity with its layer, for a table."""
        return f"{self.title}, layer {self.layer}"

    @property
    def no_difference(self) -> float:
        """Return the difference if attention were the same."""
        return 0.0

    @property
    def differs(self) -> bool:
        """Return True if errors are shown to differ from correct predictions."""
        return self.p_holm <= LEVEL and beyond(self.difference, 0.0) is not Side.UNDECIDED

    @property
    def words(self) -> str:
        """Return what attention does on errors, e.g. "is more spread out"."""
        quantity = QUANTITIES[self.quantity]
        return quantity.more if self.difference.value > 0 else quantity.less


@dataclass(frozen=True)
class UntestedAttentionRow(OfModel):
    """A model with attention on errors that was not compared, and the reason."""

    reason: str = col("reason", unit="text")
