"""Models with other code than their names say: subclasses, hooks, forwards, adapters.

Quicker computations give what full forward passes give.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.overrides import TorchFunctionMode

import vitlens
from tests.kit.marks import slow_if
from tests.kit.tiny import images, ours, timm_model
from vitlens import Model

MODELS: dict[str, Callable[[], Model]] = {
    "ours": ours,
    "timm": lambda: timm_model("vit_tiny_patch16_224"),
}


def mixed(tokens: Tensor) -> Tensor:
    return 1.5 * tokens - tokens.mean(1, keepdim=True)


def with_forward(
    module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Give the module a subclass of its class, of the same name, with another forward."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": wrap(kind.forward)})


def after(change: Callable[[Tensor], Tensor]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda forward: lambda self, *args, **kwargs: change(forward(self, *args, **kwargs))


def activation_of(block: Any) -> nn.Module:
    return getattr(block.mlp, "act", None) or block.mlp.activation


def adapted(linear: nn.Linear) -> None:
    """Add a rank-1 part by a subclass of nn.Linear whose weight is not all that it computes."""
    down = torch.linspace(-1, 1, linear.in_features)
    up = torch.linspace(1, -0.5, linear.out_features)
    with_forward(
        linear, lambda forward: lambda self, x: forward(self, x) + (x @ down).unsqueeze(-1) * up
    )


def normed(linear: nn.Linear, way: Callable[[nn.Module], nn.Module]) -> None:
    """Compute the weight in every pass from a factor that changes afterwards."""
    way(linear)
    with torch.no_grad():
        factor = next(
            value for name, value in linear.named_parameters() if name.endswith(("_g", "original0"))
        )
        factor.mul_(torch.linspace(0.5, 2, len(factor)).view_as(factor))


def dropped(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return output.relu()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "class of the MLP": lambda block: with_forward(block.mlp, after(mixed)),
    "class of the attention": lambda block: with_forward(block.attn, after(mixed)),
    "class of the block": lambda block: with_forward(block, after(mixed)),
    "class of the activation": lambda block: with_forward(
        activation_of(block), after(torch.square)
    ),
    "adapter of the MLP": lambda block: adapted(block.mlp.fc1),
    "adapter of the queries": lambda block: adapted(block.attn.qkv),
    "adapter of the projection": lambda block: adapted(block.attn.proj),
    "hook of the MLP": lambda block: block.mlp.register_forward_hook(
        lambda _m, _a, output: mixed(output)
    ),
    "hook of the activation": lambda block: activation_of(block).register_forward_hook(dropped),
    "hook of the attention": lambda block: block.attn.register_forward_hook(
        lambda _m, _a, output: mixed(output)
    ),
    "hook of the projection": lambda block: block.attn.proj.register_forward_hook(dropped),
    "hook of the queries": lambda block: block.attn.qkv.register_forward_hook(
        lambda _m, _a, output: mixed(output)
    ),
    "hook of the block": lambda block: block.register_forward_hook(
        lambda _m, _a, output: mixed(output)
    ),
    "hook before the MLP's layer": lambda block: block.mlp.fc1.register_forward_pre_hook(
        lambda _m, args: mixed(*args)
    ),
    "hook before the attention": lambda block: block.attn.register_forward_pre_hook(
        lambda _m, args: mixed(*args)
    ),
    "hook before the block": lambda block: block.register_forward_pre_hook(
        lambda _m, args: mixed(*args)
    ),
    "forward of the MLP": lambda block: setattr(
        block.mlp, "forward", lambda x, f=block.mlp.forward: mixed(f(x))
    ),
    "forward of the block": lambda block: setattr(
        block, "forward", lambda x, f=block.forward: mixed(f(x))
    ),
    "parametrization of the MLP": lambda block: normed(block.mlp.fc1, parametrizations.weight_norm),
    "parametrization of the queries": lambda block: normed(
        block.attn.qkv, parametrizations.weight_norm
    ),
    "weight norm of the MLP": lambda block: normed(block.mlp.fc1, weight_norm),
    "weight norm of the queries": lambda block: normed(block.attn.qkv, weight_norm),
    "pruned weights": lambda block: prune.l1_unstructured(block.attn.qkv, "weight", amount=0.5),
}


@torch.no_grad()
def occluded(model: Model, batch: Tensor, targets: Tensor) -> Tensor:
    """Compute occlusion by full passes: the fall of the logit with a patch of the mean colour."""
    rows, columns = model.layout.grid
    mean = batch.mean((2, 3), keepdim=True).expand_as(batch)
    falls = []
    clean = model(batch)
    for patch in range(rows * columns):
        chosen = torch.zeros(1, 1, rows, columns)
        chosen.view(-1)[patch] = 1
        large = F.interpolate(chosen, size=model.input_size) > 0.5
        falls.append((clean - model(torch.where(large, mean, batch))).gather(1, targets[:, None]))
    return torch.cat(falls, 1).view(-1, rows, columns)


@torch.no_grad()
def ablated(model: Model, batch: Tensor, labels: Tensor) -> Tensor:
    """Return the rise of the loss where a head is zero, by full forward passes."""
    clean = F.cross_entropy(model(batch), labels)
    rises = torch.zeros(2, 2)
    for layer in range(2):
        for head in range(2):
            with vitlens.intervene(model, {f"blocks.{layer}.head.{head}": "zero"}):
                rises[layer, head] = F.cross_entropy(model(batch), labels) - clean
    return rises


def check(model: Model) -> None:
    batch = images(model.input_size, batch=3)
    labels = torch.tensor([0, 1, 2])
    maps = vitlens.explain(model, batch, method="occlusion", targets=labels)
    torch.testing.assert_close(maps, occluded(model, batch, labels), atol=2e-5, rtol=1e-3)
    rises = vitlens.ablate(model, batch, labels, replace="zero").delta_loss.float()
    torch.testing.assert_close(rises, ablated(model, batch, labels), atol=2e-6, rtol=1e-3)


def every_change() -> list[object]:
    """Return every change in both blocks of both models; three of four are slow."""
    places = [(1, "ours"), (1, "timm"), (0, "ours"), (0, "timm")]
    parameters = []
    for number, change in enumerate(CHANGES):
        for turn, place in enumerate(places):
            parameters.append(slow_if(number % 4 != turn, change, *place))
    return parameters


# of torch: some models still have it
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("change", "layer", "name"), every_change())
def test_other_code_of_a_block_is_what_runs(change, layer, name):
    """Also where it comes after the model was used."""
    model = MODELS[name]()
    batch = images(model.input_size, batch=3)
    before = vitlens.explain(model, batch, method="occlusion", targets=torch.tensor([0, 1, 2]))
    vitlens.ablate(model, batch, torch.tensor([0, 1, 2]), replace="zero")
    CHANGES[change](model.module.blocks[layer])
    check(model)
    assert not torch.allclose(before, occluded(model, batch, torch.tensor([0, 1, 2])), rtol=1e-2)


class ReluMode(TorchFunctionMode):
    """In place of every GELU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return F.relu(args[0]) if func is F.gelu else func(*args, **(kwargs or {}))


