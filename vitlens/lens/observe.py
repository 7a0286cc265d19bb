"""Observe: run a model once and hand each layer's attention to a reducer, after a self-check on the
first image.
"""

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
from vitlens.lens.attention import SITES, AttentionMode, tapped
from vitlens.lens.call import AttentionCall
from vitlens.lens.site import Site
from vitlens.lens.tap import Tap
from vitlens.models.attention import SOFTMAX, positional
from vitlens.models.hooks import ScopedMode, watching
from vitlens.models.memo import once_per_model
from vitlens.models.model import Model
from vitlens.models.recording import maps_heads
from vitlens.shapes import Images, Logits

Reducer = Callable[[AttentionCall], None]
# names without _ at either end
_SUMS: Final = frozenset({"add", "sub", "rsub", "iadd", "isub", "radd", "lerp"})
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


def observe(
    model: Model, images: Images, reducer: Reducer, *, explicit: bool = False, graph: bool = False
) -> Logits:
    """Run `vitlens.observe` on images on the model's device, which need not lie in [0, 1]."""
    survey_weights(model, images)
    with (
        evaluating(model),
        torch.set_grad_enabled(explicit or graph),
        observing(model, reducer, explicit=explicit) as mode,
    ):
        if graph:
            images = images.detach().requires_grad_()
        logits: Tensor = model(images)
        mode.require_all_read()
    return logits


@contextmanager
def observing(
    model: Model | nn.Module, reducer: Reducer, *, explicit: bool = False
) -> Iterator[AttentionMode]:
    """Hand every attention call to the reducer, in the order of the forward pass.

    No tensor is kept.
    """
    if isinstance(model, Model) and not model.anatomy.attention and model.anatomy.unread:
        raise UnsupportedError(
            f"expected softmax attention in {model.alias}, {model.anatomy.unread}"
        )
    with tapped(model, Tap(read=lambda call, _scores: reducer(call), explicit=explicit)) as mode:
        yield mode


def survey(model: Model, images: Images) -> tuple[Site, ...]:
    """Return where a model computes attention, layer by layer.

    It is checked on the first of the images, once per model.

    The checks are:

    - weights @ value is the output of the model's kernel (1e-4), and rows sum to 1.
    - The weights of every attention module are observed.
    - The logits are those of the unobserved model.
    - The weights of an image are the same with another image in its batch (else the first axis is
      not the batch).

    On the meta device, which has no values, only the second is checked. The tolerances of a module
    in bf16 or fp16 are those of its rounding. Raises LensError where a check fails.
    """
    return SITES.get(model, lambda: _surveyed(model, images[:1]))


@once_per_model
def survey_weights(model: Model, images: Images) -> tuple[Site, ...]:
    """Return the sites of `survey` for analyses that read weights.

    Raises UnsupportedError, too, unless these weights mix the values.
    """
    sites = survey(model, images)
    require_one_softmax(model, images)
    return sites


def _surveyed(model: Model, image: Images) -> tuple[Site, ...]:
    tolerance = max(TOLERANCE, 4 * torch.finfo(model.mean.dtype).eps)
    sketches: list[Tensor] = []
    windowed_calls: list[AttentionCall] = []

    def check(call: AttentionCall) -> None:
        if image.is_meta:
            return
        _check_call(call, tolerance)
        sketches.append(_sketch(call))
        if call.output is not None and len(call.output) > call.images:
            windowed_calls.append(call)

    projected: dict[str, Tensor] = {}  # by module, the heads' outputs concatenated
    taps = []
    for part in model.anatomy.attention or ():
        if part.projection is not None and not image.is_meta:
            taps.append(Tap(modules={part.module}, joined=partial(_keep, projected, part.module)))
    with evaluating(model), torch.no_grad(), exact(image.device):
        with observing(model, check) as mode, tapped(model, *taps):
            observed = model(image)
            mode.require_all_read()
        sites = tuple(mode.sites)
        if image.is_meta:
            return sites
        for call in windowed_calls:
            if call.site.module in projected:
                _check_windows(call, projected[call.site.module], tolerance)
        plain = model(image)
        if not torch.isfinite(plain).all():
            raise NonFiniteError(
                f"expected finite logits of {model.alias}, found NaN or infinity; check its weights"
            )
        largest = (plain - observed).abs().max().item()
        if largest > tolerance * max(1.0, plain.abs().max().item()):
            raise LensError(
                f"expected the logits of {model.alias} unchanged under observation, found a "
                f"difference of {largest:.1e}"
            )
        _check_batch(model, image, sketches, tolerance)
    return sites


