"""Wrap any module that maps images to logits as a Model.

Its structure and its outputs are read from forward passes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitlens.devices import evaluating
from vitlens.errors import InputError, ModelError, UnsupportedError, VitlensError, lacks_memory
from vitlens.models.anatomy import StructureHints, is_headless
from vitlens.models.hooks import Arguments, watching
from vitlens.models.inputs import why_no_images
from vitlens.models.model import Model, Provenance, ReadOutput, first_output, two_classes
from vitlens.models.numbering import numbering_note
from vitlens.models.rebuild import Architecture, numbered_classes, versions
from vitlens.models.structure import trace_anatomy
from vitlens.models.trials import depends_on_image, largest_allowed, with_noise, zero_weights
from vitlens.preprocessing import Preprocessing, require_side_lengths
from vitlens.shapes import PrefixKind
from vitlens.turns import turn
from vitlens.typed import read_as

Triple = tuple[float, float, float]
# the kind of the architecture of a module that vitlens cannot build again
WRAPPED: Final = "wrapped"
# transformers' names of the implementations whose softmax torch computes itself
OBSERVABLE: Final = ("eager", "sdpa")
_TOLERANCE: Final = 1e-3  # times the largest logit
_ROUNDING_STEPS: Final = 16  # tolerance of 16-bit modules in units of the type's epsilon
_NOISE_IMAGES: Final = 3  # in the forward passes from which the structure is read
_PROBABILITIES: Final = {
    torch.softmax: "softmax",
    Tensor.softmax: "softmax",
    F.softmax: "softmax",
    torch.sigmoid: "sigmoid",
    Tensor.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid",
}


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
    """Return a Model around your module, which is neither copied nor changed.

    Attention, blocks, heads and the order of tokens are read from forward passes of noise. The
    arguments blocks, heads, prefix and grid are for what cannot be read. A special token is CLS if
    the classifier reads it differently from the patches, or if `prefix` names it. Other special
    tokens are registers. Special tokens may stand anywhere in the module's sequence: vitlens
    reorders them, so that they come first inside the model, with equal logits to 1e-4. Weights that
    are all zeros, such as those of a new head, are replaced by noise while the structure is read,
    so that the logits depend on the image.

    module: maps normalised images (batch, 3, height, width) to logits. It returns a tensor
        (batch, classes), a tuple that begins with it, or an object with `.logits`. One logit z,
        (batch, 1) or (batch,), counts as two classes with the logits -z/2 and z/2. The second class
        then has the probability sigmoid(z).
    image_size: the (height, width) of images in pixels, or one number for both.
    mean, std: the normalisation in training, for pixels in [0, 1]. Without one, they are (0, 0, 0)
        and (1, 1, 1).
    classes: the names of the logits; None means their numbers. It is () if the outputs are
        features; those of timm's num_classes=0 are recognised.
    alias: the model's name in reports.
    resize: the short side in pixels before a centre crop of photographs; None resizes the whole
        image.
    blocks: the names of the residual blocks, in order.
    heads: the number of heads of every attention layer.
    prefix: the kinds of the special tokens ("cls", "distillation", "register"), in order.
    grid: the (rows, columns) of the patches.

    Raises ModelError for a module that is scripted, compiled or on several devices. The module must
    take three channels, return logits and not probabilities, and leave its input and its buffers
    unchanged. The logits must depend neither on chance nor on the other images of a batch. Raises
    UnsupportedError for a structure other than the one given.

    >>> import torch, vitlens
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 4))
    >>> half = (0.5, 0.5, 0.5)
    >>> model = vitlens.wrap(net, image_size=32, mean=half, std=half, classes="abcd")
    >>> model(torch.rand(2, 3, 32, 32)).shape, model.anatomy.family
    (torch.Size([2, 4]), 'cnn')
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    _require_numbers("image_size", size, 2, example="32 or (32, 48)")
    _require_numbers("mean", mean, 3, example="(0.5, 0.5, 0.5)")
    _require_numbers("std", std, 3, example="(0.5, 0.5, 0.5)")
    if not all(isinstance(side, int) and side >= 1 for side in size):
        raise InputError(
            f"expected image_size in whole pixels, at least 1 a side, found {image_size!r}; e.g. "
            "image_size=32"
        )
    require_side_lengths(size)
    if not all(0 < deviation < math.inf for deviation in std) or not all(map(math.isfinite, mean)):
        raise InputError(
            f"expected a finite mean and a std above 0, found mean={mean!r} and std={std!r}; e.g. "
            "std=(0.5, 0.5, 0.5)"
        )
    structure = {"blocks": blocks, "heads": heads, "prefix": prefix, "grid": grid}
    try:
        hints = read_as(StructureHints, structure, source="wrap")
    except InputError as reason:
        arguments = ", ".join(
            f"{name}={value!r}" for name, value in structure.items() if value is not None
        )
        raise InputError(
            "expected blocks as a list of names, prefix as one of cls, distillation and register, "
            f"grid as two numbers and heads as one, found {arguments[:200]}; e.g. "
            "prefix=('cls', 'register'), grid=(14, 14), heads=3"
        ) from reason
    name = alias or type(module).__name__
    architecture = {
        "kind": WRAPPED,
        "name": f"{type(module).__module__}.{type(module).__qualname__}",
        "pruned": {},
    }
    return wrap_module(
        module,
        architecture,
        preprocessing=Preprocessing(size, resize, mean=mean, std=std),
        classes=None if classes is None else tuple(classes),
        alias=name,
        provenance=Provenance(name, weights="given", versions=versions()),
        hints=hints,
    )


