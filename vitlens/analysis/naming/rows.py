"""Rows of the tested labels of heads.

Free of torch: results of this package are these rows, some with further tensors.
"""

from dataclasses import dataclass

from vitlens.record import OfModel, col, head_name
from vitlens.uncertainty import Estimate


@dataclass(frozen=True, kw_only=True)
class OfHead(OfModel):
    """A row about one head."""

    layer: int = col("layer")
    head: int = col("head")

    name = head_name


@dataclass(frozen=True, kw_only=True)
class AttendsRow(OfHead):
    """The query and key components that determine the head's attention.

    word: the label: "same keys", a product, "uniform" (no differences between keys), "mixed" or "no
        single pattern".
    best, share: the product with the largest share of the logits' variance, and this share.
    next, next_share: the product with the second largest share, and this share.
    spread: the standard deviation of the logits over the keys of a row.
    stays: the margin of the test on images with shuffled patches: the correlation of their logits
        with those that the label predicts, minus that with those that it excludes. It is the
        smaller one of the margins for the query and the key. None without a test.
    holds: True if the test confirms the label, after Holm's correction over heads.
    """

    word: str = col("attends by")
    best: str = col("largest part")
    share: Estimate = col(
        "share of the logits",
        term="share of the variance of the attention logits over the keys of a row",
        metric="attends/{model}/L{layer}.H{head}",
    )
    next: str = col("next part")
    next_share: float = col("next share", unit="fraction")
    spread: float = col("spread of the logits", unit="nats")
    stays: Estimate | None = col(
        "on shuffled patches",
        term="correlation of the logits of shuffled images with those that the label predicts, "
        "minus the correlation with those that it excludes",
        default=None,
    )
    holds: bool | None = col("holds", default=None)


@dataclass(frozen=True, kw_only=True)
class LooksRow(OfHead):
    """The pattern of the head's attention.

    word: the label of the pattern.
    score: that of the pattern `best`.
    moved: the score on images with shuffled patches, with masks in the same order. None without a
        test.
    holds: True if the pattern still explains most of the attention on these images. None without a
        test or a single pattern.
    best: the pattern of the highest score, "" in folders of earlier versions.
    """

    word: str = col("looks at")
    score: Estimate = col(
        "score", term="share of the information in a head's attention that the pattern explains"
    )
    moved: Estimate | None = col("on shuffled patches", default=None)
    holds: bool | None = col("holds", default=None)
    best: str = col("best pattern", default="")


@dataclass(frozen=True, kw_only=True)
class WritesRow(OfHead):
    """The classes or attributes (concepts) that the head writes.

    lost, others_lost, margin and p are None without a label.

    word: the label: the concepts in `alike`. None if there are none or too many, or if too few
        images lack them all.
    best: the concept of the highest AUC among those with an AUC significantly above chance; among
        all concepts if there are none.
    auc: the AUC of `best`, with DeLong's interval.
    control: the largest AUC of any head for concepts that are assigned to the images at random.
    state: the result of the ablation test.
    lost: points of accuracy that images with the concepts of the label lose without the head.
    others_lost: points of accuracy that the other images lose.
    margin: how much more the log-odds of the class label fall in images with the concepts.
    p: p-value of the margin, after Holm's correction over heads.
    alike: `best`, and the concepts with an AUC that is not significantly lower. Empty if no AUC is
        significantly above chance.
    """

    word: str | None = col("writes")
    best: str = col("best separated")
    auc: Estimate = col(
        "AUC",
        term="probability that the head adds more to the class in an image of the class than in "
        "another image",
        metric="writes/{model}/L{layer}.H{head}",
    )
    control: float = col("AUC with permuted labels", unit="")
    state: str = col("test of what it writes")
    lost: Estimate | None = col("its images lose", default=None)
    others_lost: Estimate | None = col("others lose", default=None)
    margin: Estimate | None = col(
        "more log-odds lost",
        term="fall of the log-odds of the label in images of the class, minus the fall in other "
        "images",
        default=None,
    )
    p: float | None = col("p", default=None)
    alike: tuple[str, ...] = col("AUC not significantly below the best", default=())
