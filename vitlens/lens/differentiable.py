"""Error messages for models without usable gradients: where they are cut off, and what still works.

A forward pass may spoil gradients in four ways:

- It switches them off (torch.no_grad around a frozen backbone).
- It cuts them off (detach, argmax).
- It hides them from autograd (a checkpoint with use_reentrant=True).
- It makes them zero (round, sign).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from vitlens.devices import evaluating
from vitlens.errors import LensError, UnsupportedError, lacks_memory
from vitlens.lens.trace import probe_images
from vitlens.models.hooks import Arguments, watching
from vitlens.models.memo import per_model
from vitlens.models.model import Model
from vitlens.models.nested import tensors_in

P = ParamSpec("P")
T = TypeVar("T")

WITHOUT_GRADIENTS: Final = (
    "methods without gradients work: attention, rollout, occlusion, rise, kernel-shap, "
    "eigencam, scorecam, ablate"
)
_OFF: Final = "torch.no_grad, inference_mode or a checkpoint with use_reentrant=True"
_CUT: Final = "detach, or an operation without a gradient"
# operations that are constant between their steps: their gradient is zero
_STEPS: Final = ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn")
_STEP_NAMES: Final = frozenset((*_STEPS, *(f"{name}_" for name in _STEPS)))


def needs_gradients(
    function: Callable[Concatenate[Model, P], T],
) -> Callable[Concatenate[Model, P], T]:
    """Decorate a function of a model to raise UnsupportedError with the reason autograd fails."""

    @wraps(function)
    def differentiated(model: Model, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with needing_gradients(model):
            return function(model, *args, **kwargs)

    return differentiated


@contextmanager
def needing_gradients(model: Model, *, instead: str = WITHOUT_GRADIENTS) -> Iterator[None]:
    """Replace errors of autograd by an UnsupportedError that names where the gradients end.

    instead: the part of the message that lists analyses without gradients.
    """
    try:
        yield
    except (RuntimeError, LensError) as error:
        if lacks_memory(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        if isinstance(error, CheckpointError):
            raise UnsupportedError(
                f"expected equal activations when {model.alias} computes them again for its "
                "gradient, found others; switch its gradient checkpointing off "
                "(set_grad_checkpointing(False) or gradient_checkpointing_disable())"
            ) from error
        if "modified by an inplace operation" in str(error):
            raise UnsupportedError(
                f"expected a forward of {model.alias} that autograd can differentiate, "
                "found a tensor changed in place after it was used; write the result to "
                f"a new tensor (x = x * 2, not x *= 2); {instead}"
            ) from error
        # torch has no derivative of an operation (floor_divide)
        if "is not implemented" in str(error):
            operation = (
                str(error).removeprefix("derivative for ").partition(" is not implemented")[0]
            )
            raise UnsupportedError(
                f"expected operations with a derivative in the forward of {model.alias}, "
                f"found {operation[:60]}, which has none; remove it from its forward; "
                f"{instead}"
            ) from error
        cause = cut_off(model)
        if not cause:
            raise
        raise UnsupportedError(
            f"expected a gradient inside {model.alias}, found none: {cause}; remove that "
            f"from its forward; {instead}"
        ) from error


@per_model
def cut_off(model: Model) -> str:
    """Return where the gradient of the logits with respect to the image is cut off, or "".

    Every module is watched in one forward pass. The first cause in forward order is returned. An
    input of whole numbers may be an index, so it is a cause only if there is no other.
    """
    causes = list[str]()
    index_causes = list[str]()
    # of the modules that run, the innermost last: True if a gradient enters the module
    entered = list[bool]()

    def before(name: str, values: Arguments) -> None:
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        traced = any(value.requires_grad for value in tensors)
        entered.append(traced and torch.is_grad_enabled())
        where = name or "the model"
        if tensors and not torch.is_grad_enabled():
            causes.append(f"gradients are switched off in {where} ({_OFF})")
        elif tensors and not traced:
            cause = f"the input of {where} is cut off from the image ({_CUT})"
            if any(value.is_floating_point() for value in tensors):
                causes.append(cause)
            else:
                index_causes.append(cause)

    def after(name: str, _values: Arguments, output: Any) -> None:
        traced = entered.pop()
        tensors = [value for value in tensors_in(output) if value.is_floating_point()]
        if traced and tensors and not any(value.requires_grad for value in tensors):
            causes.append(f"the output of {name or 'the model'} is cut off from the image ({_CUT})")

    names = [name for name, _ in model.module.named_modules()]
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    images = probe_images(model, 1).requires_grad_()
    # only gradients from the image count: a parameter would add them behind a cut
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        with (
            evaluating(model),
            torch.enable_grad(),
            watching(model.module, names, after, before=before, always=True),
        ):
            model(images)
    except RuntimeError:
        pass  # torch refuses an inference tensor, and `before` has recorded the cause already
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
    all_causes = [*causes, *index_causes]
    return all_causes[0] if all_causes else ""


def require_no_steps(
    model: Model, compute: Callable[[], T], gradients_of: Callable[[T], Sequence[Tensor | None]]
) -> T:
    """Return the value of `compute`, which differentiates a model.

    Raises UnsupportedError if a step function (round, sign) makes one of the gradients zero for
    all images. This is tested: with the gradient of the identity instead, it is not zero.

    compute: a function that computes a value from gradients of the model.
    gradients_of: a function that returns the gradients in that value.
    """
    result = compute()
    gradients = gradients_of(result)
    is_zero = [gradient is not None and not bool(gradient.any()) for gradient in gradients]
    if not any(is_zero) or not _has_steps(model):
        return result
    with _StepsAsIdentity(model) as steps:
        identity_gradients = gradients_of(compute())
    for was_zero, gradient in zip(is_zero, identity_gradients):
        if was_zero and gradient is not None and bool(gradient.any()):
            raise UnsupportedError(
                f"expected a gradient inside {model.alias}, found zero everywhere: "
                f"{steps.first} is constant between its steps; remove it from its "
                "forward, or let the gradient pass through (x + (x.round() - "
                f"x).detach()); {WITHOUT_GRADIENTS}"
            )
    return result


@per_model
def _has_steps(model: Model) -> bool:
    """Return True if a step function is applied to what depends on the image."""
    with evaluating(model), torch.enable_grad(), _StepsAsIdentity(model) as steps:
        model(probe_images(model, 1).requires_grad_())
    return bool(steps.first)


class _StepsAsIdentity(TorchFunctionMode):
    """A mode in which step functions have the gradient of the identity; values are unaltered.

    first: the first step function that was applied to a tensor with a gradient, with its module.
    running: the modules that are running, the innermost last.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.first = ""
        self.model = model
        self.running: list[str] = []
        self.watched = ExitStack()

    def __enter__(self) -> Self:
        names = [name for name, _ in self.model.module.named_modules()]
        self.watched.enter_context(
            watching(self.model.module, names, self._leave, before=self._begin, always=True)
        )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.watched.close()

    def _begin(self, name: str, _values: Arguments) -> None:
        self.running.append(name)

    def _leave(self, _name: str, _values: Arguments, _output: Any) -> None:
        self.running.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Give a step function the gradient of its input; pass other calls."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        value = args[0] if args else None
        is_step = name in _STEP_NAMES or kwargs.get("rounding_mode") is not None
        if not is_step or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if not isinstance(value, Tensor) or not value.requires_grad:
            return func(*args, **kwargs)
        module = self.running[-1] if self.running else ""
        self.first = self.first or f"{name.strip('_')} in {module or 'its forward'}"
        zero = value - value.detach()  # its value is 0, its gradient is that of the input
        result = func(*args, **kwargs)
        if name.endswith("_"):  # works in place
            return result.add_(zero)
        return result + zero
