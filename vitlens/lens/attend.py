"""Attention computed by the lens, as its scores or weights are changed; every function mode in force may take part.

A change of scores or weights cannot be handed to the model's own kernel. The mode that makes it hands on a
StagedAttention instead, through torch's function protocol (`attend`), so that the modes of outer contexts add their own
changes, and an observer reads the weights that are used in the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from vitlens.lens.call import AttentionInputs, per_head, softmax_or_zero

TensorFunction = Callable[[Tensor], Tensor]  # to a tensor of the same shape


@dataclass(frozen=True)
class StagedAttention:
    """One attention call before its scores are computed, with what changes them.

    inputs: queries, keys and values, or None where the model computed the scores itself; scores: these scores, of any
    shape; softmax: the model's own of them; changes: of (calls, heads, query, key), in the order of their contexts, of
    scores and of weights apart; heads: their number, where they share an axis with the batch.
    """

    inputs: AttentionInputs | None = None
    scores: Tensor | None = None
    softmax: Callable[[Tensor], Tensor] = softmax_or_zero
    score_changes: tuple[TensorFunction, ...] = ()
    weight_changes: tuple[TensorFunction, ...] = ()
    dropout: float = 0.0
    heads: int = 1

    def then(self, stage: Literal["scores", "weights"], *changes: TensorFunction) -> "StagedAttention":
        """The call with further changes, which come after those that it has."""
        if stage == "scores":
            return replace(self, score_changes=(*self.score_changes, *changes))
        return replace(self, weight_changes=(*self.weight_changes, *changes))

    def weights(self) -> Tensor:
        """The weights (calls, heads, query, key), changed."""
        scores = self.inputs.scores(slice(None)) if self.inputs is not None else self.scores
        assert scores is not None  # one of both
        if self.score_changes:
            changed = per_head(scores, self.heads)
            for change in self.score_changes:
                changed = change(changed)
            scores = changed.reshape(scores.shape)
        weights = per_head(self.softmax(scores), self.heads)
        for change in self.weight_changes:
            weights = change(weights)
        return weights

    def result(self, weights: Tensor) -> Tensor:
        """What the model's own function returns for these weights: the heads' outputs, or the weights."""
        if self.inputs is not None:
            return F.dropout(weights, self.dropout) @ self.inputs.value
        assert self.scores is not None
        return weights.reshape(self.scores.shape)


def attend(staged: StagedAttention) -> Any:
    """The result of a staged attention call; a function mode sees the call, as it sees one of torch's functions."""
    marked = (staged.inputs.query if staged.inputs is not None else staged.scores,)
    if has_torch_function(marked):
        return handle_torch_function(attend, marked, staged)
    return staged.result(staged.weights())


def attend_and_read(staged: StagedAttention, change: TensorFunction | None = None) -> tuple[Tensor, Tensor]:
    """The result of a staged call, and the weights that are used in the end; change: of these, the last."""
    weights: list[Tensor] = []

    def read(used: Tensor) -> Tensor:
        weights.append(used if change is None else change(used))
        return weights[0]

    result: Tensor = attend(staged.then("weights", read))
    return result, weights[0]
