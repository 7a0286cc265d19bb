"""Models from an architecture, as data: `Architecture` describes one, and `assemble` makes a Model.

`build` makes its module, and `rebuilt` puts a changed module into a copy of a model. The functions
after them give what a model's source records: versions, provenance and the names of classes. Models
that are made from another model are in derived.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import Annotated, Final

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import InputError, ModelError
from vitlens.files import sha256
from vitlens.models.anatomy import StructureHints, read_anatomy
from vitlens.models.configs import CLASSES
from vitlens.models.cutting import cut_heads
from vitlens.models.fitting import load_strictly
from vitlens.models.model import Model, Provenance, mean_of_pair, two_classes_of_pair
from vitlens.models.sources.registry import SOURCES, ModelRequest
from vitlens.models.swin import SwinTransformer, padding_note
from vitlens.names import imagenet_classes
from vitlens.preprocessing import Preprocessing, Side
from vitlens.references import resolved
from vitlens.typed import between, length, read_as
from vitlens.version import __version__

Overrides = Mapping[str, int | float | bool | str | list[int]]
_IMAGENET: Final = 1000  # the number of its classes


@dataclass(frozen=True)
class Architecture:
    """The description from which the same model is built again, without its weights.

    Raises InputError for a source with models that cannot be built from this.

    kind: the kind of the model's source.
    name: the model's name in the list of the source.
    classes: the number of classes of the head, 0 without a classifier.
    image_size: the (height, width) in pixels, or None for the model's default.
    overrides: the fields of a ViTConfig that differ from those of the preset.
    pruned: the removed heads of each attention module (see `prune_heads`).
    """

    kind: Annotated[str, length(1, 40)]
    name: Annotated[str, length(1, 200)]
    classes: Annotated[int, between(0, CLASSES)] | None = None
    image_size: tuple[Side, Side] | None = None
    overrides: Overrides = field(default_factory=dict)
    pruned: Mapping[str, list[Annotated[int, between(0, 65_536)]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = [kind for kind, source in SOURCES.items() if source.build or source.restore]
        if self.kind not in kinds:
            raise InputError(
                f"expected an architecture of {' or '.join(kinds)}, found {self.kind[:40]!r}"
            )

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> "Architecture":
        """Return an architecture from the JSON of dataclasses.asdict.

        Raises ModelError for anything else.
        """
        return read_as(
            cls, dict(fields), source="an architecture written by vitlens", error=ModelError
        )


def build(
    architecture: Architecture,
    *,
    state: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,
) -> tuple[nn.Module, Preprocessing]:
    """Return the module of an architecture, without its removed heads, and its preprocessing.

    The weights are those of the state, the hub's, or random. Raises ModelError for weights that do
    not fit.
    """
    build_source = resolved(SOURCES[architecture.kind].build)
    pruned = architecture.pruned
    whole_state = state
    if pruned and state is not None:
        whole_state = _with_random_pruned_modules(architecture, state)
    module: nn.Module
    preprocessing: Preprocessing
    module, preprocessing = build_source(architecture, state=whole_state, pretrained=pretrained)
    cut_heads(module, pruned)
    if state is not None:
        for name in pruned:
            attention_state = _state_of(name, state)
            load_strictly(
                module.get_submodule(name), attention_state, where=f"{name} of {architecture.name}"
            )
    return module, preprocessing


def _with_random_pruned_modules(
    architecture: Architecture, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the state with random weights, of full size, for the modules that have lost heads.

    A library loads only a whole model. `build` then cuts the heads, and loads the weights of the
    remaining ones.
    """
    build_source = resolved(SOURCES[architecture.kind].build)
    whole_module, _ = build_source(architecture, state=None, pretrained=False)
    pruned_prefixes = tuple(f"{name}." for name in architecture.pruned)
    whole_state = {}
    for key, value in state.items():
        if not key.startswith(pruned_prefixes):
            whole_state[key] = value
    for key, value in whole_module.state_dict().items():
        if key.startswith(pruned_prefixes):
            whole_state[key] = value
    return whole_state


def _state_of(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a state dict that belongs to a module."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)
    }


