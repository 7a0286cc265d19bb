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
# (a tensor of the call, number of queries, number of keys) -> mask (1 or calls, heads, query, key),
# True for keys that take part
Keep = Callable[[Tensor, int, int], Tensor]


@dataclass(frozen=True, eq=False)
class Tap:
    """The changes and readers of one context in the attention of some modules.

    modules: names of these modules; None for all.
    changes: by stage, a function of its tensor (calls, heads, ..).
    keep: masks the keys that take part.
    joined: a function of the concatenated outputs of the heads, (calls, tokens, heads x head_dim),
        before the output projection.
    read: called with each call after all changes, and with its scores unless it was fused.
    explicit: compute attention as matrix products, so that the weights are in the autograd graph.
    """

    modules: Collection[str] | None = None
    changes: Mapping[Stage, TensorFunction] = field(default_factory=dict)
    keep: Keep | None = None
    joined: TensorFunction | None = None
    read: Callable[[AttentionCall, Tensor | None], None] | None = None
    explicit: bool = False


@dataclass(frozen=True)
class TappedCall:
    """One call of an attention function under the taps of its module.

    module: the name of the attention module.
    images: the number of images in the forward pass.
    find_site: returns the site of the call for the shape of its weights.
    heads: the number of heads of the module.
    heads_axis: the axis of the heads, if a forward pass showed it (see `AttentionPart`).
    taps: those of the module, outer contexts first.
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
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
            )
        if attn_mask is not None:
            attn_mask = self._windows_first(
                attn_mask.expand(*query.shape[:-1], key.shape[-2]), axis
            )
        arguments = FusedArguments(
            self._windows_first(query, axis),
            self._windows_first(key, axis),
            self._windows_first(value, axis),
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
        )
        return _heads_first(self._attend(arguments), axis)

    def _axis_before_windows(self, tensor: Tensor) -> int | None:
        """Return the axis of the heads if it comes before the axis of windows, else None.

        `AttentionPart` describes these layouts.
        """
        if tensor.dim() == 4 and self.heads_axis == 0:
            return 0  # (batch * heads, windows, tokens, head_dim)
        if tensor.dim() != 5 or self.heads_axis == 2:
            return None
        if self.heads_axis == 1 or tensor.shape[1] == self.heads:
            return 1  # (batch, heads, windows, tokens, head_dim): timm's Hiera and NesT
        return None

    def _windows_first(self, tensor: Tensor, axis: int) -> Tensor:
        """Return a tensor of heads before windows as (batch, windows, heads, ..)."""
        split = tensor.unflatten(0, (-1, self.heads)) if axis == 0 else tensor
        return split.transpose(1, 2)

    def _attend(self, arguments: FusedArguments) -> Tensor:
        """Return the output, by torch's kernel unless scores or weights are changed."""
        original = arguments.inputs(self.heads)
        inputs = self._change_inputs(original)
        keep = self._keep(inputs.query, inputs.query.shape[-2], inputs.key.shape[-2])
        masked = inputs
        if keep is not None:
            masked = replace(inputs, bias=_masked_bias(inputs.bias, keep))
        changed_scores: Tensor | None = None
        weights: Tensor | None = None
        if self._needs_weights():
            changed_scores, weights = self._scores_and_weights(inputs, keep)
            output = F.dropout(weights, arguments.dropout) @ inputs.value
        elif masked is original:  # nothing is changed
            output = arguments.attend()
        else:
            output = F.scaled_dot_product_attention(
                masked.query,
                masked.key,
                masked.value,
                masked.bias,
                arguments.dropout,
                scale=masked.scale,
            )
        output = per_head(output, self.heads)
        self._read(masked, weights, output, changed_scores)
        # reshaped only now: a reader that keeps `output` can take gradients of the logits at it
        return output.reshape(*arguments.query.shape[:-1], arguments.value.shape[-1])

    def _scores_and_weights(
        self, inputs: AttentionInputs, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the weights as matrix products, both after their changes."""
        scores = inputs.scores(slice(None))
        changed_scores = self._scores(scores, keep)
        # a query with no key left has only scores of -inf, of which a softmax is NaN
        may_lack_keys = changed_scores is not scores or inputs.bias is not None
        if may_lack_keys:
            weights = softmax_or_zero(changed_scores)
        else:
            weights = scores.softmax(-1)
        return changed_scores, self._weights(weights)

    def _needs_weights(self) -> bool:
        """Return True if a tap changes scores or weights, or needs them in the autograd graph."""
        for tap in self.taps:
            if tap.explicit or "scores" in tap.changes or "weights" in tap.changes:
                return True
        return False

    def _change_inputs(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the inputs after the changes of queries, keys and values.

        Returns the same object where there are none.
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
        """Return the softmax of scores that the model computed itself, under the taps."""
        axis = self._axis_before_windows(args[0])
        if axis is None:
            return self._softmax(func, args, kwargs)
        args = (self._windows_first(args[0], axis), *args[1:])
        if "dim" in kwargs:
            kwargs = {**kwargs, "dim": -1}
        else:
            args = (args[0], -1, *args[2:])
        return _heads_first(self._softmax(func, args, kwargs), axis)

    def _softmax(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        raw_scores, *rest = args
        scores = per_head(raw_scores, self.heads)
        keep = None
        if scores.shape[1] == self.heads:
            keep = self._keep(scores, *scores.shape[-2:])
        changed_scores = self._scores(scores, keep)
        if changed_scores is scores:
            raw_weights = func(raw_scores, *rest, **kwargs)
        else:
            raw_weights = softmax_or_zero(
                changed_scores.reshape(raw_scores.shape),
                lambda tensor: func(tensor, *rest, **kwargs),
            )
        weights = self._weights(per_head(raw_weights, self.heads))
        self._read(None, weights, None, changed_scores)
        # reshaped only now, for readers that keep `weights`, as in `_attend`
        return weights.reshape(raw_scores.shape)

    def _apply_changes(self, stage: Stage, tensor: Tensor) -> Tensor:
        for tap in self.taps:
            if stage in tap.changes:
                tensor = tap.changes[stage](tensor)
        return tensor

    def _scores(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        """Return the scores after their changes, -inf where a key is knocked out.

        Without changes, it is the same object.
        """
        changed = self._apply_changes("scores", scores)
        if keep is None:
            return changed
        return changed.masked_fill(~keep, -torch.inf)

    def _weights(self, weights: Tensor) -> Tensor:
        """Return the weights after their changes.

        Explicit ones are in the autograd graph, also where nothing before them is.
        """
        weights = self._apply_changes("weights", weights)
        explicit = torch.is_grad_enabled() and any(tap.explicit for tap in self.taps)
        if explicit and not weights.requires_grad:
            return weights.requires_grad_()
        return weights

    def _keep(self, like: Tensor, queries: int, keys: int) -> Tensor | None:
        """Return which keys take part, (1 or calls, heads, query, key); None: all.

        Raises UnsupportedError for other heads.
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
        call = AttentionCall(self.find_site(shape), self.images, inputs, weights, output)
        with unchanged():  # a reader may run the model again
            for read in readers:
                read(call, scores)


def _heads_first(tensor: Tensor, axis: int) -> Tensor:
    """Return (batch, windows, heads, ..) as it was before `_windows_first`."""
    moved = tensor.transpose(1, 2)
    return moved.flatten(0, 1) if axis == 0 else moved


def _masked_bias(bias: Tensor | None, keep: Tensor) -> Tensor:
    """Return an attention mask, boolean or additive, without the keys that are knocked out."""
    if bias is None:
        return keep
    if bias.dtype == torch.bool:
        return bias & keep
    return bias.masked_fill(~keep, -torch.inf)
