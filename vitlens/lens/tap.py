"""A tap on attention: changes and readers of one call of an attention function."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import UnsupportedError
from vitlens.lens.call import (
    INPUTS,
    AttentionCall,
    AttentionInputs,
    FusedArguments,
    Stage,
    per_head,
)
from vitlens.lens.site import Site
from vitlens.models.attention import softmax_or_zero
from vitlens.models.hooks import unchanged

TensorFunction = Callable[[Tensor], Tensor]  # to a tensor of the same shape
# keep(tensor, queries, keys) returns a mask of the keys that take part (True), of shape
# (1 or calls, heads, query, key). `tensor` is any tensor of the call; it gives the number of
# calls and the device.
Keep = Callable[[Tensor, int, int], Tensor]


@dataclass(frozen=True, eq=False)
class Tap:
    """The changes and readers of one context in the attention of some modules.

    modules: the names of the attention modules; None means all.
    changes: functions by stage, each applied to the tensor of its stage, (calls, heads, ..).
    keep: a function that returns which keys take part in the softmax.
    joined: a function applied to the concatenated outputs of the heads, before the output
        projection. Their shape is (calls, tokens, heads x head_dim).
    read: a function that receives every call, after all changes. Its second argument is the scores,
        or None if the attention was fused.
    explicit: compute attention as matrix products, so that the weights are in the autograd graph.
    """

    modules: Collection[str] | None = None
    changes: Mapping[Stage, TensorFunction] = field(default_factory=dict)
    keep: Keep | None = None
    joined: TensorFunction | None = None
    read: Callable[[AttentionCall, Tensor | None], None] | None = None
    explicit: bool = False

    @property
    def acts_on_attention(self) -> bool:
        """Return True if it acts on calls of attention functions, not only on the joined heads."""
        changes = bool(self.changes) or self.keep is not None
        return changes or self.read is not None or self.explicit


@dataclass(frozen=True)
class TappedCall:
    """One call of an attention function under the taps of its module.

    module: the name of the attention module.
    images: the number of images in the forward pass.
    find_site: a function that returns the site of the call for the shape of its weights.
    heads: the number of heads of the module.
    heads_axis: the axis of the heads in the module's tensors, or None if no forward pass showed it
        (see `AttentionPart`).
    taps: the taps of this module, outer contexts first.
    """

    module: str
    images: int
    find_site: Callable[[torch.Size], Site]
    heads: int
    heads_axis: int | None
    taps: list[Tap]

    def fused(
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
        """Compute scaled dot-product attention under the taps, with the arguments of torch."""
        axis = self._axis_before_windows(query)
        if axis is None:
            return self._attend(
                FusedArguments(
                    query=query,
                    key=key,
                    value=value,
                    mask=attn_mask,
                    dropout=dropout_p,
                    causal=is_causal,
                    scale=scale,
                    grouped=enable_gqa,
                )
            )
        if attn_mask is not None:
            attn_mask = self._windows_first(
                attn_mask.expand(*query.shape[:-1], key.shape[-2]), axis
            )
        arguments = FusedArguments(
            query=self._windows_first(query, axis),
            key=self._windows_first(key, axis),
            value=self._windows_first(value, axis),
            mask=attn_mask,
            dropout=dropout_p,
            causal=is_causal,
            scale=scale,
            grouped=enable_gqa,
        )
        return _heads_first(self._attend(arguments), axis)

    def _axis_before_windows(self, tensor: Tensor) -> int | None:
        """Return the axis of the heads in a tensor that has them before the windows.

        There are two such layouts: (batch x heads, windows, query or key, head_dim) returns 0, and
        (batch, heads, windows, query or key, head_dim) returns 1. All other layouts return None.
        """
        if tensor.dim() == 4 and self.heads_axis == 0:
            return 0
        if tensor.dim() != 5 or self.heads_axis == 2:
            return None
        if self.heads_axis == 1 or tensor.shape[1] == self.heads:  # timm's Hiera and NesT
            return 1
        return None

    def _windows_first(self, tensor: Tensor, axis: int) -> Tensor:
        """Return a tensor with heads before windows as (batch, windows, heads, ..).

        axis: what `_axis_before_windows` returns for the tensor.
        """
        with_heads_axis = tensor
        if axis == 0:  # (batch x heads, windows, ..) -> (batch, heads, windows, ..)
            with_heads_axis = tensor.unflatten(0, (-1, self.heads))
        return with_heads_axis.transpose(1, 2)

    def _attend(self, arguments: FusedArguments) -> Tensor:
        """Return the output, by torch's kernel unless scores or weights are changed."""
        original_inputs = arguments.inputs(self.heads)
        inputs = self._change_inputs(original_inputs)
        keep = self._keep(inputs.query, inputs.query.shape[-2], inputs.key.shape[-2])
        masked_inputs = inputs  # for the kernel and the readers; `_compute_weights` takes `keep`
        if keep is not None:
            masked_inputs = replace(inputs, bias=_both(inputs.bias, keep))
        scores = None
        weights = None
        if self._needs_weights():
            scores, weights = self._compute_weights(inputs, keep)
            output = F.dropout(weights, arguments.dropout) @ inputs.value
        elif masked_inputs is original_inputs:
            # no tap changed the inputs: call torch as the model did
            output = arguments.attend()
        else:
            output = _attend_fused(masked_inputs, arguments.dropout)
        output = per_head(output, self.heads)
        self._read(inputs=masked_inputs, weights=weights, output=output, scores=scores)
        # Reshape only after the readers: the logits then depend on the very tensor that a reader
        # kept, so that it can take their gradient with respect to it.
        return output.reshape(*arguments.query.shape[:-1], arguments.value.shape[-1])

    def _compute_weights(
        self, inputs: AttentionInputs, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the weights after their changes, computed as matrix products."""
        original_scores = inputs.scores(slice(None))
        scores = self._scores(original_scores, keep)
        # A mask or a change may leave a query without keys. Its plain softmax would be NaN.
        can_have_empty_rows = inputs.bias is not None or scores is not original_scores
        softmax_weights = softmax_or_zero(scores) if can_have_empty_rows else scores.softmax(-1)
        return scores, self._weights(softmax_weights)

    def _needs_weights(self) -> bool:
        """Return True if a tap changes scores or weights, or needs them in the autograd graph."""
        for tap in self.taps:
            if tap.explicit or "scores" in tap.changes or "weights" in tap.changes:
                return True
        return False

    def _change_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the inputs after the changes of queries, keys and values.

        Without changes, this is the same object.
        """
        if not any(tap.changes for tap in self.taps):
            return inputs
        for stage, name in INPUTS.items():
            tensor = getattr(inputs, name)
            changed = self._apply_changes(stage, tensor)
            if changed is not tensor:
                inputs = replace(inputs, **{name: changed})  # type: ignore[arg-type]
        return inputs

    def softmax(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the model's softmax under the taps.

        func, args, kwargs: the model's call; its first argument is the scores.
        """
        axis = self._axis_before_windows(args[0])
        if axis is None:
            return self._softmax(func, args, kwargs)
        args = (self._windows_first(args[0], axis), *args[1:])
        # the keys are the last axis in every layout; a positive number would now mean another axis
        if "dim" in kwargs:
            kwargs = {**kwargs, "dim": -1}
        else:
            args = (args[0], -1, *args[2:])
        return _heads_first(self._softmax(func, args, kwargs), axis)

    def _softmax(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        raw_scores, *rest = args
        original_scores = per_head(raw_scores, self.heads)
        keep = None
        # masks are for the heads of the module: a softmax over another number is not masked
        if original_scores.shape[1] == self.heads:
            keep = self._keep(original_scores, *original_scores.shape[-2:])
        scores = self._scores(original_scores, keep)
        if scores is original_scores:
            raw_weights = func(raw_scores, *rest, **kwargs)
        else:
            raw_weights = softmax_or_zero(
                scores.reshape(raw_scores.shape),
                lambda tensor: func(tensor, *rest, **kwargs),
            )
        weights = self._weights(per_head(raw_weights, self.heads))
        self._read(inputs=None, weights=weights, output=None, scores=scores)
        return weights.reshape(raw_scores.shape)  # after the readers, as in `_attend`

    def _apply_changes(self, stage: Stage, tensor: Tensor) -> Tensor:
        for tap in self.taps:
            if stage in tap.changes:
                tensor = tap.changes[stage](tensor)
        return tensor

    def _scores(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        """Return the scores after their changes, -inf where a key is knocked out.

        Without changes, this is the same object.
        """
        changed = self._apply_changes("scores", scores)
        if keep is None:
            return changed
        return changed.masked_fill(~keep, -torch.inf)

    def _weights(self, weights: Tensor) -> Tensor:
        """Return the weights after their changes.

        With an explicit tap, they are in the autograd graph, even if nothing before them is.
        """
        weights = self._apply_changes("weights", weights)
        explicit = torch.is_grad_enabled() and any(tap.explicit for tap in self.taps)
        if explicit and not weights.requires_grad:
            return weights.requires_grad_()
        return weights

    def _keep(self, like: Tensor, queries: int, keys: int) -> Tensor | None:
        """Return which keys take part, (1 or calls, heads, query, key), or None for all keys.

        like: a tensor of the call, (calls, heads, ..). Raises UnsupportedError if it has another
        number of heads than the module.
        """
        keeps = [tap.keep for tap in self.taps if tap.keep is not None]
        if keeps and like.shape[1] != self.heads:
            raise UnsupportedError(
                f"expected queries of {self.heads} heads to knock out attention, found "
                f"{like.shape[1]} in {self.module}; this family's attention cannot be knocked out"
            )
        combined: Tensor | None = None
        for keep in keeps:
            mask = keep(like, queries, keys)
            combined = mask if combined is None else combined & mask
        return combined

    def _read(
        self,
        inputs: AttentionInputs | None,
        weights: Tensor | None,
        output: Tensor | None,
        scores: Tensor | None,
    ) -> None:
        """Hand the call to the readers; it has inputs, or weights, or both."""
        readers = [tap.read for tap in self.taps if tap.read is not None]
        if not readers:
            return
        if inputs is not None:
            shape = torch.Size((*inputs.query.shape[:3], inputs.key.shape[2]))
        else:
            assert weights is not None
            shape = weights.shape
        call = AttentionCall(
            site=self.find_site(shape),
            images=self.images,
            inputs=inputs,
            computed=weights,
            output=output,
        )
        with unchanged():  # a reader may run the model again
            for read in readers:
                read(call, scores)


def _heads_first(tensor: Tensor, axis: int) -> Tensor:
    """Return (batch, windows, heads, ..) as it was before `_windows_first`."""
    moved = tensor.transpose(1, 2)
    return moved.flatten(0, 1) if axis == 0 else moved


def _attend_fused(inputs: AttentionInputs, dropout: float) -> Tensor:
    """Return the output of torch's kernel for these inputs."""
    return F.scaled_dot_product_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.bias,
        dropout,
        scale=inputs.scale,
    )


def _both(bias: Tensor | None, keep: Tensor) -> Tensor:
    """Return an attention mask, boolean or additive, without the keys that are knocked out."""
    if bias is None:
        return keep
    if bias.dtype == torch.bool:
        return bias & keep
    return bias.masked_fill(~keep, -torch.inf)
