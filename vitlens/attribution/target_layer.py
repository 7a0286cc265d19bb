"""The target layer of class activation maps: the last at which each patch still contributes to the logit separately.

For a ViT it is the module whose output the last block's attention reads (norm1): where the classifier reads CLS, the
gradient at the patches of the last block's output is exactly 0. For a CNN it is the last map with more than one cell,
before the pooling. Both are found by observing one forward pass, which also covers post-norm blocks, registers and
grids of any shape.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.layout import TokenLayout
from vitlens.models.memo import per_model
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits

ChannelMaps = Float[Tensor, "batch channels rows columns"]


@dataclass(frozen=True)
class TargetLayer:
    """module: name, within `Model.module`, of the module whose output is used; layout: of its tokens, None where its
    output is a map; channel_axis: the axis of the output that holds the channels."""

    module: str
    layout: TokenLayout | None
    channel_axis: int

    @property
    def is_map(self) -> bool:
        """Whether the output is a map as a convolution gives it, (batch, channels, rows, columns)."""
        return self.layout is None and self.channel_axis == 1

    def as_maps(self, output: Tensor) -> ChannelMaps:
        """The module's output as one map per channel; prefix tokens have no position in the image and are dropped."""
        channels = output.movedim(self.channel_axis, 1)
        return channels if self.layout is None else self.layout.as_map(channels)


@dataclass(frozen=True)
class LayerGradients:
    """logits (batch, classes); activations: of the target layer; gradients: of each image's target logit with respect
    to them."""

    logits: Logits
    activations: ChannelMaps
    gradients: ChannelMaps


@per_model
def target_layer(model: Model) -> TargetLayer:
    """The target layer of this model.

    Raises UnsupportedError for a model that has neither one sequence of tokens nor a map before its pooling.
    """
    layout = model.anatomy.layout
    layer = _map_layer(model) if layout is None else _token_layer(model, layout)
    if layer is None:
        raise UnsupportedError(
            f"expected tokens of patches, or a map before the pooling, found neither in {model.alias} "
            f"({model.anatomy.family}); try --method saliency or occlusion"
        )
    return layer


def layer_gradients(model: Model, images: Images, targets: Labels) -> LayerGradients:
    """Activations and gradients at the target layer, from one forward pass with gradients from that layer on.

    Below the layer no graph is kept and no backward pass runs; no parameter gets a gradient.
    """
    layer, leaves = target_layer(model), []

    def start_graph(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        torch.set_grad_enabled(True)  # the no_grad around the pass restores the mode
        leaves.append(output.detach().clone().requires_grad_())
        return leaves[-1].clone()  # an in-place ReLU after the layer must not change the leaf

    with evaluating(model), torch.no_grad():
        with hooked(model.module.get_submodule(layer.module), start_graph):
            logits = model(images)
        total = logits.gather(1, targets[:, None]).sum()
        (gradient,) = torch.autograd.grad(total, leaves[-1])
    return LayerGradients(logits.detach(), layer.as_maps(leaves[-1].detach()), layer.as_maps(gradient))


def layer_output(model: Model, images: Images) -> tuple[Logits, Tensor]:
    """Logits, and the output of the target layer's module, without gradients."""
    layer, outputs = target_layer(model), []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs.append(output.clone())

    with evaluating(model), torch.no_grad(), hooked(model.module.get_submodule(layer.module), keep):
        logits = model(images)
    return logits, outputs[-1]


@contextmanager
def hooked(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """The module with a forward hook, which is removed on exit."""
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class _ObservedPass:
    """outputs: of every module, by name, in the order of computation; attention_inputs: attention module -> the module
    that computed the tokens that it reads (None where none did), and these tokens."""

    outputs: list[tuple[str, Tensor]]
    attention_inputs: dict[str, tuple[str | None, Tensor]]


def _observe(model: Model) -> _ObservedPass:
    """One forward pass of a black image."""
    observed = _ObservedPass([], {})

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                observed.outputs.append((name, output))
            for attention, (_, tokens) in observed.attention_inputs.items():  # attention that norms its input itself
                own = name.startswith(f"{attention}.") and "norm" in type(module).__name__.lower()
                if own and inputs and inputs[0] is tokens and isinstance(output, Tensor):
                    observed.attention_inputs[attention] = (name, output)

        return hook

    def find_source(name: str) -> Any:
        def hook(_module: nn.Module, inputs: Any, named: Any) -> None:
            tokens = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
            source = next((module for module, output in reversed(observed.outputs) if output is tokens), None)
            if tokens is not None:
                observed.attention_inputs[name] = (source, tokens)

        return hook

    black = torch.zeros(1, 3, *model.input_size, device=model.device)
    with ExitStack() as stack:
        for name, module in model.module.named_modules():
            if name:
                stack.callback(module.register_forward_hook(keep(name)).remove)
        for name in model.anatomy.attention_modules:
            module = model.module.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(find_source(name), with_kwargs=True).remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        model(black)
    return observed


def _token_layer(model: Model, layout: TokenLayout) -> TargetLayer | None:
    """The module whose output the last block's attention reads; the last block itself where no block has attention."""
    observed, blocks = _observe(model), model.anatomy.blocks
    for name, (source, tokens) in reversed(observed.attention_inputs.items()):
        # a pooling query (SigLIP) or a late CLS (CaiT) comes after the last block over these tokens
        alone = not blocks or any(name == block or name.rpartition(".")[0] == block for block in blocks)
        if source is not None and alone and tokens.dim() == 3 and tokens.shape[1] == layout.tokens:
            return TargetLayer(source, layout, channel_axis=2)
    if not blocks or model.anatomy.attention_modules:
        return None
    return TargetLayer(blocks[-1], layout, channel_axis=2)


def _map_layer(model: Model) -> TargetLayer | None:
    """The last map of more than one cell; of a windowed model the last LayerNorm's (Swin's maps are channels-last)."""
    for name, output in reversed(_observe(model).outputs):
        if output.dim() != 4:
            continue
        if model.anatomy.family == "windowed":
            module = model.module.get_submodule(name)
            if isinstance(module, nn.LayerNorm):
                return TargetLayer(name, None, channel_axis=3 if output.shape[3] == module.normalized_shape[0] else 1)
        elif model.anatomy.family == "cnn" and output.shape[2] * output.shape[3] > 1:
            return TargetLayer(name, None, channel_axis=1)
    return None
