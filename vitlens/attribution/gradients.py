"""Attributions from the gradient of the target's logit with respect to the pixels.

Maps are (batch, height, width). Pixels are the model's inputs in [0, 1]: the gradient includes the
normalisation, and the resizing where there is one.

Integrated gradients save passes through a model's first convolution, its stem, which is affine in
the pixels. It is run on the two ends of the path only, and its outputs along the path are
interpolated. The summed gradient is propagated back through it once.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size
from vitlens.attribution.registry import BASELINE, NOISE, SAMPLES, STEPS
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.differentiable import needs_gradients, require_no_steps
from vitlens.lens.trace import trace
from vitlens.models.hooks import is_changed, overridden
from vitlens.models.memo import per_model
from vitlens.models.model import Model
from vitlens.models.trials import largest_allowed
from vitlens.names import DEFAULT_SEED
from vitlens.shapes import Images, Labels, Maps

# share of the largest number by which a trial of the stem may differ from what theory says
_TOLERANCE = 1e-5


@needs_gradients
def pixel_gradients(model: Model, images: Images, targets: Labels) -> Images:
    """Return the gradient of each image's target logit with respect to its pixels.

    No tensor keeps a gradient.
    """

    def compute() -> Images:
        with evaluating(model), torch.enable_grad():
            leaf = _leaf(model, images)
            logits = model(leaf)
            (gradient,) = torch.autograd.grad(logits.gather(1, targets[:, None]).sum(), leaf)
        return gradient

    return require_no_steps(model, compute, lambda gradient: [gradient])


def saliency(model: Model, images: Images, targets: Labels) -> Maps:
    """Return the largest absolute gradient over the channels (Simonyan 2014, section 3.1).

    It is not signed.
    """
    return pixel_gradients(model, images, targets).abs().amax(1)


def input_x_gradient(model: Model, images: Images, targets: Labels) -> Maps:
    """Return pixel times gradient, summed over the channels.

    It is the first-order fall of the logit where a pixel turns black.
    """
    return (images * pixel_gradients(model, images, targets)).sum(1)


def smoothgrad(
    model: Model,
    images: Images,
    targets: Labels,
    *,
    samples: int = SAMPLES,
    noise: float = NOISE,
    seed: int = DEFAULT_SEED,
) -> Maps:
    """Return the saliency of the mean gradient over noisy copies of each image (Smilkov 2017).

    noise: standard deviation as a share of the image's range of values. Every image gets the same
        draws, so that its map does not depend on the batch. With noise 0 the map equals saliency.
    """
    if samples < 1:
        raise InputError(f"expected samples of at least 1, found {samples}")
    spread = noise * (images.amax((1, 2, 3)) - images.amin((1, 2, 3)))
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros_like(images)
    for count in _in_chunks(samples, model, images):
        draws = [torch.randn(images.shape[1:], generator=generator) for _ in range(count)]
        noise_of_copies = torch.stack(draws).to(images).unsqueeze(1)
        copies = images + spread.view(1, -1, 1, 1, 1) * noise_of_copies  # (count, batch, 3, ...)
        gradients = pixel_gradients(model, copies.flatten(0, 1), targets.repeat(count))
        total += gradients.unflatten(0, (count, -1)).sum(0)
    return (total / samples).abs().amax(1)


@needs_gradients
def integrated_gradients(
    model: Model, images: Images, targets: Labels, *, steps: int = STEPS, baseline: float = BASELINE
) -> Maps:
    """Return integrated gradients (Sundararajan 2017), summed over the channels.

    The path is from an image of one value to the image.

    baseline: that value, 0 for black.
    steps: nodes of the Gauss-Legendre quadrature.

    The sum of a map is F(image) - F(baseline), `logit_gain`, except for the error of the
    quadrature.
    """
    if steps < 1:
        raise InputError(f"expected steps of at least 1, found {steps}")
    # the quadrature is on [-1, 1], the path on [0, 1]: half the length
    abscissae, factors = np.polynomial.legendre.leggauss(steps)
    nodes = torch.from_numpy(abscissae).float().to(images) / 2 + 0.5
    weights = torch.from_numpy(factors).float().to(images) / 2
    name = stem_name(model)
    if name is not None and is_changed(model.module.get_submodule(name)):
        name = None  # it may no longer be affine
    stem = Stem(model, name)
    with torch.no_grad():
        start = stem.output(torch.full_like(images, baseline))
        end = stem.output(images)
    total = torch.zeros_like(end)
    done = 0
    for count in _in_chunks(steps, model, images):
        part = slice(done, done + count)
        shares = nodes[part].view(-1, *[1] * end.dim())
        copies = start + shares * (end - start)  # (count, batch, ...)
        gradients = stem.gradients(copies.flatten(0, 1), targets.repeat(count), like=images)
        # the weighted sum over the copies
        total += torch.tensordot(weights[part], gradients.unflatten(0, (count, -1)), dims=1)
        done += count
    if not bool(total.any()):
        pixel_gradients(model, images, targets)  # refuses a step function in the forward
    return ((images - baseline) * stem.to_pixels(total, images)).sum(1)


def logit_gain(
    model: Model, images: Images, targets: Labels, *, baseline: float = BASELINE
) -> Float[Tensor, " batch"]:
    """Return F(image) - F(baseline), the target's logit minus that of an image of one value."""
    blank = torch.full_like(images, baseline)
    with evaluating(model), torch.no_grad():
        logits = model(images).gather(1, targets[:, None])[:, 0].float()
        blank_logits = model(blank).gather(1, targets[:, None])[:, 0].float()
    gain: Tensor = logits - blank_logits
    return gain


