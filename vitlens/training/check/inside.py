"""One forward and one backward pass of a model, observed: calls, activations, gradients, the first layer's input."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.training.check.rows import LayerRow


@dataclass
class Pass:
    """What one pass showed. loss: nats; calls: modules with parameters of their own, by name, in the order of their
    first calls, with the root mean square of their outputs (None: no tensor); entering: the first one's input."""

    loss: float = float("nan")
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    calls: dict[str, float | None] = field(default_factory=dict)
    entering: Tensor | None = None


@contextmanager
def restored(model: Model) -> Iterator[None]:
    """Without gradients inside; on exit weights, buffers, modes, gradients and gradient flags as they were."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    before = {name: (each.requires_grad, each.grad) for name, each in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    for each in model.parameters():
        each.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in model.state_dict().items():
                value.copy_(state[name])
        for name, each in model.named_parameters():
            each.requires_grad_(before[name][0])
            each.grad = before[name][1]
        for name, module in model.named_modules():
            module.training = modes[name]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters without those of its children."""
    return dict(module.named_parameters(recurse=False))


def forward_and_backward(model: Model, images: Images, labels: Labels) -> Pass:
    """The loss, activations and first input of one pass; gradients are left in the parameters' .grad."""
    seen, handles = Pass(), []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if seen.entering is None and not seen.calls and inputs and isinstance(inputs[0], Tensor):
                seen.entering = inputs[0].detach()
            output = output[0] if isinstance(output, tuple) and output else output
            measured = isinstance(output, Tensor) and output.is_floating_point()
            seen.calls.setdefault(name, output.detach().float().square().mean().sqrt().item() if measured else None)

        return hook

    for name, module in model.module.named_modules():
        if name and own_parameters(module):
            handles.append(module.register_forward_hook(watch(name)))
    try:
        logits = model(images)
        loss = F.cross_entropy(logits.float(), labels)
        if loss.requires_grad:
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    seen.loss, seen.logits = loss.item(), logits.detach().float()
    return seen


def layer_rows(model: Model, seen: Pass) -> Iterator[LayerRow]:
    """A row for each module with parameters of its own, in the order of their calls; uncalled ones at the end.

    The parameters of the whole module itself, such as tokens and positions, have a row each.
    """
    order = {name: place for place, name in enumerate(seen.calls)}
    rows = []
    for name, module in model.module.named_modules():
        own = own_parameters(module)
        groups = {name: own} if name else {each: {each: parameter} for each, parameter in own.items()}
        for title, parameters in groups.items():
            if parameters:
                rows.append(_row(title, parameters, order.get(title), seen.calls.get(title)))
    last = len(order)
    yield from sorted(rows, key=lambda row: last if row.order is None else row.order)


def _row(title: str, parameters: dict[str, nn.Parameter], order: int | None, activation: float | None) -> LayerRow:
    gradients = [each.grad for each in parameters.values() if each.grad is not None]
    return LayerRow(
        name=title,
        order=order,
        parameters=sum(each.numel() for each in parameters.values()),
        activation=activation,
        gradient=_norm(gradients) if gradients else None,
        weight=_norm([each.detach() for each in parameters.values()]),
        trained=any(each.requires_grad for each in parameters.values()),
    )


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([each.float().norm() for each in tensors]).norm())


class DropoutCalls(TorchFunctionMode):
    """Inside, calls of dropout that set something to zero are recorded, with the module that is running."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.found: list[str] = []
        self._model, self._running, self._handles = model, [""], []  # type: ignore[var-annotated]

    def __enter__(self) -> "DropoutCalls":
        for name, module in self._model.module.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> Any:
        def hook(*_: object) -> None:
            self._running.append(name)

        return hook

    def _leave(self, *_: object) -> None:
        self._running.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _drops(function, args, kwargs):
            self.found.append(self._running[-1] or "the model's own forward pass")
        return function(*args, **kwargs)


def _drops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of torch sets activations to zero at random."""
    name = getattr(function, "__name__", "")
    if name == "scaled_dot_product_attention":
        rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return bool(rate)
    if name == "multi_head_attention_forward":
        return bool(kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0)) and kwargs.get("training", True)
    if "dropout" not in name:
        return False
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else name.startswith("dropout")))
    return bool(rate) and bool(training)
