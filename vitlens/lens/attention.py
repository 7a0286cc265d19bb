"""Every attention call of a model, read or changed at any stage by one function mode.

Nearly all attention passes through F.scaled_dot_product_attention, F.multi_head_attention_forward
or a softmax over (.., query, key). The mode is in force while the model runs and intercepts all
three. Forward hooks record which module is calling. The contexts of one model share its mode and
put their taps on its list. Changes of outer contexts come first, and readers receive what is used
in the end.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import LensError, UnsupportedError
from vitlens.lens.site import Caller, Kind, Site, decide_kind, windows_of
from vitlens.lens.tap import Tap, TappedCall, TensorFunction
from vitlens.models.anatomy import read_attention
from vitlens.models.attention import SOFTMAX, multi_head_attention, positional
from vitlens.models.hooks import Forward, ScopedMode, overridden
from vitlens.models.memo import Memo
from vitlens.models.model import Model
from vitlens.turns import turn

# the sites that the survey of each model found; `lens.observe.survey` fills it
SITES: Final[Memo[tuple[Site, ...]]] = Memo()
_SEEN: Final = frozenset(
    {F.scaled_dot_product_attention, F.multi_head_attention_forward, F.linear, *SOFTMAX}
)


class AttentionMode(ScopedMode):
    """The mode that intercepts the attention of one model; use it through `tapped`.

    Each model is surveyed once: a forward pass of one image finds its sites in order, and they are
    kept in `SITES`. In later passes, the n-th call of a module is then the n-th surveyed site of
    that module. For a plain module without a survey, heads are read from its attributes and sites
    from the shapes of each call.

    root: the module of the model.
    images: the number of images in the running forward pass.
    sites: the sites of the calls that a tap has read in this pass.
    taps: the taps of all contexts in force, outer contexts first.
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
        if func not in _SEEN or not self._running or self._is_in_unused_module():
            return func(*args, **kwargs)
        name = self._caller().name
        taps = [tap for tap in self.taps if tap.modules is None or name in tap.modules]
        if func is F.linear:
            changes = [tap.joined for tap in taps if tap.joined is not None]
            if changes:
                args, kwargs = positional(func, args, kwargs)
                if self._projects(name, args[1]):
                    args = (self._join(name, changes, args[0]), *args[1:])
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and taps:
            # torch turns a mode off while it handles a call; it is turned on again, because a call
            # inside, scaled_dot_product_attention, must be intercepted
            with self:
                return multi_head_attention(*args, **kwargs)
        # a tap with only `joined` acts on the output projection, above
        taps = [tap for tap in taps if tap.acts_on_attention]
        if not taps:
            return func(*args, **kwargs)
        call = TappedCall(
            module=name,
            images=self.images,
            find_site=partial(self.site, name),
            heads=self._head_count(),
            heads_axis=self._heads_axes.get(name),
            taps=taps,
        )
        if func is F.scaled_dot_product_attention:
            return call.fused(*args, **kwargs)
        args, kwargs = positional(func, args, kwargs)
        if not self._is_attention(name, args, kwargs):
            return func(*args, **kwargs)
        return call.softmax(func, args, kwargs)

    def _is_in_unused_module(self) -> bool:
        """Return True inside a module on which the logits do not depend."""
        return any(caller.name in self._unused for caller in self._running)

    def site(self, module: str, shape: torch.Size) -> Site:
        """Return the site of the running call: the surveyed one, or else one read from shapes.

        shape: of the call's weights, (batch, heads, queries, keys).
        """
        _, heads, queries, keys = shape
        part = self._earlier_calls(module)
        site = self._surveyed_sites.get((module, part))
        if site is None or (site.heads, site.queries, site.keys) != (heads, queries, keys):
            site = self._read_site(module, part, shape)
        self.sites.append(site)
        return site

    def _earlier_calls(self, module: str) -> int:
        """Return how many calls of the module were read earlier in this forward pass."""
        return sum(site.module == module for site in self.sites)

    def _read_site(self, module: str, part: int, shape: torch.Size) -> Site:
        """Return the site of the running call, from the shapes of its weights and of its module."""
        batch, heads, queries, keys = shape
        calls = max(batch // self.images, 1)  # the windows of an image; 1 without windows
        entered = self._caller().shape
        windows = windows_of(self.root, self._running, calls=calls, queries=queries, keys=keys)
        kind: Kind
        if windows:  # known; a single window is the whole map
            kind = "window" if calls > 1 else "patch"
        else:
            # in attention between channels, the queries are the channels of a head
            attends_to_channels = queries * heads in entered[1:]
            kind = decide_kind(
                calls=calls,
                queries=queries,
                keys=keys,
                tokens=_tokens(entered, queries, self.images),
                channels=attends_to_channels,
            )
        # all calls of one module belong to one layer
        earlier_modules = {site.module for site in self.sites} - {module}
        layer = len(earlier_modules) + self._blocks_before.get(module, 0)
        return Site(
            layer=layer,
            module=module,
            part=part,
            kind=kind,
            heads=heads,
            queries=queries,
            keys=keys,
            windows=windows,
        )

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
        """Put the mode in force while the model runs.

        Hooks record which module is calling.
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
            # `equal`: without changes by taps, which `is_tapped` reports, the outputs are the same
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
        """Return the module whose attention is computed.

        It is the innermost running module with heads, or the innermost one if none has heads.
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
        """Return True for a softmax over the last of three or more axes, in a module with heads."""
        if name not in self._heads or not args:
            return False
        scores, *rest = args
        if not isinstance(scores, Tensor) or scores.dim() < 3:
            return False
        dim = kwargs.get("dim")
        if dim is None and rest:
            dim = rest[0]
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
        """Return the input of the output projection after changes.

        changes: functions of the concatenated heads, (calls, tokens, heads x head_dim).
        """
        # torch's attention projects (tokens, calls, width), whatever its batch_first says
        tokens_first = isinstance(self.root.get_submodule(name), nn.MultiheadAttention)
        outputs = tokens.transpose(0, 1) if tokens_first else tokens
        # MaxViT projects a window as (calls, rows, columns, width): its tokens row by row
        joined = outputs.reshape(len(outputs), -1, outputs.shape[-1])
        for change in changes:
            joined = change(joined)
        return joined.transpose(0, 1) if tokens_first else joined.reshape(tokens.shape)


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
    """Return True if an enclosing context changes the attention of a model.

    module: the name of the attention module in question; None means any.
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
    """Return True if one of the modules has this name or is inside the module of this name."""
    return any(module == name or module.startswith(f"{name}.") for module in modules)


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the first tensor among a module's arguments; () where there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return tuple(value.shape)
    return ()


def _tokens(entered: tuple[int, ...], queries: int, images: int) -> int:
    """Return the number of tokens of an image in a module's input.

    entered: the shape of that input. Shapes do not name their axes: if both orders are possible,
    the order is the one that agrees with the number of queries.
    """
    if len(entered) == 4:
        tokens_channels_last = entered[1] * entered[2]  # (batch, rows, columns, channels)
        tokens_channels_first = entered[2] * entered[3]  # (batch, channels, rows, columns)
        if tokens_channels_last == queries:
            return tokens_channels_last
        return tokens_channels_first
    if len(entered) == 3:
        # (tokens, batch, width) is the default of nn.MultiheadAttention
        is_tokens_first = entered[:2] == (queries, images)
        return entered[0] if is_tokens_first else entered[1]
    return queries
