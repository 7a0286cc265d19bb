"""From an architecture, as data, to a module, and from a module to a Model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import InputError, ModelError
from vitlens.labels import imagenet_classes
from vitlens.models.anatomy import read_anatomy
from vitlens.models.model import Model, Provenance
from vitlens.models.sources.registry import SOURCES
from vitlens.models.swin import SwinTransformer, padding_note
from vitlens.models.vit_config import CLASSES
from vitlens.preprocessing import Preprocessing, Side
from vitlens.references import resolved
from vitlens.typed import between, length, read_as
from vitlens.version import __version__

if TYPE_CHECKING:
    from vitlens.models.tracing.anatomy import Told

Overrides = Mapping[str, int | float | bool | str | list[int]]


@dataclass(frozen=True)
class Architecture:
    """Everything that is needed to build the same model again, without its weights.

    kind: of the source; name: in the source's list; classes: of the head; image_size: (height, width) in pixels, None
    for the model's own; overrides: fields of a ViTConfig that differ from the preset's; pruned: the removed heads of
    each attention module (see `prune_heads`). Raises InputError for a source whose models cannot be built from this.
    """

    kind: Annotated[str, length(1, 40)]
    name: Annotated[str, length(1, 200)]
    classes: Annotated[int, between(0, CLASSES)] | None = None  # 0: without a classifier
    image_size: tuple[Side, Side] | None = None
    overrides: Overrides = field(default_factory=dict)
    pruned: Mapping[str, list[Annotated[int, between(0, 65_536)]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        built = [kind for kind, source in SOURCES.items() if source.build or source.restore]
        if self.kind not in built:
            raise InputError(f"expected an architecture of {' or '.join(built)}, found {self.kind[:40]!r}")

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> "Architecture":
        """An architecture from the JSON of dataclasses.asdict. Raises ModelError for anything else."""
        return read_as(cls, dict(fields), source="an architecture written by vitlens", error=ModelError)


def build(
    architecture: Architecture, *, state: Mapping[str, Tensor] | None = None, pretrained: bool = False
) -> tuple[nn.Module, Preprocessing]:
    """The module of an architecture and its preprocessing: with these weights, with the hub's, or random."""
    built: tuple[nn.Module, Preprocessing] = resolved(SOURCES[architecture.kind].build)(
        architecture, state=state, pretrained=pretrained
    )
    return built


def assemble(
    module: nn.Module,
    architecture: Architecture,
    preprocessing: Preprocessing,
    classes: tuple[str, ...],
    alias: str,
    provenance: Provenance,
    *,
    told: "Told | None" = None,
) -> Model:
    """A Model around a module, whose anatomy is read from the module, or from forward passes where its source has no
    attributes to read it from, and where its user said of it what they do not show (told)."""
    told = told or getattr(module, "told", None)
    if told is not None:
        traced: Model = resolved("vitlens.models.wrap:wrapped")(
            module, architecture, preprocessing, classes, alias, provenance, told=told
        )
        return traced
    if isinstance(module, SwinTransformer):
        provenance = _padded(module, preprocessing, provenance)
    return Model(
        module,
        alias=alias,
        anatomy=read_anatomy(module, image_size=preprocessing.size),
        preprocessing=preprocessing,
        classes=classes,
        provenance=provenance,
        architecture=asdict(architecture),
    )


def _padded(module: SwinTransformer, preprocessing: Preprocessing, provenance: Provenance) -> Provenance:
    """The provenance with a note on maps that windows do not divide at this size."""
    note = padding_note(module.config, preprocessing.size)
    return replace(provenance, notes=tuple(dict.fromkeys((*provenance.notes, note)))) if note else provenance


def versions() -> dict[str, str]:
    """The versions of the libraries that determine a model's outputs."""
    return {"vitlens": __version__} | {name: version(name) for name in ("torch", "torchvision", "timm")}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's random state is seeded; the caller's state is restored on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def default_classes(count: int) -> tuple[str, ...]:
    """ImageNet's class names for 1000 logits, numbers for any other count."""
    return imagenet_classes() if count == 1000 else tuple(str(index) for index in range(count))


def count_classes(module: nn.Module, size: tuple[int, int]) -> int:
    """The number of logits, measured in a forward pass, as every library stores it elsewhere."""
    device = next((parameter.device for parameter in module.parameters()), None)
    with evaluating(module), torch.no_grad():
        logits = module(torch.zeros(1, 3, *size, device=device))
    return int(logits.shape[-1])
