"""wrap: any module that maps images to logits as a Model, its structure read from forward passes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import nn

from vitlens.errors import InputError, ModelError
from vitlens.models.assembly import Architecture, default_classes, versions
from vitlens.models.kernels import require_observable_attention
from vitlens.models.model import Model, Provenance
from vitlens.models.tracing.anatomy import Told, trace_anatomy
from vitlens.models.tracing.output import output_form
from vitlens.preprocessing import Preprocessing, require_side_lengths
from vitlens.shapes import PrefixKind

Triple = tuple[float, float, float]
WRAPPED = "wrapped"  # the kind of the architecture of a module that vitlens cannot build again


def wrap(
    module: nn.Module,
    *,
    image_size: int | tuple[int, int],
    mean: Triple,
    std: Triple,
    classes: Sequence[str] | None = None,
    alias: str | None = None,
    resize: int | None = None,
    blocks: Sequence[str] | None = None,
    heads: int | None = None,
    prefix: Sequence[PrefixKind] | None = None,
    grid: tuple[int, int] | None = None,
) -> Model:
    """A Model around your own module, which is neither copied nor changed.

    module: maps normalised images (batch, 3, height, width) to logits: a tensor (batch, classes), a tuple that begins
    with it, or an object with `.logits`; one logit counts as two classes, the second by its sigmoid. image_size:
    (height, width) in pixels, or both at once; mean, std: of the normalisation in training, for pixels in [0, 1]
    ((0, 0, 0) and (1, 1, 1) for none). classes: names of the logits; alias: the model's name in reports; resize: the
    short side in pixels before a centre crop of photographs (None: the whole image is resized).

    Attention, blocks, heads and the order of tokens are read from forward passes of noise. They can be said where they
    cannot be read: blocks, names of the residual blocks in order; heads, of every attention layer; prefix, the kinds
    of the tokens before the patches ("cls", "distillation", "register"); grid, the patches' (rows, columns).

    Raises ModelError for a module that is scripted, compiled, on several devices, takes other than three channels,
    returns no logits or probabilities instead of them, changes its input or its buffers, or whose logits depend on
    chance or on the other images of a batch; UnsupportedError for a structure that is not what was said.

    >>> import torch, vitlens
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 4))
    >>> model = vitlens.wrap(net, image_size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), classes="abcd")
    >>> model(torch.rand(2, 3, 32, 32)).shape, model.anatomy.family
    (torch.Size([2, 4]), 'cnn')
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    _require_numbers("image_size", size, 2, "32 or (32, 48)")
    _require_numbers("mean", mean, 3, "(0.5, 0.5, 0.5)")
    _require_numbers("std", std, 3, "(0.5, 0.5, 0.5)")
    require_side_lengths(size)
    told = Told(None if blocks is None else tuple(blocks), heads, None if prefix is None else tuple(prefix), grid)
    name = alias or type(module).__name__
    return wrapped(
        module,
        {"kind": WRAPPED, "name": f"{type(module).__module__}.{type(module).__qualname__}", "pruned": {}},
        Preprocessing(size, resize, "bilinear", mean, std),
        None if classes is None else tuple(classes),
        name,
        Provenance(name, "given", None, versions()),
        told=told,
    )


def wrapped(
    module: nn.Module,
    architecture: Architecture | Mapping[str, object],
    preprocessing: Preprocessing,
    classes: tuple[str, ...] | None,
    alias: str,
    provenance: Provenance,
    *,
    told: Told | None = None,
) -> Model:
    """A Model whose anatomy is read from forward passes; classes: () for features, None for numbered classes.

    Raises what `wrap` raises.
    """
    _require_eager(module)
    require_observable_attention(module)
    device, dtype = _place(module)
    _require_channels(module)
    with _undisturbed(device):
        height, width = preprocessing.size
        noise = torch.randn(3, 3, height, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        read_output, count = output_form(module, noise[:2])
        if classes is None:
            classes = default_classes(count)
        elif classes and len(classes) != count:
            raise InputError(f"expected {count} class names for {alias}, found {len(classes)}; it has {count} logits")
        model = Model(
            module,
            alias=alias,
            anatomy=trace_anatomy(module, noise, read_output, told),
            preprocessing=preprocessing,
            classes=classes,
            provenance=provenance,
            architecture=asdict(architecture) if isinstance(architecture, Architecture) else architecture,
            read_output=read_output,
            told=told or Told(),
        )
        model.mean, model.std = model.mean.to(device, dtype), model.std.to(device, dtype)
    model.training = module.training
    return model


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Inside, neither autocast nor inference mode is in force; random states are restored on exit."""
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.inference_mode(mode=False),
        torch.autocast(device.type if device.type != "meta" else "cpu", enabled=False),
    ):
        yield


def _require_numbers(name: str, values: object, count: int, example: str) -> None:
    """Raise InputError unless these are that many numbers."""
    if (
        not isinstance(values, Sequence)
        or len(values) != count
        or not all(isinstance(value, int | float) for value in values)
    ):
        raise InputError(f"expected {name} as {count} numbers, found {values!r}; e.g. {name}={example}")


def _require_eager(module: object) -> None:
    """Raise ModelError for anything but a module that runs its own Python code."""
    if not isinstance(module, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, found {type(module).__name__}; pass the model itself")
    compiled = [name or "it" for name, part in module.named_modules() if hasattr(part, "_orig_mod")]
    if compiled:
        raise ModelError(
            f"expected a module that is not compiled, found torch.compile's ({compiled[0]}); pass what was compiled "
            "(module._orig_mod)"
        )
    scripted = [name or "it" for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise ModelError(
            f"expected a module of Python code, found a scripted or traced one ({scripted[0]}), whose inside cannot be "
            "observed; pass the module it was made from"
        )


def _place(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and the floating-point type of a module's weights. Raises ModelError for several devices."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise ModelError("expected a module with weights, found the meta device; call module.to_empty(device='cpu')")
    if any(tensor.is_inference() for tensor in tensors):
        raise ModelError(
            "expected weights that autograd may use, found some made inside torch.inference_mode; build the module "
            "outside it"
        )
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ModelError(f"expected a module on one device, found {', '.join(devices)}; move it with module.to(...)")
    floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return torch.device(devices[0] if devices else "cpu"), floats[0] if floats else torch.float32


def _require_channels(module: nn.Module) -> None:
    """Raise ModelError where the first convolution does not read three channels."""
    first = next((layer for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)
    if first is not None and first.in_channels != 3:
        raise ModelError(
            f"expected a module of 3 channels, found a first convolution of {first.in_channels}; put a module before "
            "it that turns colour images into its channels (for 1: the mean of the three)"
        )