@contextmanager
def hooked_everywhere() -> Iterator[None]:
    def hook(module: nn.Module, _args: object, output: Any) -> Any:
        return output.relu() if isinstance(module, nn.GELU) else None

    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("context", [ReluMode, hooked_everywhere, nullcontext])
def test_what_sees_every_module_or_function_of_torch_is_not_passed_over(context):
    model = ours()
    check(model)
    with context():
        check(model)


def test_a_first_convolution_that_is_not_affine_is_no_stem():
    """Integrated gradients go from pixel to pixel, not between what an activation makes of them."""

    class Rectified(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    torch.manual_seed(0)
    layers = Rectified(3, 6, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4)
    net = nn.Sequential(*layers).eval()
    model = vitlens.wrap(net, image_size=12, mean=(0.5,) * 3, std=(0.1,) * 3)
    batch = images((12, 12))
    targets = torch.tensor([0, 1])
    maps = vitlens.explain(model, batch, method="integrated-gradients", targets=targets, steps=200)
    path = (torch.arange(200) + 0.5).div(200).view(-1, 1, 1, 1, 1)
    leaf = (path * batch).flatten(0, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(
        model(leaf).gather(1, targets.repeat(200)[:, None]).sum(), leaf
    )
    expected = (batch * gradient.unflatten(0, (200, -1)).mean(0)).sum(1)
    torch.testing.assert_close(maps, expected, atol=2e-3, rtol=0.05)
