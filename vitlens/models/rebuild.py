"""From an architecture, as data, to a model; and models made from a model: without some of its heads, for other
classes, with random weights, for another size."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import InputError, ModelError, UnsupportedError, argument, in_one_line
from vitlens.files import sha256
from vitlens.models.anatomy import read_anatomy
from vitlens.models.configs import CLASSES
from vitlens.models.cutting import UNCUT, add_means, cut_heads, output_projection
from vitlens.models.hooks import is_changed, is_within_context, per_model, watching
from vitlens.models.language_image import LanguageImage
from vitlens.models.model import Model, Provenance, first_output, mean_of_pair, two_classes_of_pair
from vitlens.models.sources.registry import SOURCES, ModelRequest
from vitlens.models.swin import SwinTransformer, padding_note
from vitlens.models.vit import VisionTransformer
from vitlens.models.weights import load_strictly
from vitlens.names import imagenet_classes
from vitlens.preprocessing import Preprocessing, Side, require_side_lengths
from vitlens.references import resolved
from vitlens.typed import between, length, read_as
from vitlens.version import __version__

if TYPE_CHECKING:
    from vitlens.models.structure import Told

Overrides = Mapping[str, int | float | bool | str | list[int]]
_IMAGENET: Final = 1000  # its classes


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
        """Return an architecture from the JSON of dataclasses.asdict. Raises ModelError for anything else."""
        return read_as(cls, dict(fields), source="an architecture written by vitlens", error=ModelError)


def build(
    architecture: Architecture, *, state: Mapping[str, Tensor] | None = None, pretrained: bool = False
) -> tuple[nn.Module, Preprocessing]:
    """Return the module of an architecture, without its removed heads, and its preprocessing: with these weights, with
    the hub's, or random.

    Raises ModelError for weights that do not fit.
    """
    make = resolved(SOURCES[architecture.kind].build)
    cut = architecture.pruned
    weights = state
    if cut and state is not None:  # libraries load whole models only: lost heads are random, and cut out again
        whole = make(architecture, state=None, pretrained=False)[0]
        inside = tuple(f"{name}." for name in cut)
        weights = {key: value for key, value in state.items() if not key.startswith(inside)}
        weights |= {key: value for key, value in whole.state_dict().items() if key.startswith(inside)}
    built: tuple[nn.Module, Preprocessing] = make(architecture, state=weights, pretrained=pretrained)
    cut_heads(built[0], cut)
    for name in cut if state is not None else ():
        start = f"{name}."
        own = {key.removeprefix(start): value for key, value in (state or {}).items() if key.startswith(start)}
        load_strictly(built[0].get_submodule(name), own, where=f"{name} of {architecture.name}")
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
    """Return a Model around a module, whose anatomy is read from the module, or from forward passes where its source
    has no attributes to read it from, and where its user said of it what they do not show (told)."""
    told = told or getattr(module, "told", None)
    if told is not None:
        traced: Model = resolved("vitlens.models.wrap:wrapped")(
            module, architecture, preprocessing, classes, alias, provenance, told=told
        )
        return traced
    note = padding_note(module.config, preprocessing.size) if isinstance(module, SwinTransformer) else ""
    if note:
        provenance = replace(provenance, notes=tuple(dict.fromkeys((*provenance.notes, note))))
    anatomy = read_anatomy(module, image_size=preprocessing.size)
    is_single = architecture.classes == 1 and len(classes) == 2  # one logit
    return Model(
        module,
        alias=alias,
        anatomy=anatomy,
        preprocessing=preprocessing,
        classes=classes,
        provenance=provenance,
        architecture=asdict(architecture),
        read_output=two_classes_of_pair if is_single else mean_of_pair,
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
    """Return a model around this module, on the device of the first, of which it has what is not given; the anatomy is
    read again in the same way."""
    classes = model.classes if classes is None else classes
    preprocessing = preprocessing or model.preprocessing
    made = assemble(module, architecture, preprocessing, classes, model.alias, provenance, told=model.told)
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
    made.mean, made.std = made.mean.to(dtype), made.std.to(dtype)
    return made.to(model.device)


_version = cache(version)  # which reads the disk each time


def versions() -> dict[str, str]:
    """Return the versions of the libraries that determine a model's outputs."""
    return {"vitlens": __version__} | {name: _version(name) for name in ("torch", "torchvision", "timm")}