def _in_chunks(total: int, model: Model, images: Images) -> Iterator[int]:
    """Yield the sizes of parts of `total` copies of the batch.

    A pass with gradients over one part fits into memory.
    """
    count = max(1, fitting_batch_size(model) // BACKWARD // len(images))
    for start in range(0, total, count):
        yield min(count, total - start)


@dataclass(frozen=True)
class Stem:
    """The first convolution of a model, by its name.

    Without a name the model has no stem, and its output is the pixels.
    """

    model: Model
    name: str | None

    def output(self, images: Images) -> Tensor:
        """Return the stem's output, (batch, ...): affine in the images."""
        if self.name is None:
            return images
        output: Tensor = self._module()(self.model.prepare(images))
        return output

    def gradients(
        self,
        outputs: Float[Tensor, "copies *inner"],
        targets: Int[Tensor, " copies"],
        *,
        like: Images,
    ) -> Float[Tensor, "copies *inner"]:
        """Return the gradient of each copy's target logit with respect to the output of the stem.

        like: images, for their size.
        """
        with evaluating(self.model), torch.enable_grad():
            leaf = _leaf(self.model, outputs)
            if self.name is None:
                logits = self.model(leaf)
            else:
                placeholder = like[:1].expand(len(leaf), -1, -1, -1)  # only its size matters
                with self.returning(leaf):
                    logits = self.model(placeholder)
            (gradient,) = torch.autograd.grad(logits.gather(1, targets[:, None]).sum(), leaf)
        return gradient

    def to_pixels(self, gradient: Tensor, images: Images) -> Images:
        """Return a gradient with respect to the stem's output, propagated back to the pixels."""
        if self.name is None:
            return gradient
        with torch.enable_grad():
            leaf = images.detach().clone().requires_grad_()
            (pixel_gradient,) = torch.autograd.grad(self.output(leaf), leaf, gradient)
        return pixel_gradient

    def _module(self) -> nn.Module:
        assert self.name is not None  # the callers have checked it
        return self.model.module.get_submodule(self.name)

    def returning(self, output: Tensor) -> AbstractContextManager[None]:
        """Make the stem return this output for any input, without computing, inside the context."""
        return overridden(self._module(), lambda _forward: lambda *_args, **_kwargs: output)


@per_model
def stem_name(model: Model) -> str | None:
    """Return the name of the model's stem, None where a trial finds none.

    The trial shows that it is affine and that the logits depend on the pixels only through its
    output.
    """
    calls = trace(model, 1).calls
    prepared = calls[-1].arguments[0].number  # the call of the whole network ends last
    readers = list[str]()
    for call in calls:
        is_convolution = isinstance(model.module.get_submodule(call.module), nn.Conv2d)
        numbers = [value.number for value in call.arguments.values()]
        if is_convolution and numbers[:1] == [prepared]:
            readers.append(call.module)
    if len(readers) != 1:
        return None
    stem = Stem(model, readers[0])
    generator = torch.Generator().manual_seed(0)
    # two batches of one random image each
    first, second = torch.rand(2, 1, 3, *model.input_size, generator=generator).to(model.device)
    exact = torch.autocast(model.device.type, enabled=False)
    with torch.no_grad(), evaluating(model), exact:
        logits = model(torch.cat([first, second]))
        first_output = stem.output(first)
        second_output = stem.output(second)
        middle_output = stem.output((first + second) / 2)
        with stem.returning(first_output):
            logits_with_first_output = model(second)
    # affine: the output of the mean image is the mean output
    largest = max(first_output.abs().max().item(), second_output.abs().max().item())
    deviation = (middle_output - (first_output + second_output) / 2).abs().max()
    is_affine = bool(deviation <= _TOLERANCE * largest)
    # the only way in: the second image with the first one's stem output has the first one's logits
    allowed = min(largest_allowed(logits), _TOLERANCE * max(1.0, logits.abs().max().item()))
    change = (logits_with_first_output - logits[:1]).abs().max()
    is_only_way = allowed > 0 and bool(change <= allowed)
    if is_affine and is_only_way:
        return readers[0]
    return None


def _leaf(model: Model, values: Tensor) -> Tensor:
    """Return a copy that requires a gradient.

    It has the memory layout in which the convolutions of the model are fast.
    """
    layout = torch.preserve_format
    if model.anatomy.family == "cnn" and values.dim() == 4:
        layout = torch.channels_last
    return values.detach().clone(memory_format=layout).requires_grad_()
