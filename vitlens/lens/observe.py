"""Observe: run a model once and hand each layer's attention to a reducer, after a self-check on the first image."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import evaluating
from vitlens.errors import LensError, NonFiniteError, UnsupportedError
from vitlens.lens.attention import SITES, AttentionMode, Tap, tapped
from vitlens.lens.call import AttentionCall
from vitlens.lens.site import Site
from vitlens.models.attention import SOFTMAX, positional
from vitlens.models.hooks import ScopedMode, once_per_model, watching
from vitlens.models.model import Model
from vitlens.models.recording import maps_heads
from vitlens.shapes import Images, Logits

Reducer = Callable[[AttentionCall], None]
_SUMS: Final = frozenset({"add", "sub", "rsub", "iadd", "isub", "radd", "lerp"})  # names without _ at either end
_MAPS: Final = frozenset({"linear", "conv2d"})
_PRODUCTS: Final = frozenset({"matmul", "bmm", "einsum"})
_SCALING: Final = frozenset({"dropout", "mul", "rmul", "imul", "div", "neg"})  # of what was mixed
_WRITING: Final = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
_VIEWS: Final = frozenset(  # after these the numbers are the same
    {
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "movedim",
        "swapaxes",
        "squeeze",
        "unsqueeze",
        "chunk",
        "split",
        "unbind",
        "getitem",
        "select",
        "narrow",
        "contiguous",
        "clone",
        "to",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
    }
)
_OTHER: Final = 0.1  # of the spread over heads and queries: a greater difference is not rounding
TOLERANCE: Final = 1e-4  # fp32: weights @ value against the output of the model's own kernel


def observe(model: Model, images: Images, reducer: Reducer, *, explicit: bool = False, graph: bool = False) -> Logits:
    """`vitlens.observe` of images on the model's device, which need not lie in [0, 1]."""
    survey_weights(model, images)
    with (
        evaluating(model),
        torch.enable_grad() if explicit or graph else torch.no_grad(),
        observing(model, reducer, explicit=explicit) as mode,
    ):
        logits: Tensor = model(images.detach().requires_grad_() if graph else images)
        mode.require_all_read()
    return logits


@contextmanager
def observing(model: Model | nn.Module, reducer: Reducer, *, explicit: bool = False) -> Iterator[AttentionMode]:
    """Inside, every attention call is handed to the reducer, in the order of the forward pass; no tensor is kept."""
    if isinstance(model, Model) and not model.anatomy.attention and model.anatomy.unread:
        raise UnsupportedError(f"expected softmax attention in {model.alias}, {model.anatomy.unread}")
    with tapped(model, Tap(read=lambda call, _scores: reducer(call), explicit=explicit)) as mode:
        yield mode


def survey(model: Model, images: Images) -> tuple[Site, ...]:
    """Return where a model computes attention, layer by layer; checked on the first of the images, once per model.

    The check: weights @ value is the output of the model's own kernel (1e-4), rows sum to 1, the weights of every
    attention module are observed, the logits are those of the unobserved model, and the weights of an image are the
    same with another image in its batch (else the first axis is not the batch). On the meta device, which has no
    values, only the third is checked. The tolerances of a module in bf16 or fp16 are those of its rounding. Raises
    LensError where a check fails.
    """
    return SITES.get(model, lambda: _surveyed(model, images[:1]))


@once_per_model
def survey_weights(model: Model, images: Images) -> tuple[Site, ...]:
    """As `survey`, where weights are read: raises UnsupportedError, too, unless they are what mixes the values."""
    sites = survey(model, images)
    require_one_softmax(model, images)
    return sites


def _surveyed(model: Model, image: Images) -> tuple[Site, ...]:
    tolerance = max(TOLERANCE, 4 * torch.finfo(model.mean.dtype).eps)
    alone: list[Tensor] = []

    outputs: list[AttentionCall] = []  # of windows

    def check(call: AttentionCall) -> None:
        if not image.is_meta:
            _check_call(call, tolerance)
            alone.append(_sketch(call))
            if call.output is not None and len(call.output) > call.images:
                outputs.append(call)

    projected: dict[str, Tensor] = {}  # by module, the heads' outputs concatenated
    taps = [
        Tap(modules={part.module}, joined=partial(_keep, projected, part.module))
        for part in model.anatomy.attention or ()
        if part.projection is not None and not image.is_meta
    ]
    with evaluating(model), torch.no_grad(), exact(image.device):
        with observing(model, check) as mode, tapped(model, *taps):
            observed = model(image)
            mode.require_all_read()
        sites = tuple(mode.sites)
        if image.is_meta:
            return sites
        for call in outputs:
            if call.site.module in projected:
                _check_windows(call, projected[call.site.module], tolerance)
        plain = model(image)
        if not torch.isfinite(plain).all():
            raise NonFiniteError(f"expected finite logits of {model.alias}, found NaN or infinity; check its weights")
        largest = (plain - observed).abs().max().item()
        if largest > tolerance * max(1.0, plain.abs().max().item()):
            raise LensError(
                f"expected the logits of {model.alias} unchanged under observation, found a difference of {largest:.1e}"
            )
        _check_batch(model, image, alone, tolerance)
    return sites


