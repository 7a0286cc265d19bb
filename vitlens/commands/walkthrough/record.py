"""The record of `vitlens walkthrough`. Layers, heads, tokens, rows and columns count from 0;
entropies are in nats.
"""

from dataclasses import dataclass
from typing import Final

from vitlens.arrays import Images, Indices, Matrix, Pixels, Vector
from vitlens.names import StepName
from vitlens.record import Record, arrays, col, head_name, table

# the share of the largest value by which outputs in float32 differ if sums have another order
_ROUNDING: Final = 1e-4


@dataclass(frozen=True)
class WalkRow:
    """The head, and the numbers of one query and of the key to which it attends most."""

    image: str
    layer: int
    head: int
    layers: int  # their number, as of heads, patches and tokens
    heads: int
    named: bool  # True if the user chose the head
    grid: tuple[int, int]  # patches (rows, columns)
    patch_size: tuple[int, int]  # (height, width) in px
    image_size: tuple[int, int]  # (height, width) in px
    patches: int
    patch_values: int  # numbers of one patch, in three colours
    tokens: int
    prefix: tuple[str, ...]  # tokens before the patches
    readout: str  # tokens that the classifier reads
    dim: int
    head_dim: int
    query: int  # token, the prefix included
    key: int  # token, the prefix included
    query_name: str
    key_name: str
    scale: float  # of the model
    expected_scale: float  # 1 / sqrt(head_dim)
    product: float  # of query and key
    score: float  # the product times the scale
    weight: float  # after the softmax
    times_uniform: float  # the weight divided by that of uniform attention
    largest: float  # the largest weight of the query
    unscaled_largest: float  # the same without scaling
    prefix_mass: float  # the sum of the query's weights on prefix tokens
    output_norm: float  # norm of the head's output for the query

    name = head_name


@dataclass(frozen=True)
class StepRow:
    """One step computed again by hand and compared with the model.

    difference, relative: the largest difference, and its share of the largest value; None for a
        step that was not computed.
    note: why a step was not computed.
    """

    step: StepName = col("step")
    largest: float = col("largest value")
    difference: float | None = col("difference", default=None)
    relative: float | None = col(
        "largest difference",
        term="the step computed by hand minus the model's, as a share of the step's largest value",
        default=None,
    )
    formula: str = col("by hand", default="")
    compared: str = col("compared with", default="")
    note: str | None = col("note", default=None)


@dataclass(frozen=True)
class PartRow:
    """A vector of the block at the followed token."""

    part: str = col("vector")
    norm: float = col("norm of the vector")


@dataclass(frozen=True)
class HeadRow:
    """The norm of one head's part of the output at the followed token."""

    head: int = col("head")
    norm: float = col("norm of its part")


@dataclass(frozen=True)
class HeadEntropyRow:
    """The entropy of one head's weights, mean over the queries, with and without scaling."""

    layer: int = col("layer")
    head: int = col("head")
    scaled: float = col("entropy", unit="nats")
    unscaled: float = col("entropy, not scaled", unit="nats")


@dataclass(frozen=True)
class PermutationRow:
    """A run with the patches in another order, compared with the run in the original order.

    positions: True if both runs have position embeddings.
    difference: the largest between the last block's patches and those of the original run, put into
        the other order.
    logits: the largest difference of a logit.
    largest: the largest value of the last block's patches.
    prediction, probability: of the run in the other order; None without a classifier.
    """

    positions: bool
    difference: float
    logits: float
    largest: float
    prediction: str | None = None
    probability: float | None = None

    @property
    def equivariant(self) -> bool:
        """Return True if permuted patches give permuted outputs, up to rounding."""
        return self.difference <= _ROUNDING * self.largest


@dataclass(frozen=True)
class AnswerRow:
    """The output of the model with one change; the first row is that of the unchanged model.

    Predictions and probabilities are None without a classifier.
    """

    change: str = col("change of the model")
    difference: float = col("largest change of a logit")
    prediction: str | None = col("prediction", default=None)
    probability: float | None = col("its probability", unit="fraction", default=None)
    of_own: float | None = col(
        "probability of the unchanged model's class", unit="fraction", default=None
    )


@dataclass(frozen=True)
class HeadArrays:
    """The steps of the head."""

    pixels: Pixels  # the image as the model saw it (1, 3, height, width)
    order: Indices  # of the permuted patches: the patch at each place
    queries: Matrix  # (tokens, head_dim)
    keys: Matrix  # (tokens, head_dim)
    values: Matrix  # (tokens, head_dim)
    scores: Matrix  # (query, key)
    weights: Matrix  # (query, key)


@dataclass(frozen=True)
class EmbeddingArrays:
    """The patch embedding, and the filters that respond most to the key's patch."""

    embedded: Matrix  # by hand (patches, dim)
    convolved: Matrix  # by the model's convolution (patches, dim)
    filters: Images  # (n, 3, height, width)
    responses: Vector  # of the filters to the patch
    numbers: Indices  # of the filters


@dataclass(frozen=True, kw_only=True)
class WalkthroughRecord(Record):
    """One head on one image, step by step."""

    walk: tuple[WalkRow, ...] = table()
    steps: tuple[StepRow, ...] = table()
    block: tuple[PartRow, ...] = table()
    added: tuple[HeadRow, ...] = table()
    entropies: tuple[HeadEntropyRow, ...] = table()
    permutations: tuple[PermutationRow, ...] = table()
    answers: tuple[AnswerRow, ...] = table()
    head: HeadArrays | None = arrays("head")
    embedding: EmbeddingArrays | None = arrays("embedding")

    @property
    def row(self) -> WalkRow:
        """Return the only row of `walk`: the head that the whole report is about."""
        return self.walk[0]
