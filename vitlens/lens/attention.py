"""Every attention call of a model, read or changed at any stage: one function mode, with a list of taps.

Nearly all attention passes through F.scaled_dot_product_attention, F.multi_head_attention_forward or a softmax over
(.., query, key). The mode is in force while the model runs and sees all three; forward hooks say which module is
calling. The contexts of one model share its mode and put their taps on its list: changes of outer contexts come first,
and readers see what is used in the end.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import UnsupportedError
from vitlens.lens.call import AttentionInputs, Rows, attention_inputs, per_head
from vitlens.models.anatomy import read_attention
from vitlens.models.attention import SOFTMAX, multi_head_attention, positional, softmax_or_zero
from vitlens.models.hooks import Arguments, Forward, ScopedMode, arguments, overridden, watching
from vitlens.models.model import Model

Stage = Literal["queries", "keys", "values", "scores", "weights"]
TensorFunction = Callable[[Tensor], Tensor]  # to a tensor of the same shape
Keep = Callable[[Tensor, int, int], Tensor]  # a tensor of the call, queries, keys -> (1 or calls, heads, query, key)

_SEEN: Final = frozenset({F.scaled_dot_product_attention, F.multi_head_attention_forward, F.linear, *SOFTMAX})


@dataclass(frozen=True)
class AttentionModule:
    """One attention module of a model, its number of heads, and the linear layer that reads them, if there is one."""

    module: nn.Module
    heads: int
    projection: nn.Linear | None


@dataclass(frozen=True, eq=False)
class Attended:
    """One attention call as a reader receives it, after all changes.

    module: its name; inputs: queries, keys and values, None where the model computed the scores itself; output: of each
    head, None where it was not seen; scored, computed: scores and weights where they were computed.
    """

    module: str
    inputs: AttentionInputs | None = None
    output: Tensor | None = None
    scored: Tensor | None = None
    computed: Tensor | None = None

    def at(self, stage: Stage, rows: Rows = slice(None)) -> Tensor | None:
        """The tensor of a stage, (calls, heads, ..), of scores and weights some query rows; None where there is none.

        What attention that stays fused does not compute is computed for the reader.
        """
        if stage in ("scores", "weights"):
            known = self.scored if stage == "scores" else self.computed
            if known is not None or self.inputs is None:
                return known if known is None else known[..., rows, :]
            return self.inputs.scores(rows) if stage == "scores" else self.inputs.weights(rows)
        return None if self.inputs is None else getattr(self.inputs, _INPUTS[stage])


_INPUTS: Final[Mapping[Stage, str]] = {"queries": "query", "keys": "key", "values": "value"}


@dataclass(frozen=True, eq=False)
class Tap:
    """What one context does in the attention of some modules (None: of all).

    changes: by stage, of its tensor (calls, heads, ..); keep: which keys take part (True); joined: of the heads'
    outputs concatenated, (calls, tokens, heads x head_dim), before the output projection; read: gets every call once it
    is computed; explicit: attention as matrix products, so that the weights are in the autograd graph; begin: called
    before each forward pass.
    """

    modules: Collection[str] | None = None
    changes: Mapping[Stage, TensorFunction] = field(default_factory=dict)
    keep: Keep | None = None
    joined: TensorFunction | None = None
    read: Callable[[Attended], None] | None = None
    explicit: bool = False
    begin: Callable[[], None] | None = None


@dataclass(frozen=True)
class Running:
    """A module that is running: its name, itself, and the shape of its first argument."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]


