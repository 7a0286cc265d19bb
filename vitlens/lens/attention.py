"""Every attention call of a model, read or changed at any stage: one function mode, with a list of
taps.

Nearly all attention passes through F.scaled_dot_product_attention, F.multi_head_attention_forward
or a softmax over (.., query, key). The mode is in force while the model runs and sees all three;
forward hooks say which module is calling. The contexts of one model share its mode and put their
taps on its list: changes of outer contexts come first, and readers see what is used in the end.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import LensError, UnsupportedError
from vitlens.lens.call import (
    INPUTS,
    AttentionCall,
    AttentionInputs,
    FusedArguments,
    Stage,
    per_head,
)
from vitlens.lens.site import Caller, Site, decide_kind, windows_of
from vitlens.models.anatomy import read_attention
from vitlens.models.attention import SOFTMAX, multi_head_attention, positional, softmax_or_zero
from vitlens.models.hooks import Forward, ScopedMode, overridden, unchanged
from vitlens.models.memo import Memo
from vitlens.models.model import Model
from vitlens.turns import turn

TensorFunction = Callable[[Tensor], Tensor]  # to a tensor of the same shape
# from a tensor of the call and the numbers of queries and keys to a mask: which keys take
# part, of shape (1 or calls, heads, query, key)
Keep = Callable[[Tensor, int, int], Tensor]

SITES: Final[Memo[tuple[Site, ...]]] = Memo()  # of each model, from its survey
_SEEN: Final = frozenset(
    {F.scaled_dot_product_attention, F.multi_head_attention_forward, F.linear, *SOFTMAX}
)


@dataclass(frozen=True, eq=False)
class Tap:
    """The changes and readers of one context in the attention of some modules (None: of all).

    changes: by stage, of its tensor (calls, heads, ..); keep: which keys take part (True); joined:
    of the heads' outputs concatenated, (calls, tokens, heads x head_dim), before the output
    projection; read: gets every call once it is computed, after all changes, and its scores where
    it was not fused; explicit: attention as matrix products, so that the weights are in the
    autograd graph.
    """

    modules: Collection[str] | None = None
    changes: Mapping[Stage, TensorFunction] = field(default_factory=dict)
    keep: Keep | None = None
    joined: TensorFunction | None = None
    read: Callable[[AttentionCall, Tensor | None], None] | None = None
    explicit: bool = False


class AttentionMode(ScopedMode):
    """Sees the attention of one model (a plain module's heads are read from its attributes); use
    through `tapped`.

    root: the module of the model; images: in the forward pass; sites: of its calls that a tap has
    read.
    """

    def __init__(self, model: Model | nn.Module) -> None:
        super().__init__()
        self.model = model
        self.taps: list[Tap] = []
        self.images = 0
        self.sites: list[Site] = []
        self._heads: dict[str, int] = {}
        self._projections: dict[str, str | None] = {}
        self._heads_axes: dict[str, int | None] = {}
        self._blocks_before: dict[str, int] = {}
        self._unused: Collection[str] = ()
        self._running: list[Caller] = []  # outermost first
        self._ran: list[str] = []  # modules with heads
        self._surveyed_sites: dict[tuple[str, int], Site] = {}  # by module and part
        if isinstance(model, Model):
            self.root = model.module
            self._unused = model.anatomy.unused
            parts = model.anatomy.attention or ()
        else:
            self.root = model
            parts = read_attention(model)
        for part in parts:
            self._heads[part.module] = part.heads
            self._projections[part.module] = part.projection
            self._heads_axes[part.module] = part.heads_axis
            self._blocks_before[part.module] = part.blocks_before

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Change and report attention calls; pass every other call through."""
        if func not in _SEEN or not self._running:
            return func(*args, **kwargs)
        if self._unused and any(caller.name in self._unused for caller in self._running):
            return func(*args, **kwargs)
        name = self._caller().name
        taps = [tap for tap in self.taps if tap.modules is None or name in tap.modules]
        if func is F.linear:
            changes = [tap.joined for tap in taps if tap.joined is not None]
            if changes and len(args) > 1 and self._projects(name, args[1]):
                args = (self._join(name, changes, args[0]), *args[1:])
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and taps:
            with self:  # a mode is not active in its own calls, which must be intercepted here
                return multi_head_attention(*args, **kwargs)
        taps = [tap for tap in taps if tap.changes or tap.keep or tap.read or tap.explicit]
        if not taps:
            return func(*args, **kwargs)
        call = _Call(self, name, self._head_count(), self._heads_axes.get(name), taps)
        if func is F.scaled_dot_product_attention:
            return call.fused(*args, **kwargs)
        args, kwargs = positional(func, args, kwargs)
        if not self._is_attention(name, args, kwargs):
            return func(*args, **kwargs)
        return call.softmax(func, args, kwargs)

    def site(self, module: str, shape: torch.Size) -> Site:
        """Return the site of the running call, from the survey where it has one.

        shape: of the call's weights, (batch, heads, queries, keys).
        """
        part = sum(site.module == module for site in self.sites)
        batch, heads, queries, keys = shape
        surveyed = self._surveyed_sites.get((module, part))
        if surveyed is not None and (surveyed.heads, surveyed.queries, surveyed.keys) == (
            heads,
            queries,
            keys,
        ):
            self.sites.append(surveyed)
            return surveyed
        calls = max(batch // self.images, 1)
        entered = self._caller().shape
        windows = windows_of(self.root, self._running, calls=calls, queries=queries, keys=keys)
        if windows:
            patches = keys  # a pooled query stands for several
            tokens = keys
        else:
            patches = queries
            tokens = _tokens(entered, queries, self.images)
        channels = queries * heads in entered[1:]
        kind = decide_kind(
            calls=calls, queries=patches, keys=keys, tokens=tokens, channels=channels
        )
        modules = {site.module for site in self.sites}
        layer = len(modules - {module}) + self._blocks_before.get(module, 0)
        self.sites.append(Site(layer, module, part, kind, heads, queries, keys, windows))
        return self.sites[-1]

    def require_all_read(self) -> None:
        """Check after a forward pass that the weights of every attention module that ran were read.

        Raises UnsupportedError for a model without softmax attention, LensError where some layers
        were missed.
        """
        read = {site.module for site in self.sites}
        if not read:
            name = self.model.alias if isinstance(self.model, Model) else "the model"
            raise UnsupportedError(
                f"expected softmax attention in the forward pass of {name}, found none"
            )
        silent = [name for name in self._ran if not _contains_any(name, read)]
        if silent:
            raise LensError(
                f"expected weights from every attention layer, found none from {len(silent)} "
                f"(first {silent[0]!r}); this family computes attention in a way that the lens "
                "does not support"
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Put the mode in force while the model runs, with hooks that follow which module is
        calling.
        """
        with ExitStack() as stack:
            for name, module in self.root.named_modules():
                if name and (name in self._heads or list(module.children())):
                    entered = module.register_forward_pre_hook(
                        partial(self._enter, name), with_kwargs=True
                    )
                    stack.callback(entered.remove)
                    stack.callback(
                        module.register_forward_hook(self._leave, always_call=True).remove
                    )
            # the taps change what it computes: see `is_tapped`
            stack.enter_context(overridden(self.root, self._around, equal=True))
            yield

    def _enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self.in_force:
            return
        self._running.append(Caller(name, module, _shape(args, kwargs)))
        if name in self._heads:
            self._ran.append(name)

    def _leave(self, _module: nn.Module, _args: object, _output: object) -> None:
        if self.in_force:
            self._running.pop()

    def _around(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            shape = _shape(args, kwargs)
            self.images = shape[0] if shape else 1
            self._running.clear()
            self._ran.clear()
            self.sites.clear()
            surveyed = SITES.peek(self.model) if isinstance(self.model, Model) else None
            self._surveyed_sites = {(site.module, site.part): site for site in surveyed or ()}
            try:
                with self:
                    return forward(*args, **kwargs)
            finally:
                self._running.clear()

        return run

    def _caller(self) -> Caller:
        """Return the module whose attention is computed: the innermost with heads, else the
        innermost.
        """
        for caller in reversed(self._running):
            if caller.name in self._heads:
                return caller
        return self._running[-1]

    def _head_count(self) -> int:
        """Return the number of heads of the innermost running module with heads, else 1."""
        for caller in reversed(self._running):
            heads = self._heads.get(caller.name)
            if heads:
                return heads
        return 1

    def _is_attention(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if a softmax in a module with heads is over the last axis of at least
        three."""
        if name not in self._heads or not args:
            return False
        scores, *rest = args
        if not isinstance(scores, Tensor) or scores.dim() < 3:
            return False
        dim = kwargs.get("dim", rest[0] if rest else None)
        return dim in (-1, scores.dim() - 1)

    def _projects(self, name: str, weight: Tensor) -> bool:
        """Return True if `weight` is that of the output projection."""
        linear = _linear(self.root, self._projections.get(name))
        if linear is None:
            return False
        projection = linear.weight
        if weight is projection:
            return True
        if isinstance(projection, nn.Parameter):
            return False
        # a parametrization computes its weight again in each pass
        return weight.shape == projection.shape and torch.equal(weight, projection)

    def _join(self, name: str, changes: Collection[TensorFunction], tokens: Tensor) -> Tensor:
        # tokens come first in torch's own attention, whatever its batch_first says
        first = isinstance(self.root.get_submodule(name), nn.MultiheadAttention)
        outputs = tokens.transpose(0, 1) if first else tokens
        # MaxViT projects a window as (calls, rows, columns, width): its tokens row by row
        joined = outputs.reshape(len(outputs), -1, outputs.shape[-1])
        for change in changes:
            joined = change(joined)
        return joined.transpose(0, 1) if first else joined.reshape(tokens.shape)


@dataclass(frozen=True)
class _Call:
    """One call of an attention function, in this module, under these taps.

    heads_axis: of the heads, where a forward pass showed it (see `AttentionPart`).
    """

    mode: AttentionMode
    module: str
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
        """Return the axis of the heads where they stand before windows (see `AttentionPart`).

        Returns None elsewhere.
        """
        if tensor.dim() == 4 and self.heads_axis == 0:
            return 0
        if tensor.dim() != 5 or self.heads_axis == 2:
            return None
        if self.heads_axis == 1 or tensor.shape[1] == self.heads:  # timm's Hiera and NesT
            return 1
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
            masked = replace(inputs, bias=_both(inputs.bias, keep))
        changed_scores = None
        weights = None
        if self._needs_weights():
            scores = inputs.scores(slice(None))
            changed_scores = self._scores(scores, keep)
            if changed_scores is scores and inputs.bias is None:
                weights = self._weights(scores.softmax(-1))
            else:
                weights = self._weights(softmax_or_zero(changed_scores))
            output = F.dropout(weights, arguments.dropout) @ inputs.value
        elif masked is original:
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
        # the reader's tensor is in the graph of the logits
        return output.reshape(*arguments.query.shape[:-1], arguments.value.shape[-1])

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
        """Return the model's own softmax of scores that it computed."""
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
        return weights.reshape(raw_scores.shape)  # the reader's tensor, as above

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
        call = AttentionCall(
            self.mode.site(self.module, shape), self.mode.images, inputs, weights, output
        )
        with unchanged():  # a reader may run the model again
            for read in readers:
                read(call, scores)


def _heads_first(tensor: Tensor, axis: int) -> Tensor:
    """Return (batch, windows, heads, ..) as it was before `_windows_first`."""
    moved = tensor.transpose(1, 2)
    return moved.flatten(0, 1) if axis == 0 else moved


# the modes of the enclosing contexts
_MODES: Final[ContextVar[tuple[AttentionMode, ...]]] = ContextVar("modes", default=())


@contextmanager
def tapped(model: Model | nn.Module, *taps: Tap) -> Iterator[AttentionMode]:
    """Run the model's attention under the taps.

    Contexts nest, and are undone also after an exception.
    """
    with turn(model), ExitStack() as stack:
        around = _MODES.get()
        mode = _mode_in_force(model, around)
        if mode is None:
            mode = AttentionMode(model)
            stack.enter_context(mode.watching())
            _MODES.set((*around, mode))
            stack.callback(_MODES.set, around)
        for tap in taps:
            mode.taps.append(tap)
            stack.callback(mode.taps.remove, tap)
        yield mode


def _mode_in_force(
    model: Model | nn.Module, modes: tuple[AttentionMode, ...]
) -> AttentionMode | None:
    for mode in modes:
        if mode.model is model and mode.in_force:
            return mode
    return None


def is_tapped(model: Model, module: str | None = None) -> bool:
    """Return True if a context around changes the attention of a model: of this module, or of any
    (None).
    """
    for mode in _MODES.get():
        if mode.root is not model.module or not mode.in_force:
            continue
        for tap in mode.taps:
            changes = tap.changes or tap.keep is not None or tap.joined is not None
            if changes and (module is None or tap.modules is None or module in tap.modules):
                return True
    return False


def projection_of(model: Model, name: str) -> nn.Linear | None:
    """Return the linear layer that reads the concatenated heads of an attention module.

    Returns None where there is none.
    """
    part = model.anatomy.parts.get(name)
    if part is None:
        return None
    return _linear(model.module, part.projection)


def _linear(root: nn.Module, name: str | None) -> nn.Linear | None:
    if name is None:
        return None
    module = root.get_submodule(name)
    return module if isinstance(module, nn.Linear) else None


def _contains_any(name: str, modules: Collection[str]) -> bool:
    """Return True if one of the modules is the one of this name or inside it."""
    return any(module == name or module.startswith(f"{name}.") for module in modules)


def _both(bias: Tensor | None, keep: Tensor) -> Tensor:
    """Return an attention mask, boolean or additive, without the keys that are knocked out."""
    if bias is None:
        return keep
    if bias.dtype == torch.bool:
        return bias & keep
    return bias.masked_fill(~keep, -torch.inf)


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the first tensor among a module's arguments; () where there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return tuple(value.shape)
    return ()


def _tokens(entered: tuple[int, ...], queries: int, images: int) -> int:
    """Return the number of tokens of an image in a module's input, from its shape."""
    if len(entered) == 4:  # (batch, rows, columns, channels) or (batch, channels, rows, columns)
        last = entered[1] * entered[2]
        first = entered[2] * entered[3]
        return last if last == queries else first
    # (batch, tokens, width), or nn.MultiheadAttention's default, (tokens, batch, width)
    if len(entered) == 3:
        return entered[0] if entered[:2] == (queries, images) else entered[1]
    return queries