def _require_numbers(name: str, values: object, count: int, *, example: str) -> None:
    """Raise InputError unless an argument is a sequence of this many numbers."""
    if (
        isinstance(values, Sequence)
        and len(values) == count
        and all(isinstance(value, int | float) for value in values)
    ):
        return
    raise InputError(f"expected {name} as {count} numbers, found {values!r}; e.g. {name}={example}")


def wrap_module(
    module: nn.Module,
    architecture: Architecture | Mapping[str, object],
    preprocessing: Preprocessing,
    classes: tuple[str, ...] | None,
    alias: str,
    provenance: Provenance,
    *,
    hints: StructureHints | None = None,
) -> Model:
    """Return a Model with an anatomy that is read from forward passes.

    Raises what `wrap` raises.

    classes: the names of the logits, or () for features. None means features if they are
        recognised, else numbered classes.
    """
    device, dtype = _device_and_dtype(module)
    hints = hints or StructureHints()
    cuda_devices = [device] if device.type == "cuda" else []
    # torch.autocast does not know the meta device
    autocast_device = "cpu" if device.type == "meta" else device.type
    with (  # neither autocast nor inference mode is in force; random states are restored on exit
        torch.random.fork_rng(devices=cuda_devices),
        torch.inference_mode(mode=False),
        torch.autocast(autocast_device, enabled=False),
        turn(module),
        ExitStack() as stack,
    ):
        height, width = preprocessing.size
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(_NOISE_IMAGES, 3, height, width, generator=generator)
        noise = noise.to(device, dtype)
        stack.enter_context(with_noise(zero_weights(module)))
        read_output, count, reads_image = _output_form(module, noise[:2])
        if not reads_image:
            note = (
                f"the logits of {alias} do not depend on the image, so its structure may be misread"
            )
            provenance = replace(provenance, notes=(*provenance.notes, note))
        if classes is None:
            gives_features = is_headless(module) and not _ends_in_linear(module, noise[:2])
            classes = () if gives_features else numbered_classes(count)
        elif classes and len(classes) != count:
            logits = f"{count} logits"
            if read_output is two_classes:
                logits = "one logit, which counts as two classes"
            raise InputError(
                f"expected {count} class names for {alias}, found {len(classes)}; it has {logits}"
            )
        anatomy = trace_anatomy(module, noise, read_output, hints)
        note = numbering_note(anatomy)
        if note:
            provenance = replace(provenance, notes=(*provenance.notes, note))
        if isinstance(architecture, Architecture):
            architecture = asdict(architecture)
        model = Model(
            module,
            alias=alias,
            anatomy=anatomy,
            preprocessing=preprocessing,
            classes=classes,
            provenance=provenance,
            architecture=architecture,
            read_output=read_output,
            hints=hints,
        )
        model.mean = model.mean.to(device, dtype)
        model.std = model.std.to(device, dtype)
    model.training = module.training  # only the flag: train() would change the module
    return model


def _ends_in_linear(module: nn.Module, images: Tensor) -> bool:
    """Return True if the module returns the output of a linear layer."""
    outputs: list[Tensor] = []

    def record(_name: str, _arguments: Arguments, output: Any) -> None:
        outputs.append(output)

    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    with evaluating(module), torch.no_grad(), watching(module, linear, record):
        logits = first_output(module(images))
    return any(torch.equal(output, logits) for output in outputs)


