"""Observe: run a model once and hand each layer's attention to a reducer, after a self-check on the first image."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import evaluating
from vitlens.errors import LensError, NonFiniteError, UnsupportedError
from vitlens.lens.attention import Attended, AttentionMode, Tap, tapped
from vitlens.lens.call import AttentionCall
from vitlens.lens.site import Site, decide_kind
from vitlens.lens.windows import windows_of
from vitlens.models.attention import SOFTMAX, positional
from vitlens.models.hooks import Memo, ScopedMode, once_per_model, watching
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits

Reducer = Callable[[AttentionCall], None]
_SITES: Final[Memo[tuple[Site, ...]]] = Memo()
_SUMS: Final = frozenset({"add", "sub", "rsub", "iadd", "isub", "radd", "lerp"})  # names without _ at either end
_MAPS: Final = frozenset({"linear", "conv2d"})
_PRODUCTS: Final = frozenset({"matmul", "bmm", "einsum"})
_KEEPING: Final = frozenset(  # after these it is still the softmax, or what it mixed, times a number
    {
        "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "swapaxes", "squeeze",
        "unsqueeze", "chunk", "split", "unbind", "getitem", "select", "narrow", "contiguous", "clone", "to", "type_as",
        "float", "double", "half", "bfloat16", "dropout", "mul", "rmul", "imul", "div", "neg",
    }
)  # fmt: skip
_OTHER: Final = 0.1  # of the spread over heads and queries: a greater difference is not rounding
TOLERANCE: Final = 1e-4  # fp32: weights @ value against the output of the model's own kernel


def observe(model: Model, images: Images, reducer: Reducer, *, explicit: bool = False, graph: bool = False) -> Logits:
    """The logits of the images; each attention layer is handed to the reducer as it is computed, and then released.

    Memory does not grow with the number of layers; the logits are those of the unobserved model, bit for bit (to 1e-5
    for nn.MultiheadAttention, which uses another kernel when unobserved). explicit: attention as matrix products, so
    that the weights are in the autograd graph; graph: the autograd graph starts at the images and attention stays
    fused, so that the reducer's tensors are part of the graph of the logits. The first time a model is observed, the
    lens checks itself on one image (see `survey`). Raises UnsupportedError where there is no attention or it is of
    several softmaxes added, LensError where an attention layer would be missing or wrong.
    """
    survey_weights(model, images)
    with (
        evaluating(model),
        torch.enable_grad() if explicit or graph else torch.no_grad(),
        observing(model, reducer, explicit=explicit) as observer,
    ):
        logits: Tensor = model(images.detach().requires_grad_() if graph else images)
        observer.finish()
    return logits


class Observation:
    """Hands every attention call of a model to a reducer, in the order of the forward pass, and keeps no tensor.

    sites: of the latest forward pass; known: those of the model's survey, if there was one, by module and part.
    """

    def __init__(self, model: Model | nn.Module, reducer: Reducer) -> None:
        self.name = model.alias if isinstance(model, Model) else "the model"
        self.reducer = reducer
        self.sites: list[Site] = []
        known = _SITES.known(model) if isinstance(model, Model) else None
        self._known = {(site.module, site.part): site for site in known or ()}
        self.mode: AttentionMode

    def finish(self) -> None:
        """After a forward pass: check that the weights of every attention module that ran were observed.

        Raises UnsupportedError for a model without softmax attention, LensError where some layers were missed.
        """
        seen = {site.module for site in self.sites}
        if not seen:
            raise UnsupportedError(f"expected softmax attention in the forward pass of {self.name}, found none")
        silent = [
            name for name in self.mode.ran if not any(each == name or each.startswith(f"{name}.") for each in seen)
        ]
        if silent:
            raise LensError(
                f"expected weights from every attention layer, found none from {len(silent)} "
                f"(first {silent[0]!r}); this family computes attention in a way that the lens does not support"
            )

    def read(self, call: Attended) -> None:
        """Take one call of an attention function."""
        if call.computed is not None:
            shape = call.computed.shape
        else:
            assert call.inputs is not None  # a call has inputs or weights
            shape = torch.Size((*call.inputs.query.shape[:3], call.inputs.key.shape[2]))
        part = sum(site.module == call.module for site in self.sites)
        site = self._known.get((call.module, part))
        if site is None or (site.heads, site.queries, site.keys) != shape[1:]:
            site = self._site(call.module, part, shape)
        self.sites.append(site)
        self.reducer(AttentionCall(site, self.mode.images, call.inputs, call.computed, call.output))

    def _site(self, module: str, part: int, shape: torch.Size) -> Site:
        """The place of a call whose weights have this shape, from the modules that are calling."""
        batch, heads, queries, keys = shape
        images, running = self.mode.images, self.mode.running
        calls, entered = max(batch // images, 1), self.mode.caller().shape
        callers = [(each.name, each.module, each.shape) for each in running]
        windows = windows_of(self.mode.root, callers, calls=calls, queries=queries, keys=keys)
        patches = keys if windows else queries  # a pooled query stands for several
        tokens = patches if windows else _tokens(entered, queries, images)
        channels = queries * heads in entered[1:]
        kind = decide_kind(calls=calls, queries=patches, keys=keys, tokens=tokens, channels=channels)
        layer = len(dict.fromkeys((*(site.module for site in self.sites), module))) - 1
        return Site(layer, module, part, kind, heads, queries, keys, windows)


@contextmanager
def observing(model: Model | nn.Module, reducer: Reducer, *, explicit: bool = False) -> Iterator[Observation]:
    """Inside, every attention call is handed to the reducer; a plain module's heads are read from its attributes."""
    if isinstance(model, Model) and not model.anatomy.attention and model.anatomy.unread:
        raise UnsupportedError(f"expected softmax attention in {model.alias}, {model.anatomy.unread}")
    observation = Observation(model, reducer)
    with tapped(model, Tap(read=observation.read, begin=observation.sites.clear, explicit=explicit)) as mode:
        observation.mode = mode
        yield observation