def exact(device: torch.device) -> AbstractContextManager[None]:
    """Switch mixed precision off: tolerances are those of the model's precision."""
    if device.type == "meta":  # which torch.autocast does not know
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _sketch(call: AttentionCall) -> Tensor:
    """Return the weights of the first image, (windows, heads, query, key), as a random mean over
    the keys.
    """
    weights = call.weights()
    mix = torch.rand(weights.shape[-1], generator=torch.Generator().manual_seed(0)).to(weights)
    return weights[: len(weights) // call.images] @ mix


def _check_batch(model: Model, image: Images, sketches: list[Tensor], tolerance: float) -> None:
    """Raise LensError where the weights of an image change when it is the first of two.

    sketches: the sketches of its weights without the other image, call by call.
    """
    other = torch.rand(image.shape, generator=torch.Generator().manual_seed(2)).to(image)
    expected = iter(sketches)

    def check(call: AttentionCall) -> None:
        single = next(expected, None)
        if single is None or not _are_close(single.float(), _sketch(call).float(), tolerance):
            raise LensError(
                "expected attention weights of an image that do not depend on the others of its "
                f"batch, found others in layer {call.site.layer} ({call.site.module}) of "
                f"{model.alias}; batch x heads has the batch first"
            )

    with observing(model, check):
        model(torch.cat([image, other]))


def _are_close(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Return True if two sketches are the same image's: upper layers amplify rounding, another
    image differs more.
    """
    if first.shape != second.shape:
        return False
    spread = (first - first.mean()).norm().item()
    difference = (first - second).norm().item()
    return bool(difference <= _OTHER * spread + tolerance * first.numel() ** 0.5)


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
            "expected weights @ value to be the head's output, found a difference of "
            f"{difference:.1e} in {where}"
        )


def _keep(tensors: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    tensors[name] = tokens
    return tokens


def _check_windows(call: AttentionCall, projected: Tensor, tolerance: float) -> None:
    """Raise LensError where the output projection shows that the presumed heads are windows."""
    assert call.output is not None  # of a fused kernel
    as_read = call.output.transpose(1, 2).flatten(2)
    windows_as_heads = call.output.unflatten(0, (call.images, -1)).permute(0, 2, 3, 1, 4).flatten(3)
    if not _holds_rows(projected, as_read, tolerance) and _holds_rows(
        projected, windows_as_heads, tolerance
    ):
        site = call.site
        raise LensError(
            f"expected {site.heads} heads in layer {site.layer} ({site.module}), found that its "
            f"output projection reads {len(call.output) // call.images} heads of {site.heads} "
            "windows; put the windows before the heads"
        )


def _holds_rows(tokens: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if two tensors hold the same vectors along their last axes, in whichever
    order."""
    if tokens.shape[-1] != other.shape[-1] or tokens.numel() != other.numel():
        return False
    mix = torch.rand(
        tokens.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    sums = _sorted_products(tokens, mix)
    other_sums = _sorted_products(other, mix)
    largest = max(1.0, sums.abs().max().item())
    return bool((sums - other_sums).abs().max() <= tolerance * largest)


def _sorted_products(tokens: Tensor, mix: Tensor) -> Tensor:
    return (tokens.detach().cpu().double().flatten(0, -2) @ mix).sort().values


def require_one_softmax(model: Model, images: Images) -> None:
    """Raise UnsupportedError for a layer whose values are not mixed by the weights of one softmax.

    Some add or subtract the weights of several (DiffAttention), so that their sum may be negative;
    some change them first (the greatest ones, a gate, another norm). Each is followed through the
    layer's forward pass, also as what it has mixed.
    """
    follower = _followed(model, images)
    if follower.summed:
        raise UnsupportedError(
            "expected values mixed by the weights of one softmax, found several, added or "
            f"subtracted, in {follower.summed[0]} of {model.alias} (differential or gated "
            "attention)"
        )
    changed = follower.changed_modules()
    if changed:
        raise UnsupportedError(
            "expected values mixed by the weights of a softmax, found weights changed after it in "
            f"{changed[0]} of {model.alias} (the greatest ones, a gate, another norm); change the "
            "scores before the softmax instead"
        )


def require_special_first(model: Model) -> None:
    """Raise UnsupportedError for a model whose special tokens stand behind patches and cannot be
    moved before them.
    """
    if model.anatomy.attention and not model.anatomy.special_first:
        raise UnsupportedError(
            f"expected special tokens before the patches, found in {model.alias} that "
            f"{model.anatomy.unread}"
        )


def talking_heads(model: Model, images: Images) -> tuple[str, ...]:
    """Return the attention modules that mix the weights over heads after the softmax (CaiT).

    The observed weights are those before.
    """
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

    tensor: held, as it is found by its identity.
    softmax: None where that was not over the last axis, or was of a fused kernel.
    is_weights: whether it has not mixed values yet.
    is_changed, is_mapped: whether its values are others than the softmax's, or were mixed over
        heads.
    """

    tensor: Tensor
    softmax: _Softmax | None
    is_weights: bool
    is_changed: bool = False
    is_mapped: bool = False


class _Follower(ScopedMode):
    """Follows results of softmax, and of the products that they enter, until two of them are
    added."""

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
        """Return the modules in which values were mixed by other weights than a softmax's, or by
        none.
        """
        mixing = (
            {softmax.module for softmax in self.softmaxes if softmax.is_used}
            | self.fused
            | set(self.mapped)
        )
        unused = [
            softmax.module
            for softmax in self.softmaxes
            if softmax.is_read and softmax.module not in mixing
        ]
        return tuple(dict.fromkeys(self.changed + unused))

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute every call unchanged, and follow its result."""
        args, kwargs = positional(func, args, kwargs)
        full_name = getattr(func, "__name__", "")
        name = full_name.strip("_")
        tensors = _operands((*args, *kwargs.values()))
        followed = [self.followed[id(tensor)] for tensor in tensors if id(tensor) in self.followed]
        weights = _first_weights(followed)
        before = None
        if weights is not None and name not in _VIEWS:
            if weights.softmax is not None:
                weights.softmax.is_read = True
            is_special = full_name.startswith("__")
            in_place = full_name in _WRITING or (full_name.endswith("_") and not is_special)
            before = weights.tensor.clone() if in_place else weights.tensor
        result = func(*args, **kwargs)
        if func in SOFTMAX and self.inside:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            self._begin(result, dim)
        elif func is F.scaled_dot_product_attention and self.inside:
            self.fused.add(self.inside[-1])
            self._follow(result, _Followed(result, None, is_weights=False))
        elif name in _SUMS and len(followed) > 1 and self.inside:
            self.summed.append(self.inside[-1])
        elif followed and name in _VIEWS:
            self._follow(result, weights or followed[0])
        elif weights is not None and _maps_weights(name, weights.tensor, tensors, result):
            if self.inside:
                self.mapped.append(self.inside[-1])
            self._follow(result, replace(weights, is_mapped=True))
        elif followed and name in _PRODUCTS:
            for operand in followed:
                self._use(operand)
            self._follow(result, replace(followed[0], is_weights=False))
        elif weights is not None and before is not None:
            after = weights.tensor if full_name == "__setitem__" else result
            self._compare(weights, before, after)
        elif followed and name in _SCALING:
            self._follow(result, followed[0])
        return result

    def _compare(self, weights: _Followed, before: Tensor, after: Any) -> None:
        """Follow weights after an operation, and note whether it changed their values."""
        if (
            not isinstance(after, Tensor)
            or after.shape != before.shape
            or not after.is_floating_point()
        ):
            return
        # tensors on the meta device, as of `vitlens models`, have only shapes
        is_same = after.is_meta or torch.allclose(
            after, before.to(after.dtype), rtol=0.0, atol=TOLERANCE
        )
        self._follow(after, replace(weights, is_changed=weights.is_changed or not is_same))

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
        results = result if isinstance(result, tuple | list) else (result,)
        for tensor in results:
            if isinstance(tensor, Tensor):
                self.followed[id(tensor)] = replace(like, tensor=tensor)


def _operands(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among a call's arguments, also those in sequences."""
    tensors = []
    for value in values:
        members = value if isinstance(value, Sequence) else (value,)
        tensors += [member for member in members if isinstance(member, Tensor)]
    return tensors


def _first_weights(followed: Sequence[_Followed]) -> _Followed | None:
    for operand in followed:
        if operand.is_weights:
            return operand
    return None


def _maps_weights(name: str, weights: Tensor, tensors: list[Tensor], result: Any) -> bool:
    """Return True if an operation maps the weights linearly, over their heads or otherwise, rather
    than uses them.
    """
    return name in _MAPS or (name in _PRODUCTS and maps_heads(weights, tensors, result))