def _device_and_dtype(module: object) -> tuple[torch.device, torch.dtype]:
    """Return the device and the floating-point type of a module's weights.

    Raises ModelError for a module with an inside that cannot be observed (see `wrap`). Raises
    UnsupportedError for attention of transformers by a kernel outside torch.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module, found {type(module).__name__}; pass the model itself"
        )
    for name, part in module.named_modules():
        _require_observable(name, part)
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise ModelError(
            "expected a module with weights, found the meta device; call "
            "module.to_empty(device='cpu')"
        )
    if any(tensor.is_inference() for tensor in tensors):
        raise ModelError(
            "expected weights that autograd may use, found some made inside torch.inference_mode; "
            "build it outside"
        )
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise ModelError(
            f"expected a module on one device, found {', '.join(devices)}; move it with "
            "module.to(...)"
        )
    device = torch.device(devices[0] if devices else "cpu")
    for tensor in tensors:
        if tensor.is_floating_point():
            return device, tensor.dtype
    return device, torch.float32


def _require_observable(name: str, part: nn.Module) -> None:
    """Raise the errors of `_device_and_dtype` for a module with an inside that cannot be observed.

    It may be compiled, exported, scripted or quantized.
    """
    if hasattr(part, "_orig_mod"):
        raise ModelError(
            f"expected a module that is not compiled, found torch.compile's ({name or 'it'}); pass "
            "what was compiled (module._orig_mod)"
        )
    if _has_compiled_forward(part):
        raise ModelError(
            "expected a module that is not compiled, found a compiled forward in "
            f"{name or type(part).__name__}; build the model again without torch.compile and load "
            "its state_dict()"
        )
    if isinstance(part, torch.fx.GraphModule) and "eval" in vars(part):
        raise ModelError(
            "expected a module of Python code, found one exported by torch.export "
            f"({name or 'it'}), whose inside cannot be observed; pass the module that was exported"
        )
    if isinstance(part, torch.jit.ScriptModule):
        raise ModelError(
            f"expected a module of Python code, found a scripted or traced one ({name or 'it'}), "
            "whose inside cannot be observed; pass the module it was made from"
        )
    if _is_quantized(part):
        layer = f"{name} ({type(part).__name__})" if name else type(part).__name__
        raise ModelError(
            f"expected weights of floating-point numbers, found a layer of integers, {layer}, "
            "which has no gradients and rounds by the batch; pass the module as it was before "
            "quantization"
        )
    config = getattr(part, "config", None)
    if getattr(config, "problem_type", None) == "regression":
        raise UnsupportedError(
            f"expected logits of classes, found the regression that {name or type(part).__name__} "
            "was trained for (config.problem_type); choose a classifier"
        )
    kernel = getattr(config, "_attn_implementation", None)
    if isinstance(kernel, str) and kernel not in OBSERVABLE:
        raise UnsupportedError(
            f"expected attention that can be observed ({' or '.join(OBSERVABLE)}), found "
            f"{kernel[:60]!r} in {name or 'the model'} ({type(part).__name__}); call "
            "set_attn_implementation('sdpa') on it first"
        )


def _is_quantized(part: nn.Module) -> bool:
    """Return True for a layer with integers as weights.

    Such are torch's quantized layers and those of bitsandbytes.
    """
    library = type(part).__module__
    if library.startswith("bitsandbytes."):
        return True
    return library.startswith(("torch.ao.nn.quantized", "torch.nn.quantized"))


def _has_compiled_forward(module: nn.Module) -> bool:
    """Return True if torch.compile decorates the forward.

    `module.compile()` leaves the forward unchanged.
    """
    forward = getattr(module, "forward", None)
    is_wrapped = getattr(forward, "_torchdynamo_orig_callable", None) is not None
    is_disabled = getattr(forward, "_torchdynamo_disable", False)  # by torch.compiler.disable
    return is_wrapped and not is_disabled


def _output_form(module: nn.Module, images: Tensor) -> tuple[ReadOutput, int, bool]:
    """Return (read_output, count, reads_image): how to read logits from a module's output.

    count is the number of logits, and reads_image is True if they depend on the image.

    Raises ModelError for a module that fails, that changes its input or its buffers, or that
    returns anything but one row of logits for each image. Logits must be equal in a second pass,
    and for an image without the other.

    images: two normalised images.
    """
    name = type(module).__name__
    original = images.clone()
    mode = _LastProbabilities()
    with _buffers_kept(module), evaluating(module), torch.no_grad():
        with mode:
            logits = _logits(module, images)
        if not torch.equal(images, original):
            raise ModelError(
                f"expected {name} to leave its input unchanged, found it changed; clone it in "
                "forward"
            )
        second_pass = _logits(module, images)
        single = _logits(module, images[:1])
    _require_no_probabilities(logits, mode, name)
    tolerance = max(_TOLERANCE, _ROUNDING_STEPS * torch.finfo(logits.dtype).eps)
    reads_image = depends_on_image(logits)

    def require_equal(first: Tensor, second: Tensor, expected: str, advice: str) -> None:
        difference = (first.float() - second.float()).abs().max().item()
        if reads_image:
            allowed = largest_allowed(logits, tolerance)
        else:
            allowed = tolerance * max(1.0, first.float().abs().max().item())
        if difference > allowed:
            raise ModelError(
                f"expected {expected}, found a difference of {difference:.1e}; {advice}"
            )

    require_equal(
        logits,
        second_pass,
        f"equal logits of {name} in two passes in evaluation mode",
        "pass training=self.training to F.dropout, and draw no random numbers in forward",
    )
    require_equal(
        logits[:1],
        single,
        f"logits of {name} for an image that do not depend on its batch",
        "normalise and pool within each image (a batch norm needs its running statistics)",
    )
    if logits.shape[1] == 1:
        return two_classes, 2, reads_image
    return first_output, logits.shape[1], reads_image


def _require_no_probabilities(logits: Tensor, mode: "_LastProbabilities", name: str) -> None:
    """Raise ModelError if a module returns the result of a softmax or sigmoid.

    mode: the mode that was in force in the module's forward pass.
    name: the name of the module's class.
    """
    probabilities = mode.result
    if probabilities is None or probabilities.numel() != logits.numel():
        return
    if not torch.equal(probabilities.reshape(logits.shape), logits):
        return
    note = ""
    if mode.name == "sigmoid" and logits.shape[1] > 1:
        note = " (independent labels are not supported: one label an image)"
    raise ModelError(
        f"expected logits from {name}, found probabilities, as its last step is a "
        f"{mode.name}{note}; drop it"
    )


def _logits(module: nn.Module, images: Tensor) -> Tensor:
    """Return the logits in the module's output, (images, classes).

    Raises ModelError if the module fails, or if there are none.
    """
    name = type(module).__name__
    # a single image is only tried after a batch of two has passed
    several = len(images) > 1
    try:
        output = module(images)
    except VitlensError:
        raise
    except Exception as error:  # a user's forward may raise anything
        if lacks_memory(error):
            raise
        if several:
            fault = why_no_images(module, images, error)
        else:
            lines = str(error).splitlines()
            reason = lines[0][:200] if lines else ""
            fault = f"it raises {type(error).__name__}: {reason}; it accepts a batch of two"
        raise ModelError(
            f"expected {name} to take normalised images {tuple(images.shape)}, found that {fault}"
        ) from error
    try:
        logits = first_output(output)
    except TypeError as error:
        raise ModelError(
            f"{error}; wrap a module whose forward returns the logits of {name}"
        ) from error
    if logits.is_floating_point():
        if logits.dim() == 2 and len(logits) == len(images):
            return logits
        if logits.dim() < 2 and logits.numel() == len(images):  # one logit, squeezed
            return logits.reshape(-1, 1)
    advice = "squeeze axes by name, not the batch's"
    if several:
        advice = "wrap a module whose forward pools and classifies"
    raise ModelError(
        f"expected logits ({len(images)}, classes) from {name}, found "
        f"{str(logits.dtype).removeprefix('torch.')} of shape {tuple(logits.shape)}; {advice}"
    )


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers on exit, and raise ModelError if they have changed."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    changed: list[str] = []
    try:
        yield
    finally:
        for name, original in before.items():
            buffer = module.get_buffer(name)
            if not _is_same_buffer(buffer, original):
                changed.append(name)
                owner, _, attribute = name.rpartition(".")
                module.get_submodule(owner)._buffers[attribute] = original
    if changed:
        raise ModelError(
            f"expected {type(module).__name__} to leave its buffers unchanged in evaluation mode, "
            f"found {changed[0]} changed in a forward pass; update it only if self.training"
        )


def _is_same_buffer(buffer: Tensor, original: Tensor) -> bool:
    if buffer.shape != original.shape:
        return False
    is_nan = (buffer != buffer) & (original != original)  # NaN is not equal to itself
    return bool(((buffer == original) | is_nan).all())


class _LastProbabilities(TorchFunctionMode):
    """Keeps the last result of a softmax or sigmoid."""

    name = ""
    result: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keep the results of softmax and sigmoid; compute every call unchanged."""
        result = func(*args, **(kwargs or {}))
        if func in _PROBABILITIES:
            self.name = _PROBABILITIES[func]
            self.result = result
        return result
