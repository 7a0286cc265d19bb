"""The first convolution: linear in the pixels, so that along a straight path it need be run at the path's ends alone.

Behind it, copies of an image on the path are mixtures of what it puts out for the ends, and the gradient with respect
to the pixels is carried back through it once for all of them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.shapes import Images

_TOLERANCE = 1e-5  # of the largest logit

_names: WeakKeyDictionary[Model, str | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Stem:
    """The way into a model behind its first convolution; or, where name is None, at the pixels themselves."""

    model: Model
    name: str | None

    def values(self, images: Images) -> Tensor:
        """What comes in behind the stem, (batch, ...): affine in the images."""
        if self.name is None:
            return images
        found: Tensor = self._module()(self.model.prepare(images))
        return found

    def gradients(
        self, values: Float[Tensor, "copies *inner"], targets: Int[Tensor, " copies"], *, like: Images
    ) -> Float[Tensor, "copies *inner"]:
        """How each copy's target logit changes with what comes in; like: images of the size that they stand for."""
        with evaluating(self.model), torch.enable_grad():
            leaf = leaf_of(self.model, values)
            if self.name is None:
                logits = self.model(leaf)
            else:
                shown = like[:1].expand(len(leaf), -1, -1, -1)  # looked at for its size alone
                with _given(self._module(), leaf):
                    logits = self.model(shown)
            (gradient,) = torch.autograd.grad(logits.gather(1, targets[:, None]).sum(), leaf)
        return gradient

    def carried_back(self, gradient: Tensor, images: Images) -> Images:
        """A gradient with respect to what comes in as one with respect to the pixels."""
        if self.name is None:
            return gradient
        with torch.enable_grad():
            leaf = images.detach().clone().requires_grad_()
            (found,) = torch.autograd.grad(self.values(leaf), leaf, gradient)
        return found

    def _module(self) -> nn.Module:
        return self.model.module.get_submodule(self.name or "")


def leaf_of(model: Model, values: Tensor) -> Tensor:
    """A copy that gradients are taken with respect to, in the layout in which the model's convolutions are fast."""
    layout = torch.channels_last if model.anatomy.family == "cnn" and values.dim() == 4 else torch.preserve_format
    return values.detach().clone(memory_format=layout).requires_grad_()


def stem_of(model: Model) -> Stem:
    """The model's stem: its first convolution where the pixels come in through nothing else, as a trial shows."""
    if model not in _names:
        _names[model] = _first_convolution(model)
    return Stem(model, _names[model])


def _first_convolution(model: Model) -> str | None:
    prepared: list[Tensor] = []
    readers: list[str] = []

    def remember(_module: nn.Module, inputs: Any) -> None:
        prepared.append(inputs[0])

    def compare(name: str) -> Any:
        def hook(_module: nn.Module, inputs: Any) -> None:
            if inputs[0] is prepared[0]:
                readers.append(name)

        return hook

    generator = torch.Generator().manual_seed(0)
    one, other = torch.rand(2, 1, 3, *model.input_size, generator=generator).to(model.device)
    exact = torch.autocast(model.device.type, enabled=False)
    with ExitStack() as stack, torch.no_grad(), evaluating(model), exact:
        stack.callback(model.module.register_forward_pre_hook(remember).remove)
        for name, module in model.module.named_modules():
            if isinstance(module, nn.Conv2d):
                stack.callback(module.register_forward_pre_hook(compare(name)).remove)
        logits = model(one)
    if len(readers) != 1:
        return None
    stem = Stem(model, readers[0])
    with torch.no_grad(), evaluating(model), exact, _given(stem._module(), stem.values(one)):
        again = model(other)
    close = (again - logits).abs().max() <= _TOLERANCE * max(1.0, logits.abs().max().item())
    return readers[0] if close else None


@contextmanager
def _given(module: nn.Module, output: Tensor) -> Iterator[None]:
    """The module puts this out, whatever it reads, and computes nothing."""
    before = vars(module).get("forward")
    module.forward = lambda *_: output
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
