"""What `vitlens walkthrough` records. Layers, heads, tokens, rows and columns count from 0; entropies are in nats."""

from dataclasses import dataclass

from vitlens.arrays import Images, Indices, Matrix, Pixels, Vector
from vitlens.names import StepName
from vitlens.record import Record, arrays, col, head_name, table


@dataclass(frozen=True)
class WalkRow:
    """The head that is walked through, and the numbers of the followed query and the patch to which it attends most.

    named: whether the user named it; patch_values: of one patch, in three colours; prefix: tokens before the patches;
    readout: what the classifier reads; scale: as the model has it, expected_scale: 1 / sqrt(head_dim); product, score,
    weight: of the pair; times_uniform: the weight over that of uniform attention; largest, unscaled_largest: weights of
    the query's row, with and without scaling; prefix_mass: of the row on prefix tokens; output_norm: at the query.
    """

    image: str
    layer: int
    head: int
    layers: int
    heads: int
    named: bool
    grid: tuple[int, int]
    patch_size: tuple[int, int]
    image_size: tuple[int, int]
    patches: int
    patch_values: int
    tokens: int
    prefix: tuple[str, ...]
    readout: str
    dim: int
    head_dim: int
    query: int
    key: int
    query_name: str
    key_name: str
    scale: float
    expected_scale: float
    product: float
    score: float
    weight: float
    times_uniform: float
    largest: float
    unscaled_largest: float
    prefix_mass: float
    output_norm: float

    name = head_name


@dataclass(frozen=True)
class StepRow:
    """One step computed again by hand. difference: the largest from the model's own, None where it was not (note: why);
    largest: the largest value."""

    step: StepName = col("step")
    largest: float = col("largest value")
    difference: float | None = col("difference", default=None)
    relative: float | None = col(
        "largest difference",
        term="by hand minus the model's own, as a share of the largest value of the step",
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
    """What one head of the layer adds at the followed token."""

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
    """The patches in another order, with or without positions: the largest difference of the patches after the last
    block from the same permutation of the plain run's, of the logits, and the largest value of the patches."""

    positions: bool
    difference: float
    logits: float
    largest: float
    prediction: str | None = None
    probability: float | None = None

    @property
    def equivariant(self) -> bool:
        """Return True if permuted patches give permuted outputs, up to rounding."""
        return self.difference <= 1e-4 * self.largest


@dataclass(frozen=True)
class AnswerRow:
    """The model's answer with one change; what concerns classes is None without a classifier."""

    change: str = col("change of the model")
    difference: float = col("largest change of a logit")
    prediction: str | None = col("prediction", default=None)
    probability: float | None = col("its probability", unit="fraction", default=None)
    of_own: float | None = col("probability of the unchanged model's class", unit="fraction", default=None)


@dataclass(frozen=True)
class HeadArrays:
    """The steps of the head. pixels: the image as the model saw it; order: of the permuted patches; queries, keys and
    values (tokens, numbers); scores and weights (query, key)."""

    pixels: Pixels
    order: Indices
    queries: Matrix
    keys: Matrix
    values: Matrix
    scores: Matrix
    weights: Matrix


@dataclass(frozen=True)
class EmbeddingArrays:
    """The patch embedding: embedded: by hand, convolved: by the convolution (patches, dim); filters: those with the
    strongest response to the key's patch (n, 3, height, width), responses: these, numbers: theirs."""

    embedded: Matrix
    convolved: Matrix
    filters: Images
    responses: Vector
    numbers: Indices


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
