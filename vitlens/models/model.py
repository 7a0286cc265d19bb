"""Model: one type for every network, from pixels in [0, 1] to logits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import UnsupportedError
from vitlens.models.attention_parts import AttentionPart, read_attention
from vitlens.models.outputs import ReadOutput, mean_of_pair
from vitlens.names import Readout
from vitlens.preprocessing import Preprocessing
from vitlens.references import resolved
from vitlens.shapes import Images, Logits, TokenLayout

if TYPE_CHECKING:
    from vitlens.lens.places.place import Places
    from vitlens.models.tracing.anatomy import Told

Family = Literal["vit", "windowed", "cnn", "other"]


@dataclass(frozen=True)
class Provenance:
    """Where a model comes from.

    name: as the user typed it; weights: file name, "hub", "bundled", "random" or "training"; sha256: of the weights
    file; versions: of the libraries that built it; notes: changes made on loading (prefixes removed, positions
    resized), as sentences.
    """

    name: str
    weights: str
    sha256: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Anatomy:
    """The structure of a model, read from its modules or from a forward pass.

    family: "vit" (one sequence of tokens in all blocks), "windowed" (Swin), "cnn" or "other"; blocks: module names of
    its blocks in forward order; layout: of the token sequence (None where there is none); readout: the classifier's
    input (None for a CNN); attention: its modules with heads, in the order of the module tree (None: `Model` reads them
    from the modules' attributes); unread: why the token layout, or where there is no attention, attention could not be
    read from a forward pass; unused: attention
    modules that run, but on which the logits do not depend; row_by_row: False where a forward pass showed that the
    patches are in another order, so that no grid may be assumed.
    """

    family: Family
    blocks: tuple[str, ...]
    layout: TokenLayout | None = None
    readout: Readout | None = None
    attention: tuple[AttentionPart, ...] | None = None
    unread: str = ""
    unused: tuple[str, ...] = ()
    row_by_row: bool = True

    @cached_property
    def parts(self) -> Mapping[str, AttentionPart]:
        """The modules with heads, by name."""
        return {part.module: part for part in self.attention or ()}

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """The names of the innermost modules with heads, in the order of the module tree."""
        names = tuple(self.parts)
        return tuple(name for name in names if not any(other.startswith(f"{name}.") for other in names))


class Model(nn.Module):
    """Any network as one type: images (batch, 3, height, width) in [0, 1] -> logits (batch, classes).

    Normalisation is the first step, so distances between images are distances in pixels. Images of another size are
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
        told: "Told | None" = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.alias = alias
        self.anatomy = anatomy if anatomy.attention is not None else replace(anatomy, attention=read_attention(module))
        self.preprocessing = preprocessing
        self.classes = classes
        self.provenance = provenance
        self.read_output = read_output
        self.told = told  # of a module whose structure was read from forward passes: what its user said of it
        self.architecture = dict(architecture)  # the JSON of an assembly.Architecture, from which it is built again
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(preprocessing.std).view(1, 3, 1, 1), persistent=False)
        self.mean: Tensor
        self.std: Tensor

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.mean.device

    @property
    def input_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the module's input."""
        return self.preprocessing.size

    @property
    def layout(self) -> TokenLayout:
        """The layout of its token sequence. Raises UnsupportedError for a model without one token sequence."""
        if self.anatomy.layout is None:
            reason = f": {self.anatomy.unread}" if self.anatomy.unread else "; see vitlens models"
            raise UnsupportedError(
                f"expected a vision transformer, found {self.alias!r} ({self.anatomy.family}), "
                f"which has no single sequence of tokens{reason}"
            )
        return self.anatomy.layout

    @property
    def has_classifier(self) -> bool:
        """Whether its outputs are logits of classes; those of a headless model (timm's num_classes=0) are features."""
        return bool(self.classes)

    def require_classifier(self) -> None:
        """Raise UnsupportedError, with the commands that need no classifier and how to add one, where it has none."""
        from vitlens.models.support import require_classifier

        require_classifier(self)

    def prepare(self, images: Images) -> Float[Tensor, "batch 3 model_height model_width"]:
        """Pixels in [0, 1] resized to the module's input size and normalised, in the module's floating-point type."""
        if images.shape[-2:] != self.input_size:
            images = F.interpolate(images, size=self.input_size, mode="bilinear", antialias=True, align_corners=False)
        prepared = (images - self.mean) / self.std
        return prepared if prepared.dtype == self.mean.dtype else prepared.to(self.mean.dtype)

    def forward(self, images: Images) -> Logits:
        """Logits (batch, classes) for images (batch, 3, height, width) in [0, 1]; of a headless model, features."""
        return self.run(self.prepare(images))

    def run(self, prepared: Float[Tensor, "batch 3 model_height model_width"]) -> Logits:
        """Logits for images that are resized and normalised already."""
        return self.read_output(self.module(prepared))

    def supports(self, command: str) -> str | None:
        """Why this model does not support a command, and which commands it supports; None where it does.

        Raises UnknownNameError for a command that takes no model.
        """
        from vitlens.models.support import unsupported  # which imports Model

        return unsupported(self, command)

    def __repr__(self) -> str:
        from vitlens.models.support import description
        from vitlens.summary import as_text

        return as_text(f"Model {self.alias}", description(self))

    def _repr_html_(self) -> str:
        from vitlens.models.support import description
        from vitlens.summary import as_html

        return as_html(f"Model {self.alias}", ("", ""), description(self))

    def places(self) -> "Places":
        """Every place inside whose tensor can be captured or changed, with its shape: see `vitlens.places`."""
        listed: Places = resolved("vitlens.lens.places.listing:places")(self)  # a higher layer
        return listed

    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())


@contextmanager
def trainable(model: Model) -> Iterator[Model]:
    """Inside, the model is in training mode and its parameters require gradients; both are restored on exit."""
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