def _tokens(entered: tuple[int, ...], queries: int, images: int) -> int:
    """The number of tokens of an image in a module's input, from its shape."""
    if len(entered) == 4:  # (batch, rows, columns, channels) or (batch, channels, rows, columns)
        last, first = entered[1] * entered[2], entered[2] * entered[3]
        return last if last == queries else first
    if len(entered) == 3:  # (batch, tokens, width), or nn.MultiheadAttention's default, (tokens, batch, width)
        return entered[0] if entered[:2] == (queries, images) else entered[1]
    return queries


def survey(model: Model, images: Images) -> tuple[Site, ...]:
    """Where a model computes attention, layer by layer; checked on the first of the images, once per model.

    The check: weights @ value is the output of the model's own kernel (1e-4), rows sum to 1, the weights of every
    attention module are observed, the logits are those of the unobserved model, and the weights of an image are the
    same with another image in its batch (else the first axis is not the batch). On the meta device, which has no
    values, only the third is checked. The tolerances of a module in bf16 or fp16 are those of its rounding. Raises
    LensError where a check fails.
    """
    read = _sites if images.is_meta else _checked_sites
    return _SITES.get(model, lambda: read(model, images[:1]))


@once_per_model
def survey_weights(model: Model, images: Images) -> tuple[Site, ...]:
    """As `survey`, where weights are read: raises UnsupportedError, too, unless they are what mixes the values."""
    sites = survey(model, images)
    require_one_softmax(model, images)
    return sites


def _sites(model: Model, image: Images) -> tuple[Site, ...]:
    with evaluating(model), torch.no_grad(), observing(model, lambda _: None) as observer:
        model(image)
        observer.finish()
    return tuple(observer.sites)


def _checked_sites(model: Model, image: Images) -> tuple[Site, ...]:
    exact = torch.autocast(image.device.type, enabled=False)  # the tolerances are those of fp32
    tolerance = max(TOLERANCE, 4 * torch.finfo(model.mean.dtype).eps)
    alone: list[Tensor] = []

    def check(call: AttentionCall) -> None:
        _check_call(call, tolerance)
        alone.append(_sketch(call, call.weights()))

    with evaluating(model), torch.no_grad(), exact:
        plain = model(image)
        with observing(model, check) as observer:
            observed = model(image)
            observer.finish()
    sites = tuple(observer.sites)
    if not torch.isfinite(plain).all():
        raise NonFiniteError(f"expected finite logits of {model.alias}, found NaN or infinity; check its weights")
    largest = (plain - observed).abs().max().item()
    if largest > tolerance * max(1.0, plain.abs().max().item()):
        raise LensError(
            f"expected the logits of {model.alias} unchanged under observation, found a difference of {largest:.1e}"
        )
    with evaluating(model), torch.no_grad(), torch.autocast(image.device.type, enabled=False):
        _check_batch(model, image, alone, tolerance)
    return sites


def _sketch(call: AttentionCall, weights: Tensor) -> Tensor:
    """The weights of the first image, (windows, heads, query, key), as a random mean over the keys."""
    windows = len(weights) // call.images
    mix = torch.rand(weights.shape[-1], generator=torch.Generator().manual_seed(0)).to(weights)
    return weights[:windows] @ mix


