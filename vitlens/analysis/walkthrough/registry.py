"""The steps of a walkthrough, in their order: what each computes, and what of the model it is compared with."""

from dataclasses import dataclass
from typing import Final, Literal

StepName = Literal["embedding", "positions", "norm", "queries", "scores", "softmax", "values", "projection", "residual"]


@dataclass(frozen=True)
class Step:
    """One step that is computed again by hand. title: in words; formula: what is computed; compared: with what of the
    model's own forward pass."""

    name: StepName
    title: str
    formula: str
    compared: str


_ENTRIES: Final = (
    Step("embedding", "embedding", "pixels of a patch · weights + bias", "the output of its convolution"),
    Step("positions", "positions", "embedding + position", "the patches before the first block, of another image"),
    Step("norm", "layer norm", "(x - mean) / deviation · scale + shift", "the input of the attention"),
    Step("queries", "queries, keys, values", "x W_q + b_q; so k and v", "the model's own queries, keys, values"),
    Step("scores", "scores", "q k^T / sqrt(d)", "the scores that the lens reads"),
    Step("softmax", "weights", "exp(score) / sum of exp(score)", "the weights that the lens reads"),
    Step("values", "output of the head", "sum of weight · v", "the output of the model's own attention kernel"),
    Step("projection", "output projection", "sum over heads of o W_o + bias", "the output of the attention"),
    Step("residual", "residual stream", "x + attention + MLP", "the output of the block"),
)
STEPS: Final[dict[StepName, Step]] = {step.name: step for step in _ENTRIES}
TOLERANCE: Final = 1e-4  # of the largest value of a step: greater differences are not rounding