def assemble(
    module: nn.Module,
    architecture: Architecture,
    preprocessing: Preprocessing,
    classes: tuple[str, ...],
    alias: str,
    provenance: Provenance,
    *,
    hints: StructureHints | None = None,
) -> Model:
    """Return a Model around a module.

    Its anatomy is read from the attributes of its modules or, with hints, from forward passes.

    hints: the structure given by the user or the model source.
    """
    hints = hints or getattr(module, "structure_hints", None)
    if hints is not None:
        wrap = resolved("vitlens.models.wrap:wrap_module")
        traced: Model = wrap(
            module,
            architecture,
            preprocessing,
            classes,
            alias=alias,
            provenance=provenance,
            hints=hints,
        )
        return traced
    note = ""
    if isinstance(module, SwinTransformer):
        note = padding_note(module.config, preprocessing.size)
    if note:
        notes = dict.fromkeys((*provenance.notes, note))
        provenance = replace(provenance, notes=tuple(notes))
    anatomy = read_anatomy(module, image_size=preprocessing.size)
    read_output = mean_of_pair
    if architecture.classes == 1 and len(classes) == 2:  # a single logit
        read_output = two_classes_of_pair
    return Model(
        module,
        alias=alias,
        anatomy=anatomy,
        preprocessing=preprocessing,
        classes=classes,
        provenance=provenance,
        architecture=asdict(architecture),
        read_output=read_output,
    )


def rebuilt(
    model: Model,
    module: nn.Module,
    architecture: Architecture,
    provenance: Provenance,
    *,
    classes: tuple[str, ...] | None = None,
    preprocessing: Preprocessing | None = None,
) -> Model:
    """Return a model around this module, on the device of `model`.

    Its anatomy is read again in the same way.

    classes, preprocessing: None means those of `model`.
    """
    if classes is None:
        classes = model.classes
    preprocessing = preprocessing or model.preprocessing
    rebuilt_model = assemble(
        module,
        architecture,
        preprocessing,
        classes,
        alias=model.alias,
        provenance=provenance,
        hints=model.structure_hints,
    )
    dtype = _parameter_dtype(module)
    rebuilt_model.mean = rebuilt_model.mean.to(dtype)
    rebuilt_model.std = rebuilt_model.std.to(dtype)
    return rebuilt_model.to(model.device)


def _parameter_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter; float32 where there is none."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


_version = cache(version)  # which reads the disk each time


def versions() -> dict[str, str]:
    """Return the versions of the libraries that determine a model's outputs."""
    return {"vitlens": __version__} | {
        name: _version(name) for name in ("torch", "torchvision", "timm")
    }


def provenance_of(
    request: ModelRequest,
    notes: Sequence[str],
    *,
    hub: str = "hub",
    digest: str | None = None,
    **libraries: str,
) -> Provenance:
    """Return the provenance of a requested model.

    Its weights come from a file, are random, or were loaded from a hub.

    notes: the changes made on loading.
    hub: the word for the hub's weights.
    digest: the SHA-256 of weights that are in no file of the request.
    libraries: further versions of libraries.
    """
    file = request.file
    weights = hub
    if file:
        weights = file.name
        digest = sha256(file)
    elif request.random:
        weights = "random"
    return Provenance(
        request.name,
        weights,
        sha256=digest,
        versions=versions() | libraries,
        notes=tuple(notes),
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random state; the caller's state is restored on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def default_classes(count: int) -> tuple[str, ...]:
    """Return ImageNet's class names for 1000 logits, numbers for any other count.

    One logit counts as two classes.
    """
    if count == _IMAGENET:
        return imagenet_classes()
    return numbered_classes(count)


def numbered_classes(count: int) -> tuple[str, ...]:
    """Return numbers as the names of classes; one logit counts as two classes."""
    return tuple(str(index) for index in range(max(count, 2)))


def both_classes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of classes; one name of a single logit becomes two.

    The name of the complement comes first.
    """
    if len(names) != 1:
        return names
    if names == ("0",):
        return ("0", "1")
    return (f"not {names[0]}", names[0])


def count_classes(module: nn.Module, size: tuple[int, int]) -> int:
    """Return the number of logits, measured in a forward pass.

    Every library stores this number in a different place.
    """
    device = next((parameter.device for parameter in module.parameters()), None)
    with evaluating(module), torch.no_grad():
        logits = module(torch.zeros(1, 3, *size, device=device))
    return int(logits.shape[-1])
