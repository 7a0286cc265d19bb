"""What a method costs, counted in forward passes of the model."""

from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels

_FORWARD: Final = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD: Final = f"{_FORWARD}_backward"
_LINEAR: Final = "_linear_pointwise"


def forward_equivalents(model: Model, images: Images, targets: Labels, explain: Explain) -> float:
    """The cost of a method's matrix products and convolutions, in forward passes of these images.

    Backward passes are counted by their operations. Other operations of a method (a blur, say) are counted only if they
    are matrix products or convolutions.
    """

    def forward() -> None:
        with torch.no_grad(), evaluating(model):
            model(images)

    return _flops(lambda: explain(model, images, targets)) / max(1, _flops(forward))


class _Count(TorchDispatchMode):
    """Counts the floating-point operations of everything computed inside, by torch's own formulas.

    torch's FlopCounterMode also tracks modules, with hooks that do not work with torch.autograd.grad.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.formulas = {**flop_registry, **_cpu_attention(), **_cpu_linear()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a call, by its formula or decomposed, and execute it."""
        kwargs = kwargs or {}
        formula = self.formulas.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out


def _flops(work: Callable[[], object]) -> int:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused kernel cannot be counted
    try:
        with _Count() as counter:
            work()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return int(counter.total)


def _cpu_attention() -> dict[Any, Callable[..., int]]:
    """Formulas for fused attention on the CPU; torch has only those for the GPU."""
    known: dict[Any, Callable[..., int]] = {}
    if hasattr(torch.ops.aten, _FORWARD):
        known[getattr(torch.ops.aten, _FORWARD)] = lambda query, key, value, *_, **__: _products(query, key, value, 1.0)
    if hasattr(torch.ops.aten, _BACKWARD):  # five products where the forward has two
        known[getattr(torch.ops.aten, _BACKWARD)] = lambda _grad, query, key, value, *_, **__: _products(
            query, key, value, 2.5
        )
    return known


def _cpu_linear() -> dict[Any, Callable[..., int]]:
    """A formula for oneDNN's linear layer (lens/quick_passes.py), which torch does not have."""
    if not hasattr(torch.ops.mkldnn, _LINEAR):
        return {}
    return {getattr(torch.ops.mkldnn, _LINEAR): lambda tokens, weight, *_, **__: 2 * tokens.numel() * weight.shape[0]}


def _products(query: Any, key: Any, value: Any, times: float) -> int:
    *leading, queries, head_dim = query.shape
    return int(times * 2 * prod(leading) * queries * key.shape[-2] * (head_dim + value.shape[-1]))