class AttentionMode(ScopedMode):
    """Sees the attention of one model (a plain module's heads are read from its attributes); use through `tapped`.

    images: in the forward pass; running: the modules that are, outermost first; ran: those with heads that have run.
    """

    def __init__(self, model: Model | nn.Module) -> None:
        super().__init__()
        self.model = model
        self.root = model.module if isinstance(model, Model) else model
        parts = (model.anatomy.attention or ()) if isinstance(model, Model) else read_attention(model)
        self.heads = {part.module: part.heads for part in parts}
        self.taps: list[Tap] = []
        self.images = 0
        self.running: list[Running] = []
        self.ran: list[str] = []
        self._unused = model.anatomy.unused if isinstance(model, Model) else ()
        self._projections = {part.module: part.projection for part in parts}

    def caller(self) -> Running:
        """The module whose attention is computed: the innermost with heads, else the innermost."""
        return next((each for each in reversed(self.running) if each.name in self.heads), self.running[-1])

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change and report attention calls; pass every other call through."""
        if func not in _SEEN or not self.running or any(each.name in self._unused for each in self.running):
            return func(*args, **kwargs)
        name = self.caller().name
        taps = [tap for tap in self.taps if tap.modules is None or name in tap.modules]
        if not taps:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # a mode is not active in its own calls, which must be intercepted here
                return multi_head_attention(*args, **kwargs)
        if func is F.linear:
            changes = [tap.joined for tap in taps if tap.joined is not None]
            if changes and len(args) > 1 and self._projects(name, args[1]):
                args = (self._join(name, changes, args[0]), *args[1:])
            return func(*args, **kwargs)
        taps = [tap for tap in taps if tap.changes or tap.keep or tap.read or tap.explicit]
        if not taps:
            return func(*args, **kwargs)
        call = _Call(name, self._heads(), taps)
        if func is F.scaled_dot_product_attention:
            return call.fused(*args, **kwargs)
        args, kwargs = positional(func, args, kwargs)
        return call.softmax(func, args, kwargs) if self._is_attention(name, args, kwargs) else func(*args, **kwargs)

    def _heads(self) -> int:
        return next((self.heads[each.name] for each in reversed(self.running) if self.heads.get(each.name)), 1)

    def _is_attention(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a softmax in a module with heads is over the last axis of at least three."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        scores = args[0] if args else None
        return name in self.heads and isinstance(scores, Tensor) and scores.dim() >= 3 and dim in (-1, scores.dim() - 1)

    def _projects(self, name: str, weight: Tensor) -> bool:
        """Whether it is the weight of the output projection, which a parametrization computes again in each pass."""
        linear = _projection(self.root, self._projections.get(name))
        if linear is None:
            return False
        own = linear.weight
        return weight is own or (
            not isinstance(own, nn.Parameter) and weight.shape == own.shape and torch.equal(weight, own)
        )

    def _join(self, name: str, changes: Collection[TensorFunction], tokens: Tensor) -> Tensor:
        first = isinstance(
            self.root.get_submodule(name), nn.MultiheadAttention
        )  # tokens, whatever its batch_first says
        outputs = tokens.transpose(0, 1) if first else tokens
        # MaxViT projects a window as (calls, rows, columns, width): its tokens row by row
        joined = outputs.reshape(len(outputs), -1, outputs.shape[-1])
        for change in changes:
            joined = change(joined)
        return joined.transpose(0, 1) if first else joined.reshape(tokens.shape)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the mode is in force while the model runs, and knows which module is calling."""
        modules = {
            name: part
            for name, part in self.root.named_modules()
            if name and (name in self.heads or any(True for _ in part.children()))
        }

        def enter(name: str, values: Arguments) -> None:
            self.running.append(Running(name, modules[name], _shape(values)))
            if name in self.heads:
                self.ran.append(name)

        def leave(_name: str, _values: Arguments, _output: object) -> None:
            self.running.pop()

        with (
            watching(self.root, modules, leave, before=enter, always=True),
            overridden(self.root, self._around),
        ):
            yield

    def _around(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.images = (*_shape(arguments(args, kwargs)), 1)[0]
            self.running.clear()
            self.ran.clear()
            for tap in self.taps:
                if tap.begin is not None:
                    tap.begin()
            try:
                with self:
                    return forward(*args, **kwargs)
            finally:
                self.running.clear()

        return run


@dataclass(frozen=True)
class _Call:
    """One call of an attention function, in this module, under these taps."""

    module: str
    heads: int
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
        """Scaled dot-product attention, by its kernel where neither scores nor weights are changed."""
        if query.dim() == 5 and query.shape[1] == self.heads != query.shape[2]:  # Hiera: heads before windows
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            return self.fused(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
        own = attention_inputs(query, key, value, attn_mask, is_causal, scale, enable_gqa, self.heads)
        inputs = own
        for stage, part in _INPUTS.items():
            changed = self._changed(stage, getattr(inputs, part))
            inputs = inputs if changed is getattr(inputs, part) else replace(inputs, **{part: changed})  # type: ignore[arg-type]
        scored, computed, keep = None, None, self._keep(inputs.query, inputs.query.shape[-2], inputs.key.shape[-2])
        if self._is_late():
            scores = inputs.scores(slice(None))
            scored = self._scores(scores, keep)
            plain = scored is scores and inputs.bias is None
            computed = self._weights(scored.softmax(-1) if plain else softmax_or_zero(scored))
            output = F.dropout(computed, dropout_p) @ inputs.value
        elif keep is not None or inputs is not own:
            inputs = inputs if keep is None else replace(inputs, bias=_both(inputs.bias, keep))
            output = F.scaled_dot_product_attention(
                inputs.query, inputs.key, inputs.value, inputs.bias, dropout_p, scale=inputs.scale
            )
        else:
            options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
            )
        output = per_head(output, self.heads)
        self._read(Attended(self.module, inputs, output, scored, computed))
        return output.reshape(*query.shape[:-1], value.shape[-1])  # the reader's tensor is in the graph of the logits

    def softmax(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The model's own softmax of scores that it computed."""
        own, *rest = args
        scores = per_head(own, self.heads)
        fits = scores.shape[1] == self.heads
        keep = self._keep(scores, *scores.shape[-2:]) if fits else None
        scored = self._scores(scores, keep)
        if scored is scores:
            weights = func(own, *rest, **kwargs)
        else:
            weights = softmax_or_zero(scored.reshape(own.shape), lambda each: func(each, *rest, **kwargs))
        computed = self._weights(per_head(weights, self.heads))
        self._read(Attended(self.module, None, None, scored, computed))
        return computed.reshape(own.shape)  # the reader's tensor, as above

    def _is_late(self) -> bool:
        return any(tap.explicit or "scores" in tap.changes or "weights" in tap.changes for tap in self.taps)

    def _changed(self, stage: Stage, tensor: Tensor) -> Tensor:
        for tap in self.taps:
            if stage in tap.changes:
                tensor = tap.changes[stage](tensor)
        return tensor

    def _scores(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        """The scores after their changes, -inf where a key is knocked out; the same object where there are none."""
        changed = self._changed("scores", scores)
        return changed if keep is None else changed.masked_fill(~keep, -torch.inf)

    def _weights(self, weights: Tensor) -> Tensor:
        """The weights after their changes; explicit ones in the autograd graph, also where nothing before them is."""
        weights = self._changed("weights", weights)
        explicit = torch.is_grad_enabled() and any(tap.explicit for tap in self.taps)
        return weights.requires_grad_() if explicit and not weights.requires_grad else weights

    def _keep(self, like: Tensor, queries: int, keys: int) -> Tensor | None:
        """Which keys take part, (1 or calls, heads, query, key); None: all. Raises UnsupportedError for other heads."""
        keeps = [tap.keep for tap in self.taps if tap.keep is not None]
        if keeps and like.shape[1] != self.heads:
            raise UnsupportedError(
                f"expected queries of {self.heads} heads to knock out attention, found {like.shape[1]} in "
                f"{self.module}; this family's attention cannot be knocked out"
            )
        found: Tensor | None = None
        for keep in keeps:
            each = keep(like, queries, keys)
            found = each if found is None else found & each
        return found

    def _read(self, call: Attended) -> None:
        for tap in self.taps:
            if tap.read is not None:
                tap.read(call)


_MODES: Final[ContextVar[tuple[AttentionMode, ...]]] = ContextVar("modes", default=())  # of the contexts around


@contextmanager
def tapped(model: Model | nn.Module, *taps: Tap) -> Iterator[AttentionMode]:
    """Inside, the model's attention runs under the taps; contexts nest, and are undone also after an exception."""
    with ExitStack() as stack:
        mode = _mode_of(model)
        if mode is None:
            mode, around = AttentionMode(model), _MODES.get()
            stack.enter_context(mode.watching())
            _MODES.set((*around, mode))
            stack.callback(_MODES.set, around)
        for tap in taps:
            mode.taps.append(tap)
            stack.callback(mode.taps.remove, tap)
        yield mode


@contextmanager
def tapped_in_part(model: Model) -> Iterator[None]:
    """Inside, the model's taps are in force where one of its modules is called alone."""
    mode = _mode_of(model)
    with nullcontext() if mode is None else mode:
        yield


def _mode_of(model: Model | nn.Module) -> AttentionMode | None:
    return next((each for each in _MODES.get() if each.model is model and each.in_force), None)


def attention_module(model: Model, name: str) -> AttentionModule:
    """The attention module of this name, as the model's anatomy describes it."""
    part = model.anatomy.parts.get(name)
    projection = _projection(model.module, None if part is None else part.projection)
    return AttentionModule(model.module.get_submodule(name), 1 if part is None else part.heads, projection)


def _projection(root: nn.Module, name: str | None) -> nn.Linear | None:
    linear = None if name is None else root.get_submodule(name)
    return linear if isinstance(linear, nn.Linear) else None


def _both(bias: Tensor | None, keep: Tensor) -> Tensor:
    """An attention mask, boolean or additive, without the keys that are knocked out."""
    if bias is None:
        return keep
    return bias & keep if bias.dtype == torch.bool else bias.masked_fill(~keep, -torch.inf)


def _shape(values: Arguments) -> tuple[int, ...]:
    """The shape of the first tensor among a module's arguments."""
    return next((tuple(value.shape) for value in values.values() if isinstance(value, Tensor)), ())