def provenance_of(
    request: ModelRequest, notes: Sequence[str], *, hub: str = "hub", digest: str | None = None, **libraries: str
) -> Provenance:
    """Return the provenance of a requested model: of its weights file, of random weights, or of what it was loaded from
    (hub).

    digest: the SHA-256 of weights that are in no file of the request; libraries: further versions.
    """
    file = request.file
    weights = file.name if file else "random" if request.random else hub
    return Provenance(request.name, weights, sha256(file) if file else digest, versions() | libraries, tuple(notes))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's random state is seeded; the caller's state is restored on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def default_classes(count: int) -> tuple[str, ...]:
    """Return ImageNet's class names for 1000 logits, numbers for any other count; one logit counts as two classes."""
    return imagenet_classes() if count == _IMAGENET else numbered_classes(count)


def numbered_classes(count: int) -> tuple[str, ...]:
    """Return numbers as the names of classes; one logit counts as two classes."""
    return tuple(str(index) for index in range(max(count, 2)))


def both_classes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of classes, of one logit with one name both: its complement comes first."""
    if len(names) != 1:
        return names
    return ("0", "1") if names == ("0",) else (f"not {names[0]}", names[0])


def count_classes(module: nn.Module, size: tuple[int, int]) -> int:
    """Return the number of logits, measured in a forward pass, as every library stores it elsewhere."""
    device = next((parameter.device for parameter in module.parameters()), None)
    with evaluating(module), torch.no_grad():
        logits = module(torch.zeros(1, 3, *size, device=device))
    return int(logits.shape[-1])


def untrained_like(model: Model, *, seed: int, size: tuple[int, int] | None = None) -> Model:
    """Return a model of the same architecture and classes with seeded random weights, on the same device.

    size: (height, width) in pixels of its input, None for the model's. A ViT has positions for another size; our
    ResNets keep their stem. Raises UnsupportedError for a model whose architecture is only known by the code that made
    it, ModelError where it cannot be built or does not run at this size.
    """
    source = SOURCES.get(str(model.architecture.get("kind")))
    if source is None or not source.build:
        raise UnsupportedError(
            f"expected an architecture that can be built anew with random weights, found {model.alias}, which only its "
            "own code can make; try timm:NAME, torchvision:NAME or a run folder"
        )
    architecture = Architecture.from_json(model.architecture)
    preprocessing = model.preprocessing
    built_for = model.input_size
    if size is not None:
        require_side_lengths(size)
        architecture = replace(architecture, image_size=size)
        preprocessing = preprocessing.at_size(size)
        if not source.any_size or model.anatomy.layout is not None:
            built_for = size  # but for a ResNet, which accepts any size, and has another stem below 64 px
    at = "{}x{} px".format(*preprocessing.size)
    with in_one_line(f"{model.alias} to run at {at}", f"check {argument('sizes')}"), seeded(seed):
        module, _ = build(replace(architecture, image_size=built_for))
        count_classes(module, preprocessing.size)
    provenance = Provenance(model.provenance.name, "random", None, versions())
    made = rebuilt(model, module, architecture, provenance, preprocessing=preprocessing)
    return made.eval().requires_grad_(False)


def for_classes(model: Model, classes: tuple[str, ...]) -> Model:
    """Return the model with a zero-initialised head for these classes (Dosovitskiy 2021, section 3.2), unless it has
    them.

    Our ViTs get position embeddings for the grid of the input size, which are trained like the others. The changes are
    recorded in the provenance's notes. The given model is not changed. Raises UnsupportedError for a model whose
    classifier cannot be identified, and inside `intervene`.
    """
    module = _copy_of(model)
    notes = list(model.provenance.notes)
    if isinstance(module, VisionTransformer) and module.config.image_size != model.input_size:
        notes.append(_resize_positions(module, model.input_size))
    if model.classes != classes:
        _zero_head(model, module, len(classes))
        known = len(model.classes)
        change = f"replaced the head of {known} classes by one of" if known else "added a head for"
        notes.append(f"{change} the data's {len(classes)}{'' if known else ' classes'}, all zeros")
    architecture = Architecture.from_json(model.architecture)
    logits = 1 if model.has_single_logit and model.classes == classes else len(classes)
    architecture = replace(architecture, classes=logits, image_size=model.input_size)
    wanted = f"expected {len(classes)} logits of {model.alias} with a new head"
    try:
        made = rebuilt(model, module, architecture, replace(model.provenance, notes=tuple(notes)), classes=classes)
    except InputError as error:  # of a traced module that has another number of logits
        raise UnsupportedError(f"{wanted}: {error}") from error
    if (outputs := count_classes(made, model.input_size)) != len(classes):
        raise UnsupportedError(f"{wanted}, found {outputs}")
    return made.eval().requires_grad_(False)


def _copy_of(model: Model) -> nn.Module:
    """Return a copy of the model's module.

    Raises UnsupportedError inside a context that changes it, such as `intervene`.
    """
    if is_within_context(model.module):
        raise UnsupportedError(
            f"expected {model.alias} as it is, found it changed by a context such as intervene, which a copy would not "
            "have; leave the context first"
        )
    return deepcopy(model.module)


def _resize_positions(module: VisionTransformer, size: tuple[int, int]) -> str:
    """Resize the position embeddings of our ViT to another image size; a note of it for the provenance."""
    (height, width), (new_height, new_width) = module.config.image_size, size
    config = replace(module.config, image_size=size)
    if module.pos_embed is not None:
        resized = module.positions(config.layout.grid).detach()
        module.pos_embed = nn.Parameter(resized) if isinstance(module.pos_embed, nn.Parameter) else resized
    module.config = config
    done = {"learned": "resized the position embeddings", "none": "changed the image size"}
    change = done.get(str(config.positions), "computed the position embeddings again")
    return f"{change} from {height}x{width} to {new_height}x{new_width} px"


def _zero_head(model: Model, module: Any, classes: int) -> None:
    """Give a copy of the model's module a zero-initialised classifier for this number of classes."""
    require_replaceable(model)
    if _resets_its_classifier(module):
        module.reset_classifier(classes)
        paths = named_classifiers(module)
    else:
        paths = classifiers(model)
        for path in paths:
            old = module.get_submodule(path)
            parent, _, last = path.rpartition(".")
            new = nn.Linear(old.in_features, classes, bias=old.bias is not None)
            setattr(module.get_submodule(parent), last, new.to(old.weight.device, old.weight.dtype))
    for path in paths:
        for parameter in module.get_submodule(path).parameters():
            nn.init.zeros_(parameter)