def _check_batch(model: Model, image: Images, alone: list[Tensor], tolerance: float) -> None:
    """Raise LensError where the weights of an image differ from `alone` when it is the first of two."""
    other = torch.rand(image.shape, generator=torch.Generator().manual_seed(2)).to(image)
    expected = iter(alone)

    def check(call: AttentionCall) -> None:
        before, after = next(expected, None), _sketch(call, call.weights())
        if before is None or not _is_same(before.float(), after.float(), tolerance):
            raise LensError(
                f"expected attention weights of an image that do not depend on the others of its batch, found others "
                f"in layer {call.site.layer} ({call.site.module}) of {model.alias}; batch x heads has the batch first"
            )

    with observing(model, check):
        model(torch.cat([image, other]))


def _is_same(before: Tensor, after: Tensor, tolerance: float) -> bool:
    """Whether two sketches are of the same image; layers far up amplify rounding, another image differs throughout."""
    if before.shape != after.shape:
        return False
    spread = (before - before.mean()).norm().item()
    return bool((before - after).norm().item() <= _OTHER * spread + tolerance * before.numel() ** 0.5)


def _check_call(call: AttentionCall, tolerance: float) -> None:
    weights, where = call.weights(), f"layer {call.site.layer} ({call.site.module})"
    if not torch.isfinite(weights).all():
        raise NonFiniteError(f"expected finite attention weights, found NaN or infinity in {where}")
    sums = weights.sum(-1)
    if ((sums - 1).abs() > tolerance).logical_and(sums != 0).any():  # 0: a fully masked row
        raise LensError(f"expected attention rows that sum to 1, found others in {where}")
    if call.inputs is None or call.output is None:
        return
    difference = (weights @ call.inputs.value - call.output).abs().max().item()
    if difference > tolerance * max(1.0, call.output.abs().max().item()):
        raise LensError(
            f"expected weights @ value to be the head's output, found a difference of {difference:.1e} in {where}"
        )


def require_one_softmax(model: Model, images: Images) -> None:
    """Raise UnsupportedError for a layer that adds or subtracts the weights of several softmaxes (DiffAttention).

    None of them is then what mixes the values, and their sum may be negative. Each is followed through the layer's
    forward pass, also as what it has mixed.
    """
    summed = _followed(model, images).summed
    if summed:
        raise UnsupportedError(
            f"expected values mixed by the weights of one softmax, found several, added or subtracted, in "
            f"{summed[0]} of {model.alias} (differential or gated attention)"
        )


def talking_heads(model: Model, images: Images) -> tuple[str, ...]:
    """The attention modules that mix the weights over heads after the softmax (CaiT): the weights are those before."""
    return tuple(dict.fromkeys(_followed(model, images).mapped))


def _followed(model: Model, images: Images) -> "_Follower":
    follower = _Follower()

    def enter(name: str, _arguments: object) -> None:
        follower.inside.append(name)

    def leave(_name: str, _arguments: object, _output: object) -> None:
        follower.inside.pop()
        follower.followed.clear()

    names = [part.module for part in model.anatomy.attention or ()]
    watched = watching(model.module, names, leave, before=enter, always=True)
    with evaluating(model), torch.no_grad(), watched, follower:
        model(images[:1])
    return follower


class _Follower(ScopedMode):
    """Follows results of softmax, and of the products that they enter, until two of them are added."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []  # the attention modules that are running
        self.followed: dict[int, tuple[Tensor, bool]] = {}  # by identity, held; whether they are weights
        self.summed: list[str] = []  # the modules in which two were added
        self.mapped: list[str] = []  # the modules in which a linear map was applied to weights

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute every call as it is."""
        args, kwargs = positional(func, args, kwargs)
        name = getattr(func, "__name__", "").strip("_")
        operands = [value for each in args for value in (each if isinstance(each, Sequence) else (each,))]
        known = [self.followed[id(value)][1] for value in operands if id(value) in self.followed]
        result = func(*args, **kwargs)
        if not self.inside:
            return result
        if name in _SUMS and len(known) > 1:
            self.summed.append(self.inside[-1])
        elif func in SOFTMAX or (known and name in _KEEPING):
            self._follow(result, weights=func in SOFTMAX or any(known))
        elif func is F.scaled_dot_product_attention or (known and name in _PRODUCTS):
            self._follow(result, weights=False)
        elif name in _MAPS and any(known):
            self.mapped.append(self.inside[-1])
        return result

    def _follow(self, result: Any, *, weights: bool) -> None:
        for each in result if isinstance(result, tuple | list) else (result,):
            self.followed[id(each)] = each, weights