def exact(device: torch.device) -> AbstractContextManager[None]:
    """Inside, no mixed precision: tolerances are those of the model's own."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)  # no meta device


def _sketch(call: AttentionCall) -> Tensor:
    """Return the weights of the first image, (windows, heads, query, key), as a random mean over the keys."""
    weights = call.weights()
    mix = torch.rand(weights.shape[-1], generator=torch.Generator().manual_seed(0)).to(weights)
    return weights[: len(weights) // call.images] @ mix


def _check_batch(model: Model, image: Images, alone: list[Tensor], tolerance: float) -> None:
    """Raise LensError where the weights of an image differ from `alone` when it is the first of two.

    Layers far up amplify rounding; another image differs throughout.
    """
    other = torch.rand(image.shape, generator=torch.Generator().manual_seed(2)).to(image)
    expected = iter(alone)

    def check(call: AttentionCall) -> None:
        before = next(expected, None)
        after = _sketch(call).float()
        same = before is not None and before.shape == after.shape
        if before is not None and same:
            before = before.float()
            spread = (before - before.mean()).norm().item()
            same = (before - after).norm().item() <= _OTHER * spread + tolerance * before.numel() ** 0.5
        if not same:
            raise LensError(
                f"expected attention weights of an image that do not depend on the others of its batch, found others "
                f"in layer {call.site.layer} ({call.site.module}) of {model.alias}; batch x heads has the batch first"
            )

    with observing(model, check):
        model(torch.cat([image, other]))


def _check_call(call: AttentionCall, tolerance: float) -> None:
    weights = call.weights()
    where = f"layer {call.site.layer} ({call.site.module})"
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


def _keep(kept: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    kept[name] = tokens
    return tokens


def _check_windows(call: AttentionCall, projected: Tensor, tolerance: float) -> None:
    """Raise LensError where the output projection shows that what were taken for heads are windows."""
    assert call.output is not None  # of a fused kernel
    as_read = call.output.transpose(1, 2).flatten(2)
    windows_as_heads = call.output.unflatten(0, (call.images, -1)).permute(0, 2, 3, 1, 4).flatten(3)
    if not _holds_rows(projected, as_read, tolerance) and _holds_rows(projected, windows_as_heads, tolerance):
        site = call.site
        raise LensError(
            f"expected {site.heads} heads in layer {site.layer} ({site.module}), found that its output projection "
            f"reads {len(call.output) // call.images} heads of {site.heads} windows; put the windows before the heads"
        )


def _holds_rows(tokens: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if two tensors hold the same vectors along their last axes, in whichever order."""
    if tokens.shape[-1] != other.shape[-1] or tokens.numel() != other.numel():
        return False
    mix = torch.rand(tokens.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = [(each.detach().cpu().double().flatten(0, -2) @ mix).sort().values for each in (tokens, other)]
    largest = max(1.0, sums[0].abs().max().item())
    return bool((sums[0] - sums[1]).abs().max() <= tolerance * largest)


def require_one_softmax(model: Model, images: Images) -> None:
    """Raise UnsupportedError for a layer whose values are not mixed by the weights of one softmax.

    Some add or subtract the weights of several (DiffAttention), so that their sum may be negative; some change them
    first (the greatest ones, a gate, another norm). Each is followed through the layer's forward pass, also as what it
    has mixed.
    """
    follower = _followed(model, images)
    if follower.summed:
        raise UnsupportedError(
            f"expected values mixed by the weights of one softmax, found several, added or subtracted, in "
            f"{follower.summed[0]} of {model.alias} (differential or gated attention)"
        )
    changed = follower.changed_modules()
    if changed:
        raise UnsupportedError(
            f"expected values mixed by the weights of a softmax, found weights changed after it in {changed[0]} of "
            f"{model.alias} (the greatest ones, a gate, another norm); change the scores before the softmax instead"
        )


def require_special_first(model: Model) -> None:
    """Raise UnsupportedError for a model whose special tokens stand behind patches and cannot be moved before them."""
    if model.anatomy.attention and not model.anatomy.special_first:
        raise UnsupportedError(
            f"expected special tokens before the patches, found in {model.alias} that {model.anatomy.unread}"
        )


def talking_heads(model: Model, images: Images) -> tuple[str, ...]:
    """Return the attention modules that mix the weights over heads after the softmax (CaiT): the weights are those
    before."""
    return tuple(dict.fromkeys(_followed(model, images).mapped))


def _followed(model: Model, images: Images) -> "_Follower":
    follower = _Follower()

    def enter(name: str, _arguments: object) -> None:
        follower.enter(name)

    def leave(_name: str, _arguments: object, _output: object) -> None:
        follower.inside.pop()

    names = [part.module for part in model.anatomy.attention or ()]
    watched = watching(model.module, names, leave, before=enter, always=True)
    with evaluating(model), torch.no_grad(), watched, follower:
        model(images[:1])
    return follower


@dataclass(eq=False)
class _Softmax:
    """One softmax over the last axis in an attention module.

    is_used: whether its result has mixed values; is_read: whether anything was computed from it.
    """

    module: str
    is_used: bool = False
    is_read: bool = False


@dataclass(frozen=True, eq=False)
class _Followed:
    """A result of softmax, or what was computed from it.

    tensor: held, as it is found by its identity; softmax: None where that was not over the last axis, or was of a
    fused kernel; is_weights: whether it has not mixed values yet; is_changed, is_mapped: whether its values are others
    than the softmax's, or were mixed over heads.
    """

    tensor: Tensor
    softmax: _Softmax | None
    is_weights: bool
    is_changed: bool = False
    is_mapped: bool = False


class _Follower(ScopedMode):
    """Follows results of softmax, and of the products that they enter, until two of them are added."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []  # the attention modules that are running
        self.followed: dict[int, _Followed] = {}  # by identity
        self.softmaxes: list[_Softmax] = []
        self.fused: set[str] = set()  # the modules that call a fused kernel
        self.summed: list[str] = []  # the modules in which two were added
        self.mapped: list[str] = []  # the modules in which weights were mixed over heads
        self.changed: list[str] = []  # the modules in which changed weights have mixed values

    def enter(self, name: str) -> None:
        """Forget the results of the last attention module, and follow those of this one."""
        if not self.inside:
            self.followed.clear()
        self.inside.append(name)

    def changed_modules(self) -> tuple[str, ...]:
        """Return the modules in which values were mixed by other weights than a softmax's, or by none."""
        read = {softmax.module for softmax in self.softmaxes if softmax.is_used} | self.fused | set(self.mapped)
        unused = (each.module for each in self.softmaxes if each.is_read and each.module not in read)
        return tuple(dict.fromkeys((*self.changed, *unused)))

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute every call as it is."""
        args, kwargs = positional(func, args, kwargs)
        written = getattr(func, "__name__", "")
        name = written.strip("_")
        given = (*args, *kwargs.values())
        operands = [value for each in given for value in (each if isinstance(each, Sequence) else (each,))]
        tensors = [value for value in operands if isinstance(value, Tensor)]
        known = [self.followed[id(value)] for value in tensors if id(value) in self.followed]
        weights = next((each for each in known if each.is_weights), None)
        before = None
        if weights is not None and name not in _VIEWS:
            if weights.softmax is not None:
                weights.softmax.is_read = True
            is_special = written.startswith("__")
            in_place = written in _WRITING or (written.endswith("_") and not is_special)
            before = weights.tensor.clone() if in_place else weights.tensor
        result = func(*args, **kwargs)
        if func in SOFTMAX and self.inside:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self._begin(result, dim)
        elif func is F.scaled_dot_product_attention and self.inside:
            self.fused.add(self.inside[-1])
            self._follow(result, _Followed(result, None, is_weights=False))
        elif name in _SUMS and len(known) > 1 and self.inside:
            self.summed.append(self.inside[-1])
        elif known and name in _VIEWS:
            self._follow(result, weights or known[0])
        elif weights is not None and (
            name in _MAPS or (name in _PRODUCTS and maps_heads(weights.tensor, tensors, result))
        ):
            if self.inside:
                self.mapped.append(self.inside[-1])
            self._follow(result, replace(weights, is_mapped=True))
        elif known and name in _PRODUCTS:
            for each in known:
                self._use(each)
            self._follow(result, replace(known[0], is_weights=False))
        elif weights is not None and before is not None:
            after = weights.tensor if written == "__setitem__" else result
            if isinstance(after, Tensor) and after.shape == before.shape and after.is_floating_point():
                # tensors on the meta device, as of `vitlens models`, have shapes alone
                is_same = after.is_meta or torch.allclose(after, before.to(after.dtype), rtol=0.0, atol=TOLERANCE)
                self._follow(after, replace(weights, is_changed=weights.is_changed or not is_same))
        elif known and name in _SCALING:
            self._follow(result, known[0])
        return result

    def _begin(self, result: Tensor, dim: object) -> None:
        """Follow the result of a softmax."""
        softmax = None
        if dim in (-1, result.dim() - 1) and result.dim() >= 3 and result.shape[-1] > 1:
            softmax = _Softmax(self.inside[-1])
            self.softmaxes.append(softmax)
        self._follow(result, _Followed(result, softmax, is_weights=True))

    def _use(self, weights: _Followed) -> None:
        """Note that these weights have mixed values."""
        if weights.softmax is None or not weights.is_weights:
            return
        weights.softmax.is_used = True
        if weights.is_changed and not weights.is_mapped:
            self.changed.append(weights.softmax.module)

    def _follow(self, result: Any, like: _Followed) -> None:
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.followed[id(each)] = replace(like, tensor=each)
