"""The inputs that a module takes instead of colour images, read from trial passes.

They are used after the module has raised an error for images.
"""

import inspect
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitlens.models.hooks import Arguments, first_tensor, watching

_COLOURS: Final = 3
_MOST_CHANNELS: Final = 16  # all numbers of channels up to this one are tried
# A layer that reads at most this many channels may read an image. Their number is tried first.
_MOST_READ_CHANNELS: Final = 4 * _MOST_CHANNELS


def why_no_images(module: nn.Module, images: Tensor, error: Exception) -> str:
    """Describe the inputs that the module takes instead of these images, and what to do.

    The module is in evaluation mode, without gradients.

    images: normalised images.
    error: the error that its forward raised for them.
    """
    name = type(module).__name__
    images_alone = (
        "wrap a module with a forward that takes only normalised images (batch, 3, height, width)"
    )
    lacking = _further_arguments(module, images)
    if lacking:
        return f"its forward needs {lacking}, too; {images_alone} and calls {name} with both"
    key = _first_key_read(module, images)
    if key is not None:
        return f"it takes a dict; {images_alone} and calls {name} with {{{key!r}: images}}"
    if _is_of_video(module, images, error):
        return (
            "it takes video, images with an axis of time, which vitlens does not read; wrap a "
            "model of single images"
        )
    channels = _channels_taken(module, images)
    if channels is not None:
        plural = "" if channels == 1 else "s"
        return f"it takes images of {channels} channel{plural}; wrap {_adapter(channels)}"
    lines = str(error).splitlines()
    message = lines[0][:200] if lines else ""
    advice = images_alone
    if isinstance(error, RuntimeError | ValueError | AssertionError):
        advice = "check image_size="
    return f"it raises {type(error).__name__}: {message}; {advice}"


def _adapter(channels: int) -> str:
    """Return code of a module with a conversion of the three colours to its channels, in words."""
    if channels == 1:
        return (
            "torch.nn.Sequential(torchvision.transforms.Grayscale(1), module), with mean and "
            "std of three equal numbers"
        )
    if channels < _COLOURS:
        return (
            f"torch.nn.Sequential(torch.nn.Conv2d(3, {channels}, 1), module) with weights that "
            "you set"
        )
    return (
        f"torch.nn.Sequential(torch.nn.ConstantPad3d((0, 0, 0, 0, 0, {channels - _COLOURS}), 0.0), "
        "module), which adds channels of zeros after red, green and blue"
    )


def _further_arguments(module: nn.Module, images: Tensor) -> str:
    """Return the names of the arguments that the module's forward needs besides images.

    Returns "" where it needs none.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a callable that does not give its signature
        return ""
    try:
        signature.bind(images)
    except TypeError:
        needed = []
        for parameter in signature.parameters.values():
            is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is parameter.empty and not is_variadic:
                needed.append(parameter.name)
        return ", ".join(needed[1:])  # the first one takes the images
    return ""


class _RecordingDict(dict[Any, Any]):
    """A dict that has the images under every key, and records the keys that are read."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = images
        self.read_keys: list[object] = []

    def __getitem__(self, key: object) -> Tensor:
        self.read_keys.append(key)
        return self.images

    def get(self, key: object, _default: object = None) -> Tensor:
        return self[key]

    def pop(self, key: object, *_default: object) -> Tensor:
        return self[key]

    def __contains__(self, key: object) -> bool:
        return True


def _first_key_read(module: nn.Module, images: Tensor) -> str | None:
    """Return the first key of a dict that the module reads before it raises an error.

    Returns None where it reads none.
    """
    batch = _RecordingDict(images)
    _runs(module, batch)
    for key in batch.read_keys:
        if isinstance(key, str):
            return key
    return None


def _is_of_video(module: nn.Module, images: Tensor, error: Exception) -> bool:
    """Return True if the module unpacks five axes, or fails in a convolution with an axis of time.

    error: the error that it raised for images.
    """
    entered: list[str] = []

    def enter(name: str, _arguments: Arguments) -> None:
        entered.append(name)

    with watching(module, [name for name, _ in module.named_modules()], before=enter):
        _runs(module, images)
    last_entered = module.get_submodule(entered[-1]) if entered else module
    # torch's words for a shape of four axes that is unpacked into five
    return isinstance(last_entered, nn.Conv3d) or "expected 5, got 4" in str(error)


def _channels_taken(module: nn.Module, images: Tensor) -> int | None:
    """Return another number of channels with which the module returns a tensor, or None."""
    for channels in _channels_to_try(module, images):
        noise = torch.randn(
            len(images), channels, *images.shape[2:], generator=torch.Generator().manual_seed(0)
        )
        if _runs(module, noise.to(images)):
            return channels
    return None


def _channels_to_try(module: nn.Module, images: Tensor) -> Iterator[int]:
    """Yield numbers of channels; those that layers of the module read come first."""
    pixels = images.shape[2] * images.shape[3]
    read = []
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            read.append(layer.in_channels)
        elif isinstance(layer, nn.Linear) and layer.in_features <= pixels:
            read.append(layer.in_features)
    likely = [channels for channels in read if channels <= _MOST_READ_CHANNELS]
    for channels in dict.fromkeys((*likely, *range(1, _MOST_CHANNELS + 1))):  # without repetition
        if channels != _COLOURS:
            yield channels


def _runs(module: nn.Module, inputs: object) -> bool:
    """Return True if the module returns a tensor for these inputs."""
    try:
        return first_tensor(module(inputs)) is not None
    except Exception:  # a user's forward may raise anything
        return False
