"""Where a class activation map is read: the last place at which every patch has a part of its own in the logit.

Of a ViT that is what the last block's attention reads, its norm1: of a model whose classifier reads CLS, the patches'
gradient at the last block's output is exactly 0. Of a CNN it is the last map with more than one cell, before the
pooling. Both are found by watching one pass, so that post-norm blocks, registers and grids of any shape come out right.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.layout import TokenLayout
from vitlens.models.anatomy import attention_modules
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits

ChannelMaps = Float[Tensor, "batch channels rows columns"]

_places: "WeakKeyDictionary[Model, Place]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Place:
    """module: name, within the model's model, of the module whose output is read; layout: of its tokens, None where
    it puts out a map; channel_axis: the axis of the output that holds the channels."""

    module: str
    layout: TokenLayout | None
    channel_axis: int

    @property
    def is_map(self) -> bool:
        """Whether the module puts out maps as a convolution does, (batch, channels, rows, columns)."""
        return self.layout is None and self.channel_axis == 1

    def as_maps(self, output: Tensor) -> ChannelMaps:
        """The module's output as one map a channel; prefix tokens have no place in the image and are dropped."""
        channels = output.movedim(self.channel_axis, 1)
        return channels if self.layout is None else self.layout.as_map(channels)


@dataclass(frozen=True)
class Reading:
    """logits (batch, classes); activations: at the place; gradients: of each image's target logit with respect to
    them."""

    logits: Logits
    activations: ChannelMaps
    gradients: ChannelMaps


def cam_place(model: Model) -> Place:
    """Where the maps of this model are read; looked for once and remembered.

    Raises UnsupportedError for a model that has neither one sequence of tokens nor a map before its pooling.
    """
    if model not in _places:
        layout = model.anatomy.layout
        found = _map_place(model) if layout is None else _token_place(model, layout)
        if found is None:
            raise UnsupportedError(
                f"expected tokens of patches, or a map before the pooling, found neither in {model.alias} "
                f"({model.anatomy.family}); try --method saliency or occlusion"
            )
        _places[model] = found
    return _places[model]


def read(model: Model, images: Images, targets: Labels) -> Reading:
    """Activations and gradients at the model's place, from one forward pass whose upper part is differentiated.

    Below the place nothing is kept and nothing runs backward; no parameter gets a gradient.
    """
    place, leaves = cam_place(model), []

    def begin(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        torch.set_grad_enabled(True)  # from here on; the no_grad around the pass puts it back
        leaves.append(output.detach().clone().requires_grad_())
        return leaves[-1].clone()  # an in-place ReLU that follows must not reach the leaf

    with evaluating(model), torch.no_grad():
        with hooked(model.module.get_submodule(place.module), begin):
            logits = model(images)
        total = logits.gather(1, targets[:, None]).sum()
        (gradient,) = torch.autograd.grad(total, leaves[-1])
    return Reading(logits.detach(), place.as_maps(leaves[-1].detach()), place.as_maps(gradient))


def read_output(model: Model, images: Images) -> tuple[Logits, Tensor]:
    """Logits, and what the module at the model's place puts out, without gradients."""
    place, outputs = cam_place(model), []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs.append(output.clone())

    with evaluating(model), torch.no_grad(), hooked(model.module.get_submodule(place.module), keep):
        logits = model(images)
    return logits, outputs[-1]


@contextmanager
def hooked(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """The module with a forward hook, which is taken off on exit."""
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class _Seen:
    """made: each module's output, in the order in which they were made; sources: attention module -> the module that
    made the tokens that it reads, and these."""

    made: list[tuple[str, Tensor]]
    sources: dict[str, tuple[str, Tensor]]


def _watch(model: Model) -> _Seen:
    """One pass of a blank image."""
    seen = _Seen([], {})

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.made.append((name, output))

        return hook

    def find_source(name: str) -> Any:
        def hook(_module: nn.Module, inputs: Any, named: Any) -> None:
            tokens = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
            source = next((maker for maker, output in reversed(seen.made) if output is tokens), None)
            if source is not None and tokens is not None:
                seen.sources[name] = (source, tokens)

        return hook

    blank = torch.zeros(1, 3, *model.input_size, device=model.device)
    with ExitStack() as stack:
        for name, module in model.module.named_modules():
            if name:
                stack.callback(module.register_forward_hook(keep(name)).remove)
        for name in attention_modules(model.module):
            module = model.module.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(find_source(name), with_kwargs=True).remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        model(blank)
    return seen


def _token_place(model: Model, layout: TokenLayout) -> Place | None:
    """What the last block's attention reads; where no block has attention, what the last block puts out."""
    seen, blocks = _watch(model), model.anatomy.blocks
    for name, (source, tokens) in reversed(seen.sources.items()):
        # a pooling query (SigLIP) or a late CLS (CaiT) comes after the last block over these tokens
        if name.rpartition(".")[0] in blocks and tokens.dim() == 3 and tokens.shape[1] == layout.tokens:
            return Place(source, layout, channel_axis=2)
    if not blocks or next(attention_modules(model.module), None) is not None:
        return None
    return Place(blocks[-1], layout, channel_axis=2)


def _map_place(model: Model) -> Place | None:
    """The last map of more than one cell; of windows, the last that a LayerNorm made (Swin's channels stand last)."""
    for name, output in reversed(_watch(model).made):
        if output.dim() != 4:
            continue
        if model.anatomy.family == "windowed":
            module = model.module.get_submodule(name)
            if isinstance(module, nn.LayerNorm):
                return Place(name, None, channel_axis=3 if output.shape[3] == module.normalized_shape[0] else 1)
        elif model.anatomy.family == "cnn" and output.shape[2] * output.shape[3] > 1:
            return Place(name, None, channel_axis=1)
    return None
