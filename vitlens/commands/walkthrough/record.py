"""The record of `vitlens walkthrough`. Layers, heads, tokens, rows and columns count from 0;
entropies are in nats.
"""

from dataclasses import dataclass

from vitlens.arrays import Images, Indices, Matrix, Pixels, Vector
from vitlens.names import StepName
from vitlens.record import Record, arrays, col, head_name, table


@dataclass(frozen=True)
class WalkRow:
    """The head, and the numbers of one query and of the key to which it attends most."""

    image: str
    layer: int
    head: int
    layers: int
    heads: int
    named: bool  # True if the user chose the head
    grid: tuple[int, int]
    patch_size: tuple[int, int]  # px
    image_size: tuple[int, int]  # px
    patches: int
    patch_values: int  # numbers of one patch, in three colours
    tokens: int
    prefix: tuple[str, ...]  # tokens before the patches
    readout: str  # tokens that the classifier reads
    dim: int
    head_dim: int
    query: int
    key: int
    query_name: str
    key_name: str
    scale: float  # of the model
    expected_scale: float  # 1 / sqrt(head_dim)
    product: float  # of query and key
    score: float  # the product times the scale
    weight: float  # after the softmax
    times_uniform: float  # the weight divided by that of uniform attention
    largest: float  # weight of the query's row
    unscaled_largest: float  # the same without scaling
    prefix_mass: float  # weight of the query's row on prefix tokens
    output_norm: float  # at the query

    name = head_name


@dataclass(frozen=True)
class StepRow:
    """One step computed again by hand and compared with the model."""

    step: StepName = col("step")
    largest: float = col("largest value")
    # the largest; None for a step that was not computed
    difference: float | None = col("difference", default=None)
    relative: float | None = col(
        "largest difference",
        term="the step computed by hand minus the model's, as a share of the step's largest value",
        default=None,
    )
    formula: str = col("by hand", default="")
    compared: str = col("compared with", default="")
    note: str | None = col("note", default=None)  # why a step was not computed


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
    """The patches in another order, with or without positions."""

    positions: bool  # True for the model with its positions
    # the largest, of the last block's patches and the permuted patches of the unchanged run
    difference: float
    logits: float  # the largest difference of a logit
    largest: float  # value of the patches
    prediction: str | None = None
    probability: float | None = None

    @property
    def equivariant(self) -> bool:
        """Return True if permuted patches give permuted outputs, up to rounding."""
        return self.difference <= 1e-4 * self.largest


@dataclass(frozen=True)
class AnswerRow:
    """The output of the model with one change; predictions are None without a classifier."""

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

    pixels: Pixels  # the image as the model saw it
    order: Indices  # of the permuted patches
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
        """Return the head."""
        return self.walk[0]
