"""Inside attention: queries, keys, values, scores and weights of one attention module, read or changed as they pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.lens.attend import StagedAttention, TensorFunction, attend
from vitlens.lens.call import AttentionInputs, attention_inputs, per_head
from vitlens.lens.hooks import SOFTMAX, Forward, ScopedMode, multi_head_attention, overridden, positional

Stage = Literal["queries", "keys", "values", "scores", "weights"]
_INPUTS: Mapping[Stage, str] = {"queries": "query", "keys": "key", "values": "value"}


@dataclass(frozen=True)
class StageTouch:
    """What is done with one stage of an attention call, (calls, heads, ..).

    change: to a tensor of the same shape; reads: it returns its tensor unchanged, so that attention may stay fused;
    rows: query rows of scores or weights that a reading takes (None: all).
    """

    stage: Stage
    change: TensorFunction
    reads: bool = False
    rows: tuple[int, ...] | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """The tensor after the change; of a reading, the same tensor."""
        if not self.reads:
            return self.change(tensor)
        has_rows = self.rows is not None and self.stage in ("scores", "weights")
        self.change(tensor[..., list(self.rows), :] if has_rows and self.rows is not None else tensor)
        return tensor


class AttentionStages(ScopedMode):
    """Reads or changes the stages of the calls of one attention module; use through `inside_stages`.

    Covers scaled dot-product attention, softmax and nn.MultiheadAttention. A module that computes its own softmax has
    only scores and weights.
    """

    def __init__(self, heads: int, touches: Sequence[StageTouch]) -> None:
        super().__init__()
        self._heads = heads
        self._touches = tuple(touches)

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle attention calls; pass every other call through."""
        args, kwargs = positional(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # a mode is not active in its own calls, which must be intercepted here
                return multi_head_attention(F.scaled_dot_product_attention, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if func is attend:
            return self._staged(args[0])
        if func in SOFTMAX and _over_last(args, kwargs):
            scores, *rest = args

            def softmax(changed: Tensor) -> Tensor:
                result: Tensor = func(changed, *rest, **kwargs)
                return result

            staged = StagedAttention(scores=scores, softmax=softmax, heads=self._heads)
            return self._staged(staged, plain=lambda: softmax(scores))
        return func(*args, **kwargs)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.dim() == 5 and query.shape[1] == self._heads != query.shape[2]:  # Hiera, as in AttentionObserver
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            return self._fused(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
        inputs = attention_inputs(query, key, value, attn_mask, is_causal, scale, enable_gqa, self._heads)
        shape = (*query.shape[:-1], value.shape[-1])

        def plain() -> Tensor:
            options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
            output: Tensor = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
            )
            return output

        return self._staged(StagedAttention(inputs, dropout=dropout_p), plain=plain).reshape(shape)

    def _staged(self, staged: StagedAttention, *, plain: Callable[[], Tensor] | None = None) -> Tensor:
        """Touch what is there of a call, and hand it on; plain: the model's own function, where nothing has changed."""
        inputs = staged.inputs
        if inputs is not None:
            staged = replace(staged, inputs=self._with_inputs(inputs))
        late = [touch for touch in self._touches if touch.stage in ("scores", "weights")]
        if plain is not None and all(touch.reads for touch in late):
            with torch._C.DisableTorchFunction():  # an observation must not count these as the model's own
                for touch in late:
                    self._read(staged, touch)
            return plain() if staged.inputs is inputs else _kernel(staged)
        for touch in late:
            staged = staged.then(touch.stage, touch.take)  # type: ignore[arg-type]
        result: Tensor = attend(staged)
        return result

    def _with_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        """The inputs with queries, keys and values touched; the same object where all were only read."""
        for touch in self._touches:
            if touch.stage in _INPUTS:
                name = _INPUTS[touch.stage]
                before = getattr(inputs, name)
                after = touch.take(before)
                inputs = inputs if after is before else replace(inputs, **{name: after})  # type: ignore[arg-type]
        return inputs

    def _read(self, staged: StagedAttention, touch: StageTouch) -> None:
        rows = slice(None) if touch.rows is None else touch.rows
        if staged.inputs is not None:
            compute = staged.inputs.scores if touch.stage == "scores" else staged.inputs.weights
            touch.change(compute(rows))
            return
        assert staged.scores is not None
        scores = per_head(staged.scores, staged.heads)[..., rows, :]
        touch.change(scores if touch.stage == "scores" else staged.softmax(scores))


def _kernel(staged: StagedAttention) -> Tensor:
    """The fused kernel on changed queries, keys or values."""
    inputs = staged.inputs
    assert inputs is not None
    output: Tensor = F.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, inputs.bias, staged.dropout, scale=inputs.scale
    )
    return output


def _over_last(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a softmax is over the last axis of at least three."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    scores = args[0] if args else None
    return isinstance(scores, Tensor) and scores.dim() >= 3 and dim in (-1, scores.dim() - 1)


@contextmanager
def inside_stages(attention: nn.Module, heads: int, touches: Sequence[StageTouch]) -> Iterator[None]:
    """Inside, every call of the attention module runs under AttentionStages; contexts may be nested.

    Of nested contexts, the outer one's changes come first, for each stage.
    """

    def wrap(forward: Forward) -> Forward:
        def touched(*args: Any, **kwargs: Any) -> Any:
            with AttentionStages(heads, touches):
                return forward(*args, **kwargs)

        return touched

    with overridden(attention, wrap):
        yield
