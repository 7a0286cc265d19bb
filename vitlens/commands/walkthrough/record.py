"""The record of `vitlens walkthrough`. Layers, heads, tokens, rows and columns count from 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.walkthrough.registry import StepName
from vitlens.archives import Form
from vitlens.records import ArraysOf, Contents, Pixels, TableOf, UntrustedName


@dataclass(frozen=True)
class WalkRow:
    """The head that is walked through. named: whether the user named it; grid, patch_size, image_size: (rows, columns),
    px and px; patch_pixels, patch_values: of one patch, the second in three colours; prefix: tokens before the patches;
    readout: what the classifier reads; query: the token that is followed; key: the patch to which it attends most; both
    with their names in words."""

    image: UntrustedName
    layer: int
    head: int
    layers: int
    heads: int
    named: bool
    grid: tuple[int, int]
    patch_size: tuple[int, int]
    image_size: tuple[int, int]
    patches: int
    patch_pixels: int
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

    @property
    def name(self) -> str:
        """The head as it is written."""
        return f"L{self.layer}.H{self.head}"


@dataclass(frozen=True)
class NumbersRow:
    """The numbers of the followed query and its key.

    scale: as the model has it; expected_scale: 1 / sqrt(head_dim); product, score, weight: of the pair; times_uniform:
    the weight over that of uniform attention; products_deviation, scores_deviation: standard deviations over all pairs;
    largest, unscaled_largest: weights of the query's row, with and without scaling; entropy, unscaled_entropy: of the
    row, nats; uniform_entropy: of uniform attention; prefix_mass: of the row on prefix tokens; the norms: at the
    query's token, of the residual stream before and after the block, and of what is added; widest, widest_norm: the
    head of the layer that adds most there.
    """

    scale: float
    expected_scale: float
    product: float
    score: float
    weight: float
    times_uniform: float
    products_deviation: float
    scores_deviation: float
    largest: float
    unscaled_largest: float
    entropy: float
    unscaled_entropy: float
    uniform_entropy: float
    prefix_mass: float
    output_norm: float
    part_norm: float
    input_norm: float
    attention_norm: float
    mlp_norm: float
    after_norm: float
    widest: int
    widest_norm: float


@dataclass(frozen=True)
class StepRow:
    """One step computed again by hand: the largest difference from the model's own, None where it was not (note: why),
    and the largest value."""

    step: StepName
    difference: float | None
    largest: float
    note: str

    @property
    def relative(self) -> float | None:
        """The difference as a share of the largest value."""
        return None if self.difference is None else self.difference / max(self.largest, 1e-12)


@dataclass(frozen=True)
class HeadEntropyRow:
    """The entropy of one head's weights in nats, mean over the queries, with and without scaling."""

    layer: int
    head: int
    scaled: float
    unscaled: float


@dataclass(frozen=True)
class EntropyRow:
    """All heads: how many have less entropy without scaling, and the mean entropies in nats and as numbers of tokens
    among which attention would be uniform."""

    heads: int
    lower: int
    scaled: float
    unscaled: float
    scaled_tokens: float
    unscaled_tokens: float


@dataclass(frozen=True)
class PermutationRow:
    """The patches in another order, with or without positions: the largest difference of the patches after the last
    block from the same permutation of the plain run's, of the logits, and the largest value of the patches; the
    prediction of the permuted run and its probability, None without a classifier."""

    positions: bool
    difference: float
    logits: float
    largest: float
    prediction: UntrustedName | None
    probability: float | None

    @property
    def equivariant(self) -> bool:
        """Whether permuted patches give permuted outputs, up to rounding."""
        return self.difference <= 1e-4 * self.largest


@dataclass(frozen=True)
class AnswerRow:
    """The model's answer with one change: the largest difference of the logits from its own; prediction, probability,
    and the probability of the class that the unchanged model predicts, None without a classifier."""

    change: str
    difference: float
    prediction: UntrustedName | None
    probability: float | None
    of_own: float | None


@dataclass(frozen=True)
class ReversalRow:
    """The sequence-reversal check of one attention layer: mean squared error on fresh sequences after training, their
    variance, the least error that is possible without positions, and the mean weight on the wanted token."""

    positions: bool
    steps: int
    loss: float
    variance: float
    floor: float
    anti_diagonal: float
    length: int


Vectors: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, None))]
Vector: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None,))]


@dataclass(frozen=True)
class HeadArrays:
    """The steps of the head. pixels: the image as the model saw it; order: of the permuted patches; the others as in
    vitlens.walkthrough, (tokens, values of a token), (query, key), or (heads, tokens)."""

    pixels: Pixels
    order: Annotated[NDArray[np.integer[Any]], Form("i", (None,))]
    input: Vectors
    queries: Vectors
    keys: Vectors
    values: Vectors
    products: Vectors
    scores: Vectors
    weights: Vectors
    unscaled: Vectors
    outputs: Vectors
    projected: Vectors
    head_norms: Vectors


@dataclass(frozen=True)
class EmbeddingArrays:
    """The patch embedding: embedded: by hand, convolved: by the convolution (patches, dim); filters: those with the
    strongest response to the key's patch (n, 3, height, width), responses: these, numbers: theirs; position: what is
    added to that patch (dim,), None where no fixed vector is."""

    embedded: Vectors
    convolved: Vectors
    filters: Annotated[NDArray[np.floating[Any]], Form("f", (None, 3, None, None))]
    responses: Vector
    numbers: Annotated[NDArray[np.integer[Any]], Form("i", (None,))]
    position: Vector | None = None


@dataclass(frozen=True)
class ReversalArrays:
    """By row of the table of the check: losses (steps,) and weights (query, key)."""

    losses: Annotated[Mapping[int, NDArray[np.floating[Any]]], Form("f", (None,))]
    weights: Annotated[Mapping[int, NDArray[np.floating[Any]]], Form("f", (None, None))]


WALK = TableOf("walkthrough", WalkRow)
NUMBERS = TableOf("numbers", NumbersRow)
STEPS = TableOf("steps", StepRow)
ENTROPIES = TableOf("entropies", HeadEntropyRow)
ENTROPY = TableOf("entropy", EntropyRow)
PERMUTATIONS = TableOf("permutations", PermutationRow)
ANSWERS = TableOf("answers", AnswerRow)
REVERSAL = TableOf("reversal", ReversalRow)

HEAD = ArraysOf("head", HeadArrays)
EMBEDDING = ArraysOf("embedding", EmbeddingArrays)
REVERSED = ArraysOf("reversal", ReversalArrays)

RECORD = Contents(
    tables=(WALK, NUMBERS, STEPS, ENTROPIES, ENTROPY, PERMUTATIONS, ANSWERS, REVERSAL),
    arrays=(HEAD, EMBEDDING, REVERSED),
)