def require_replaceable(model: Model) -> None:
    """Raise UnsupportedError for a model whose head cannot be replaced."""
    if isinstance(model.module, LanguageImage):
        raise UnsupportedError(f"expected a model that ends in a classifier, found the image tower {model.alias!r}")
    for path in () if _resets_its_classifier(model.module) else classifiers(model):
        found = model.module.get_submodule(path)
        if not isinstance(found, nn.Linear):
            raise UnsupportedError(f"expected a linear layer {path!r} of {model.alias}, found {type(found).__name__}")


def _resets_its_classifier(module: Any) -> bool:
    """Return True if it has timm's method, as some heads are more than a linear layer; a user's may mean something
    else."""
    ours = type(module).__module__.startswith("vitlens.") or getattr(module, "pretrained_cfg", None) is not None
    return ours and hasattr(module, "reset_classifier")


def classifiers(model: Model) -> tuple[str, ...]:
    """Names of the modules that compute the logits: one, or two of a distilled model.

    For a module whose structure was read from forward passes, the linear layer whose outputs are the logits; else as
    its library or the names of its layers say. Raises UnsupportedError for a model without such a layer.
    """
    return named_classifiers(model.module) if model.told is None else _observed_classifier(model)


def named_classifiers(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that compute the logits, by timm's pretrained_cfg or by their names and order."""
    config = getattr(model, "pretrained_cfg", None)
    if named := config.get("classifier") if isinstance(config, dict) else None:
        return (named,) if isinstance(named, str) else tuple(named)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UnsupportedError("expected a model that ends in a linear layer, found none; choose another model")
    return ("head", "head_dist") if linear[-1] == "head_dist" else (linear[-1],)


@per_model
def _observed_classifier(model: Model) -> tuple[str, ...]:
    """Return the linear layer whose outputs are what the module returns as logits, in a forward pass of noise."""
    outputs: dict[str, Tensor] = {}
    linear = [name for name, layer in model.module.named_modules() if isinstance(layer, nn.Linear)]
    noise = torch.rand(2, 3, *model.input_size, generator=torch.Generator().manual_seed(0)).to(model.device)
    keep = watching(model.module, linear, lambda name, _arguments, output: outputs.update({name: output}))
    with evaluating(model), torch.no_grad(), keep:
        logits = first_output(model.module(model.prepare(noise)))
    last = []
    for name, output in outputs.items():
        if output.numel() == logits.numel() and torch.equal(output.reshape(logits.shape), logits):  # or one, squeezed
            last.append(name)
    if not last:
        raise UnsupportedError(
            f"expected the logits of {model.alias} to be the output of a linear layer, found none whose outputs they "
            f"are (of {len(linear)}); end forward in an nn.Linear"
        )
    return (last[-1],)


def prune_heads(
    model: Model, heads: Mapping[int, Collection[int]], *, means: Mapping[int, Tensor] | None = None
) -> Model:
    """Return a copy of the model without these heads: without their rows of the qkv and columns of the output
    projection.

    heads: by layer, both counted from 0. The logits are those of the model with the heads set to zero; with means
    (each head's mean output over tokens and images, (heads, head_dim) by layer), those with each head at its mean,
    which is added to the output projection's bias. A layer without any heads left outputs its bias and no longer counts
    as an attention layer: later layers' numbers decrease by one. The copy can be saved, loaded and pruned again; the
    original is not changed. Raises InputError for a head that does not exist and for a mean per token (which a bias
    cannot hold), UnsupportedError for attention that cannot be cut (ours, timm's standard and torchvision's can), and
    inside `intervene` or with a user's hook.
    """
    names = model.anatomy.attention_modules
    counts = {name: part.heads for name, part in model.anatomy.parts.items()}
    chosen = {layer: sorted(set(removed)) for layer, removed in sorted(heads.items()) if removed}
    if not chosen:
        raise InputError("expected at least one head to remove, found none; give {layer: heads}")
    for layer, removed in chosen.items():
        if not 0 <= layer < len(names):
            raise InputError(f"expected a layer from 0 to {len(names) - 1} of {model.alias}, found {layer}")
        attention = model.module.get_submodule(names[layer])
        output_projection(attention)
        if is_changed(attention):
            raise UnsupportedError(
                f"expected {names[layer]} of {model.alias} as it is, found it changed by an intervention, a hook or "
                "another forward; leave the context or remove the hook first"
            )
        if model.anatomy.family == "windowed":
            raise UnsupportedError(f"expected attention that can be cut, found the windows of {model.alias}; {UNCUT}")
        count = counts[names[layer]]
        if wrong := [head for head in removed if not 0 <= head < count]:
            raise InputError(
                f"expected a head from 0 to {count - 1} in layer {layer} of {model.alias}, found {wrong[0]}"
            )
    module = _copy_of(model)
    architecture = Architecture.from_json(model.architecture)
    record = dict(architecture.pruned)  # in the numbering of the whole model
    for layer, removed in chosen.items():
        name = names[layer]
        if means is not None:
            add_means(module.get_submodule(name), removed, means.get(layer), layer=layer)
        gone = record.get(name, [])
        left = [head for head in range(counts[name] + len(gone)) if head not in gone]
        record[name] = sorted([*gone, *(left[head] for head in removed)])
    cut_heads(module, {names[layer]: removed for layer, removed in chosen.items()})
    note = f"removed {sum(map(len, chosen.values()))} of {sum(counts[name] for name in names)} heads"
    provenance = replace(model.provenance, notes=(*model.provenance.notes, note))
    return rebuilt(model, module, replace(architecture, pruned=record), provenance).train(model.training)
