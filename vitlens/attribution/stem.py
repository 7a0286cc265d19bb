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
from vitlens.models.specimen import Specimen
from vitlens.shapes import Images

_TOLERANCE = 1e-5  # of the largest logit

_names: WeakKeyDictionary[Specimen, str | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Stem:
    """The way into a specimen behind its first convolution; or, where name is None, at the pixels themselves."""

    specimen: Specimen
    name: str | None

    def values(self, images: Images) -> Tensor:
        """What comes in behind the stem, (batch, ...): affine in the images."""
        if self.name is None:
            return images
        found: Tensor = self._module()(self.specimen.prepare(images))
        return found

    def gradients(
        self, values: Float[Tensor, "copies *inner"], targets: Int[Tensor, " copies"], *, like: Images
    ) -> Float[Tensor, "copies *inner"]:
        """How each copy's target logit changes with what comes in; like: images of the size that they stand for."""
        with evaluating(self.specimen), torch.enable_grad():
            leaf = leaf_of(self.specimen, values)
            if self.name is None:
                logits = self.specimen(leaf)
            else:
                shown = like[:1].expand(len(leaf), -1, -1, -1)  # looked at for its size alone
                with _given(self._module(), leaf):
                    logits = self.specimen(shown)
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
        return self.specimen.model.get_submodule(self.name or "")


def leaf_of(specimen: Specimen, values: Tensor) -> Tensor:
    """A copy that gradients are taken with respect to, in the layout in which the specimen's convolutions are fast."""
    layout = torch.channels_last if specimen.anatomy.family == "cnn" and values.dim() == 4 else torch.preserve_format
    return values.detach().clone(memory_format=layout).requires_grad_()


def stem_of(specimen: Specimen) -> Stem:
    """The specimen's stem: its first convolution where the pixels come in through nothing else, as a trial shows."""
    if specimen not in _names:
        _names[specimen] = _first_convolution(specimen)
    return Stem(specimen, _names[specimen])


def _first_convolution(specimen: Specimen) -> str | None:
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
    one, other = torch.rand(2, 1, 3, *specimen.input_size, generator=generator).to(specimen.device)
    exact = torch.autocast(specimen.device.type, enabled=False)
    with ExitStack() as stack, torch.no_grad(), evaluating(specimen), exact:
        stack.callback(specimen.model.register_forward_pre_hook(remember).remove)
        for name, module in specimen.model.named_modules():
            if isinstance(module, nn.Conv2d):
                stack.callback(module.register_forward_pre_hook(compare(name)).remove)
        logits = specimen(one)
    if len(readers) != 1:
        return None
    stem = Stem(specimen, readers[0])
    with torch.no_grad(), evaluating(specimen), exact, _given(stem._module(), stem.values(one)):
        again = specimen(other)
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
