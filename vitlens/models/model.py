"""Model: one type for every network, from pixels in [0, 1] to logits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError, UnsupportedError
from vitlens.models.anatomy import Anatomy, read_attention
from vitlens.models.token_order import reordered
from vitlens.preprocessing import Preprocessing
from vitlens.references import provided, resolved
from vitlens.shapes import Images, Logits, TokenLayout
from vitlens.turns import turn

if TYPE_CHECKING:
    from vitlens.lens.access import Places
    from vitlens.models.anatomy import StructureHints


ReadOutput = Callable[[Any], Tensor]  # from what a module returns to logits (batch, classes)
# names of the logits or features in the outputs of transformers, in order of preference
_OUTPUT_NAMES: Final = ("logits", "image_embeds", "pooler_output")


@dataclass(frozen=True)
class Provenance:
    """The origin of a model.

    name: the name as the user typed it.
    weights: the name of the weights file, or "hub", "bundled", "random" or "training".
    sha256: the hash of the weights file.
    versions: the versions of the libraries that built the model.
    notes: changes made on loading (prefixes removed, positions resized), as sentences.
    """

    name: str
    weights: str
    sha256: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def mean_of_pair(output: Any) -> Tensor:
    """Return a tensor, or the mean of the pair that a distilled model returns in training mode."""
    if isinstance(output, Tensor):
        return output
    return torch.stack(tuple(output)).mean(0)


class Model(nn.Module):
    """Any network as one type, from images to logits.

    Images (batch, 3, height, width) are in [0, 1]; logits are (batch, classes). Normalisation is
    the first step, so distances between images are distances in pixels. Images of another size are
    resized to the model's (bilinear, antialiased, differentiable).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        alias: str,
        anatomy: Anatomy,
        preprocessing: Preprocessing,
        classes: tuple[str, ...],
        provenance: Provenance,
        architecture: Mapping[str, object],
        read_output: ReadOutput = mean_of_pair,
        hints: "StructureHints | None" = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.alias = alias
        if anatomy.attention is None:
            anatomy = replace(anatomy, attention=read_attention(module))
        self.anatomy = anatomy
        self.preprocessing = preprocessing
        self.classes = classes
        self.provenance = provenance
        self.read_output = read_output
        # structure given by the user; None unless the structure was read from forward passes
        self.structure_hints = hints
        # the JSON of a rebuild.Architecture, from which the model is built again
        self.architecture: dict[str, object] = dict(architecture)
        self.register_buffer(
            "mean", torch.tensor(preprocessing.mean).view(1, 3, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor(preprocessing.std).view(1, 3, 1, 1), persistent=False
        )
        self.mean: Tensor
        self.std: Tensor

    @property
    def device(self) -> torch.device:
        """Return the device of its parameters."""
        return self.mean.device

    @property
    def pixel_dtype(self) -> torch.dtype:
        """Return the type of its images before the normalisation: at least float32."""
        return torch.promote_types(self.mean.dtype, torch.float32)

    @property
    def input_size(self) -> tuple[int, int]:
        """Return (height, width) in pixels of the module's input."""
        return self.preprocessing.size

    @property
    def layout(self) -> TokenLayout:
        """Return the layout of its token sequence.

        Raises UnsupportedError for a model without one token sequence.
        """
        if self.anatomy.layout is None:
            reason = f": {self.anatomy.unread}" if self.anatomy.unread else "; see vitlens models"
            raise UnsupportedError(
                f"expected a vision transformer, found {self.alias!r} ({self.anatomy.family}), "
                f"which has no single sequence of tokens{reason}"
            )
        return self.anatomy.layout

    @property
    def has_classifier(self) -> bool:
        """Return True if its outputs are logits of classes.

        The outputs of timm's num_classes=0 are features.
        """
        return bool(self.classes)

    @property
    def has_single_logit(self) -> bool:
        """Return True if its module has one logit, which counts as two classes."""
        return self.read_output in (two_classes, two_classes_of_pair)

    def require_classifier(self) -> None:
        """Raise UnsupportedError if it has no classifier.

        The message says how to add one, and which commands need none.
        """
        from vitlens.models.classifier import require_classifier  # that module imports Model

        require_classifier(self)

    def with_text(self, texts: Sequence[str], *, templates: Sequence[str] = ()) -> "Model":
        """Return this language-image model as a classifier of phrases, for every function.

        A phrase is the mean of the embeddings of its prompts, one per template with {} in place of
        the phrase (default: the phrase itself, a photo, an image and a picture of it). With one
        phrase the only output is its similarity, which can be explained but is no probability.
        Raises UnsupportedError for a model that embeds no texts, InputError for an empty or a
        repeated phrase, and for one that is longer than the model's texts.

        clip = vitlens.load("open-clip:ViT-B-32/openai")
        vitlens.explain(clip.with_text(["a dog", "a van"]), images, targets="a van")
        """
        from vitlens.models.language_image import PHRASES, with_text  # which imports Model

        return with_text(self, texts, templates=tuple(templates) or PHRASES)

    def prepare(self, images: Images) -> Float[Tensor, "batch 3 model_height model_width"]:
        """Return images resized to the module's input size and normalised, in the module's type.

        images: pixels in [0, 1]. For a module in 16 bits, only the result is rounded.
        """
        images = images.to(torch.promote_types(images.dtype, torch.float32))
        if images.shape[-2:] != self.input_size:
            images = F.interpolate(
                images, size=self.input_size, mode="bilinear", antialias=True, align_corners=False
            )
        mean = self.mean
        std = self.std
        if mean.dtype.itemsize < torch.float32.itemsize:  # the buffers are rounded
            mean = torch.tensor(self.preprocessing.mean, device=mean.device).view(1, 3, 1, 1)
            std = torch.tensor(self.preprocessing.std, device=std.device).view(1, 3, 1, 1)
        return ((images - mean) / std).to(self.mean.dtype)

    def forward(self, images: Images) -> Logits:
        """Return logits (batch, classes) of images (batch, 3, height, width) in [0, 1].

        Without a classifier, return features.
        """
        return self.run(self.prepare(images))

    def run(self, prepared: Float[Tensor, "batch 3 model_height model_width"]) -> Logits:
        """Return logits of images that are already resized and normalised.

        Only one thread at a time runs the model.
        """
        with turn(self), reordered(self.module, self.anatomy.reordering):
            return self.read_output(self.module(prepared))

    def supports(self, command: str) -> str | None:
        """Return why this model does not support a command, or None if it does.

        The reason lists the commands that it supports. Raises UnknownNameError for a command that
        takes no model.
        """
        reason: str | None = resolved(provided("why_unsupported"))(self, command)
        return reason

    def __repr__(self) -> str:
        from vitlens.models.description import description
        from vitlens.summary import as_text

        return as_text(f"Model {self.alias}", description(self))

    def _repr_html_(self) -> str:
        from vitlens.models.description import description
        from vitlens.summary import as_html

        return as_html(f"Model {self.alias}", columns=("", ""), rows=description(self))

    def places(self) -> "Places":
        """Return every place with a tensor that can be captured, with its shape.

        See `vitlens.places`.
        """
        listed: Places = resolved(provided("places"))(self)
        return listed

    def parameter_count(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())


@contextmanager
def trainable(model: Model) -> Iterator[Model]:
    """Put the model in training mode with gradients for its parameters.

    Both are restored on exit.
    """
    with turn(model):
        flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        modes = {name: module.training for name, module in model.named_modules()}
        model.train().requires_grad_(True)
        try:
            yield model
        finally:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(flags[name])
            for name, module in model.named_modules():
                module.training = modes[name]


def first_output(output: Any) -> Tensor:
    """Return the tensor in the output of a model.

    These are tried in order: its `logits` or another of `_OUTPUT_NAMES`, as an attribute or a key;
    the first of a tuple or list; the output itself.

    Raises TypeError for anything else.
    """
    for name in _OUTPUT_NAMES:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if isinstance(output, Tensor):
        return output
    size = f" of {len(output)}" if isinstance(output, tuple | list | Mapping) else ""
    description = f"{type(output).__name__}{size}"
    raise TypeError(
        "expected a tensor, a tuple that begins with one, or an object with .logits, found "
        f"{description}"
    )


def two_classes(output: Any) -> Tensor:
    """Return one logit z, (batch, 1) or (batch,), as two logits (-z/2, z/2).

    Their softmax is sigmoid(z) for the second class. The two are symmetric, so that a map of the
    first class is minus that of the second.
    """
    return _as_two(first_output(output))


def two_classes_of_pair(output: Any) -> Tensor:
    """Return `two_classes` of the mean of a pair, as `mean_of_pair`."""
    return _as_two(mean_of_pair(output))


def _as_two(logit: Tensor) -> Tensor:
    half = logit.reshape(-1, 1) / 2
    return torch.cat([-half, half], dim=1)


def require_model(value: object, other: object = None) -> None:
    """Raise InputError unless the value is a Model.

    other: the next argument, to recognise two exchanged arguments.
    """
    if isinstance(value, Model):
        return
    if isinstance(other, Model):
        raise InputError(
            f"expected a Model, found {type(value).__name__}, and a Model after it; exchange the "
            "two"
        )
    if isinstance(value, str | Path):
        raise InputError(
            f"expected a Model, found the text {str(value)!r}; load one with vitlens.load(NAME)"
        )
    wrap = "wrap it with vitlens.wrap(module, image_size=..., mean=..., std=...)"
    advice = wrap if isinstance(value, nn.Module) else "load one with vitlens.load(NAME)"
    raise InputError(f"expected a Model, found {type(value).__name__}; {advice}")
