"""AttentionObserver: the function mode that sees each attention call of a model, and the modules that are calling.

Nearly all attention passes through F.scaled_dot_product_attention or a softmax over (.., queries, keys). A
TorchFunctionMode intercepts both without a change to the model; forward hooks record which module is calling.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import LensError, UnsupportedError
from vitlens.lens.attend import StagedAttention, attend, attend_and_read
from vitlens.lens.call import AttentionCall, AttentionInputs, attention_inputs, per_head
from vitlens.lens.hooks import SOFTMAX, Arguments, ScopedMode, multi_head_attention, positional, watching
from vitlens.lens.site import Site, decide_kind
from vitlens.lens.windows import windows_of
from vitlens.models.attention_parts import read_attention
from vitlens.models.model import Model

Reducer = Callable[[AttentionCall], None]


class AttentionObserver(ScopedMode):
    """Hands every attention call of a model to a reducer, in the order of the forward pass, and keeps no tensor.

    heads: the number of heads of each module that has any, by its name; explicit: attention is computed as matrix
    products, so that the weights are in the autograd graph; name: of the model, for messages. Use through `observing`.
    """

    def __init__(
        self, reducer: Reducer, heads: Mapping[str, int], *, explicit: bool = False, name: str = "the model"
    ) -> None:
        super().__init__()
        self.name = name
        self.heads = heads
        self.unused: tuple[str, ...] = ()  # modules whose attention is not reported
        self.reducer = reducer
        self.explicit = explicit
        self.sites: list[Site] = []
        self._images = 0
        self._model: nn.Module = nn.Identity()  # the model that is watched
        self._stack: list[tuple[str, nn.Module, tuple[int, ...]]] = []
        self._seen: list[str] = []  # the module of each call of this forward pass
        self._silent: list[str] = []  # attention modules that ran without a call

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Report attention calls; pass every call through."""
        args, kwargs = positional(func, args, kwargs)
        if not self._stack or (self.unused and any(name in self.unused for name, _, _ in self._stack)):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self._fused, *args, **kwargs)
        if func is attend:
            return self._changed(*args)
        result = func(*args, **kwargs)
        if func not in SOFTMAX or not self._is_attention(result, args, kwargs):
            return result
        computed = per_head(_differentiable(result) if self.explicit else result, self._heads())
        self._deliver(computed=computed)
        return computed.reshape(result.shape)  # the reducer's tensor, so that it is in the graph of the logits

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
        heads = self._heads()
        if query.dim() == 5 and query.shape[1] == heads != query.shape[2]:  # Hiera: (batch, heads, windows, query, ..)
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            return self._fused(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
        inputs = attention_inputs(query, key, value, attn_mask, is_causal, scale, enable_gqa, heads)
        if not self.explicit:
            options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
            )
            heads_output = per_head(output, heads)
            self._deliver(inputs=inputs, output=heads_output)
            return heads_output.reshape(output.shape)  # the reducer's tensor, as above
        weights = _differentiable(inputs.weights(slice(None)))
        explicit = F.dropout(weights, dropout_p) @ inputs.value
        self._deliver(inputs=inputs, computed=weights, output=explicit)
        return explicit.reshape(*query.shape[:-1], value.shape[-1])

    def _changed(self, staged: StagedAttention) -> Tensor:
        result, weights = attend_and_read(staged, _differentiable if self.explicit else None)
        self._deliver(inputs=staged.inputs, computed=weights, output=None if staged.inputs is None else result)
        return result

    def _deliver(
        self, *, inputs: AttentionInputs | None = None, computed: Tensor | None = None, output: Tensor | None = None
    ) -> None:
        own = (frame for frame in reversed(self._stack) if frame[0] in self.heads)
        name, _, entered = next(own, self._stack[-1])
        weights = computed.shape if computed is not None else (*inputs.query.shape[:3], inputs.key.shape[2])  # type: ignore[union-attr]
        batch, heads, queries, keys = weights
        calls = max(batch // self._images, 1)
        windows = windows_of(self._model, self._stack, calls=calls, queries=queries, keys=keys)
        patches = keys if windows else queries  # a pooled query stands for several
        tokens = patches if windows else _tokens(entered, queries, self._images)
        channels = queries * heads in entered[1:]
        kind = decide_kind(calls=calls, queries=patches, keys=keys, tokens=tokens, channels=channels)
        part = self._seen.count(name)
        layer = len(dict.fromkeys(self._seen) | {name: None}) - 1
        site = Site(layer, name, part, kind, heads, queries, keys, windows)
        self._seen.append(name)
        self.sites.append(site)
        self.reducer(AttentionCall(site, self._images, inputs, computed, output))

    def _is_attention(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(result, Tensor) or result.dim() < 3 or dim not in (-1, result.dim() - 1):
            return False
        return any(name in self.heads for name, _, _ in self._stack)

    def _heads(self) -> int:
        """The number of heads of the calling module."""
        return next((self.heads[name] for name, _, _ in reversed(self._stack) if self.heads.get(name)), 1)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Forward hooks that record which module is calling; removed on exit, also after an exception."""
        self._model = model
        inner = [
            name
            for name, part in model.named_modules()
            if name and (name in self.heads or any(True for _ in part.children()))
        ]
        modules = {name: model.get_submodule(name) for name in inner}

        def enter(name: str, arguments: Arguments) -> None:
            self._stack.append((name, modules[name], _shape(arguments)))

        def leave(name: str, _arguments: Arguments, _output: Any) -> None:
            self._stack.pop()
            if name in self.heads and not any(seen == name or seen.startswith(f"{name}.") for seen in self._seen):
                self._silent.append(name)

        try:
            with (
                watching(model, inner, leave, before=enter, always=True),
                watching(model, [""], before=self._begin),
            ):
                yield
        finally:
            self._stack.clear()

    def finish(self) -> None:
        """After a forward pass: check that the weights of every attention module that ran were observed.

        Raises UnsupportedError for a model without softmax attention, LensError where some layers were missed.
        """
        if not self._seen:
            raise UnsupportedError(f"expected softmax attention in the forward pass of {self.name}, found none")
        if self._silent:
            raise LensError(
                f"expected weights from every attention layer, found none from {len(self._silent)} "
                f"(first {self._silent[0]!r}); this family computes attention in a way that the lens does not support"
            )

    def _begin(self, _name: str, arguments: Arguments) -> None:
        self._images = _shape(arguments)[0]
        self.sites.clear()
        self._seen.clear()
        self._silent.clear()
        self._stack.clear()


@contextmanager
def observing(model: Model | nn.Module, reducer: Reducer, *, explicit: bool = False) -> Iterator[AttentionObserver]:
    """Inside, every attention call is handed to the reducer; a plain module's heads are read from its attributes."""
    if isinstance(model, Model):
        module, parts, name = model.module, model.anatomy.attention or (), model.alias
        if not parts and model.anatomy.unread:
            raise UnsupportedError(f"expected softmax attention in {name}, {model.anatomy.unread}")
    else:
        module, parts, name = model, read_attention(model), "the model"
    observer = AttentionObserver(reducer, {part.module: part.heads for part in parts}, explicit=explicit, name=name)
    observer.unused = model.anatomy.unused if isinstance(model, Model) else ()
    with observer.watching(module), observer:
        yield observer


def _differentiable(weights: Tensor) -> Tensor:
    """Weights in the autograd graph, also where neither images nor parameters require gradients."""
    return weights if weights.requires_grad or not torch.is_grad_enabled() else weights.requires_grad_()


def _tokens(entered: tuple[int, ...], queries: int, images: int) -> int:
    """The number of tokens of an image in a module's input, from its shape."""
    if len(entered) == 4:  # (batch, rows, columns, channels) or (batch, channels, rows, columns)
        last, first = entered[1] * entered[2], entered[2] * entered[3]
        return last if last == queries else first
    if len(entered) == 3:  # (batch, tokens, width), or nn.MultiheadAttention's default, (tokens, batch, width)
        return entered[0] if entered[:2] == (queries, images) else entered[1]
    return queries


def _shape(arguments: Arguments) -> tuple[int, ...]:
    """The shape of the first tensor among a module's arguments."""
    return next((tuple(value.shape) for value in arguments.values() if isinstance(value, Tensor)), ())
