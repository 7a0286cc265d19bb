"""Whether a layer mixes the values by the weights of one softmax, or by a sum or difference of several."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.models.attention import SOFTMAX, positional
from vitlens.models.hooks import ScopedMode, watching
from vitlens.models.model import Model
from vitlens.shapes import Images

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
