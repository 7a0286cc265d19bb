"""The one door to every attention head: torch's own functions, whoever calls them.

Nearly all attention passes through F.scaled_dot_product_attention or a softmax over (.., queries, keys). A
TorchFunctionMode sees both calls without a change to the model; forward hooks on the modules say which one is calling.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.errors import LensError, UnsupportedError
from vitlens.lens.call import AttentionCall, Scored, per_head
from vitlens.lens.multihead import multi_head_attention
from vitlens.lens.site import Site, Windows, decide_kind
from vitlens.models.anatomy import has_heads, heads_of

Reducer = Callable[[AttentionCall], None]
_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)


class Tap(TorchFunctionMode):
    """Hands every attention call of a model to a reducer, in the order of the forward pass, and keeps nothing.

    explicit: attention is computed from its matrix products, so that autograd sees the weights; name: of the model,
    for messages. Use through `tapped`.
    """

    def __init__(self, reducer: Reducer, *, explicit: bool = False, name: str = "the model") -> None:
        super().__init__()
        self.name = name
        self.reducer = reducer
        self.explicit = explicit
        self.sites: list[Site] = []
        self._images = 0
        self._stack: list[tuple[str, nn.Module, tuple[int, ...]]] = []
        self._seen: list[str] = []  # the module of each call of this forward pass
        self._silent: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See a call, hand it on."""
        kwargs = kwargs or {}
        if not self._stack:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self._fused, *args, **kwargs)
        result = func(*args, **kwargs)
        if func not in _SOFTMAX or not self._is_attention(result, args, kwargs):
            return result
        made = per_head(_differentiable(result) if self.explicit else result)
        self._deliver(made=made)
        return made.reshape(result.shape)  # not result itself: what the reducer got must lead to the logits

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
        scored = _score(query, key, value, attn_mask, is_causal, scale, enable_gqa, heads)
        if not self.explicit:
            options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
            )
            seen = per_head(output, heads)
            self._deliver(scored=scored, output=seen)
            return seen.reshape(output.shape)  # not output itself: what the reducer got must lead to the logits
        weights = _differentiable(scored.weights(slice(None)))
        explicit = F.dropout(weights, dropout_p) @ scored.value
        self._deliver(scored=scored, made=weights, output=explicit)
        return explicit.reshape(*query.shape[:-1], value.shape[-1])

    def _deliver(
        self, *, scored: Scored | None = None, made: Tensor | None = None, output: Tensor | None = None
    ) -> None:
        name, _, entered = self._stack[-1]
        weights = made.shape if made is not None else (*scored.query.shape[:3], scored.key.shape[2])  # type: ignore[union-attr]
        batch, heads, queries, keys = weights
        calls = max(batch // self._images, 1)
        windows = self._windows(queries)
        tokens = queries if windows else _tokens(entered, queries)
        channels = queries * heads in entered[1:]
        kind = decide_kind(calls=calls, queries=queries, keys=keys, tokens=tokens, channels=channels)
        part = self._seen.count(name)
        layer = len(dict.fromkeys(self._seen) | {name: None}) - 1
        site = Site(layer, name, part, kind, heads, queries, keys, windows)
        self._seen.append(name)
        self.sites.append(site)
        self.reducer(AttentionCall(site, self._images, scored, made, output))

    def _is_attention(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(result, Tensor) or result.dim() < 3 or dim not in (-1, result.dim() - 1):
            return False
        return any(has_heads(module) for _, module, _ in self._stack)

    def _heads(self) -> int:
        """How many heads the calling module says it has."""
        counts = (heads_of(module) for _, module, _ in reversed(self._stack))
        return next((count for count in counts if count), 1)

    def _windows(self, queries: int) -> Windows | None:
        """The windows of the block that is calling, for Swin's kind (one, where it covers the whole map)."""
        for depth, (_, module, shape) in enumerate(reversed(self._stack)):
            window, shift = getattr(module, "window_size", None), getattr(module, "shift_size", None)
            if window is None or shift is None or len(shape) != 4:
                continue
            window, shift = _pair(window), _pair(shift)
            if window[0] * window[1] == queries:
                return Windows((shape[1], shape[2]), window, shift, pad_first=depth == 0)
        return None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Forward hooks that tell the mode which module is calling; removed on exit, whatever happens."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if name and any(True for _ in module.children()):
                    stack.callback(module.register_forward_pre_hook(self._enter(name), with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            root = model.register_forward_pre_hook(self._begin, with_kwargs=True)
            stack.callback(root.remove)
            stack.callback(self._stack.clear)
            yield

    def finish(self) -> None:
        """After a forward pass: every attention module that ran must have shown its weights.

        Raises UnsupportedError for a model without softmax attention, LensError where some of its layers showed none.
        """
        if not self._seen:
            raise UnsupportedError(f"expected softmax attention in the forward pass of {self.name}, found none")
        if self._silent:
            raise LensError(
                f"expected weights from every attention layer, found none from {len(self._silent)} "
                f"(first {self._silent[0]!r}); this family computes attention in a way that the lens does not know"
            )

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._images = len(tensors[0])
        self.sites.clear()
        self._seen.clear()
        self._silent.clear()
        self._stack.clear()

    def _enter(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self._stack.append((name, module, tuple(tensors[0].shape) if tensors else ()))

        return enter

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        name = self._stack.pop()[0]
        if has_heads(module) and not any(seen == name or seen.startswith(f"{name}.") for seen in self._seen):
            self._silent.append(name)


@contextmanager
def tapped(model: nn.Module, reducer: Reducer, *, explicit: bool = False, name: str = "the model") -> Iterator[Tap]:
    """A model whose every attention call is handed to the reducer while the block lasts; nothing stays behind.

    name: of the model, for messages.
    """
    tap = Tap(reducer, explicit=explicit, name=name)
    with tap.watching(model), tap:
        yield tap


def _score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    heads: int,
) -> Scored:
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if grouped:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None and (query.dim() != 4 or mask.dim() > 4):  # its axes are the query's: joined in the same way
        mask = per_head(mask.expand(*query.shape[:-1], key.shape[-2]), heads)
    return Scored(per_head(query, heads), per_head(key, heads), per_head(value, heads), mask, factor)


def _differentiable(weights: Tensor) -> Tensor:
    """Weights that autograd follows, also where neither images nor parameters ask for gradients."""
    return weights if weights.requires_grad or not torch.is_grad_enabled() else weights.requires_grad_()


def _tokens(entered: tuple[int, ...], queries: int) -> int:
    """How many tokens of an image went into a module, from the shape of its input."""
    if len(entered) == 4:  # (batch, rows, columns, channels) or (batch, channels, rows, columns)
        last, first = entered[1] * entered[2], entered[2] * entered[3]
        return last if last == queries else first
    return entered[1] if len(entered) == 3 else queries


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
