"""Models that are made from another model, which is not changed.

They have random weights, another size, other classes, or fewer heads.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import InputError, UnsupportedError, argument, in_one_line
from vitlens.models.cutting import UNCUT, add_means, cut_heads, output_projection
from vitlens.models.hooks import Arguments, is_changed, is_within_context, watching
from vitlens.models.language_image import LanguageImage
from vitlens.models.memo import per_model
from vitlens.models.model import Model, Provenance, first_output
from vitlens.models.numbering import no_layer
from vitlens.models.rebuild import Architecture, build, count_classes, rebuilt, seeded, versions
from vitlens.models.requirement import requirement
from vitlens.models.sources.registry import SOURCES
from vitlens.models.vit import VisionTransformer
from vitlens.preprocessing import require_side_lengths

_TRIAL_IMAGES: Final = 2


def untrained_like(model: Model, *, seed: int, size: tuple[int, int] | None = None) -> Model:
    """Return a model of the same architecture and classes with seeded random weights.

    It is on the same device. With another size, a ViT has positions for this size, and our ResNets
    keep their stem. Raises UnsupportedError for a model that only the user's code can build,
    ModelError if it cannot be built or does not run at this size.

    size: (height, width) in pixels of its input; None means the size of `model`.
    """
    source = SOURCES.get(str(model.architecture.get("kind")))
    if source is None or not source.build:
        raise UnsupportedError(
            "expected an architecture that can be built anew with random weights, found "
            f"{model.alias}, which only its own code can make; try timm:NAME, torchvision:NAME or "
            "a run folder"
        )
    # architecture.image_size is the size that the model is used at, build_size the one that its
    # module is built for. They differ only for our ResNets.
    architecture = Architecture.from_json(model.architecture)
    preprocessing = model.preprocessing
    build_size = model.input_size
    if size is not None:
        require_side_lengths(size)
        architecture = replace(architecture, image_size=size)
        preprocessing = preprocessing.at_size(size)
        has_positions = model.anatomy.layout is not None
        # Our ResNets accept any size. Built for less than 64 px, they would have another stem than
        # the model, so that they are built for its size.
        if has_positions or not source.any_size:
            build_size = size
    at = "{}x{} px".format(*preprocessing.size)
    with in_one_line(f"{model.alias} to run at {at}", f"check {argument('sizes')}"), seeded(seed):
        module, _ = build(replace(architecture, image_size=build_size))
        count_classes(module, preprocessing.size)
    provenance = Provenance(model.provenance.name, weights="random", versions=versions())
    untrained = rebuilt(model, module, architecture, provenance, preprocessing=preprocessing)
    return untrained.eval().requires_grad_(False)


def for_classes(model: Model, classes: tuple[str, ...]) -> Model:
    """Return the model with a zero-initialised head for these classes, unless it has them.

    See Dosovitskiy 2021, section 3.2. Our ViTs get position embeddings for the grid of the input
    size, which are trained like the other parameters. The notes of the provenance list the changes.
    `model` is not changed. Raises UnsupportedError if its classifier cannot be identified, and
    inside `intervene`.
    """
    module = _copy_of(model)
    notes = list(model.provenance.notes)
    if isinstance(module, VisionTransformer) and module.config.image_size != model.input_size:
        notes.append(_resize_positions(module, model.input_size))
    if model.classes != classes:
        _zero_head(model, module, len(classes))
        if model.classes:
            old_count = len(model.classes)
            notes.append(
                f"replaced the head of {old_count} classes by one of the data's {len(classes)}, "
                "all zeros"
            )
        else:
            notes.append(f"added a head for the data's {len(classes)} classes, all zeros")
    architecture = Architecture.from_json(model.architecture)
    keeps_single_logit = model.has_single_logit and model.classes == classes
    architecture = replace(
        architecture,
        classes=1 if keeps_single_logit else len(classes),
        image_size=model.input_size,
    )
    provenance = replace(model.provenance, notes=tuple(notes))
    expected = f"expected {len(classes)} logits of {model.alias} with a new head"
    try:
        model_for_classes = rebuilt(model, module, architecture, provenance, classes=classes)
    except InputError as error:  # raised for a traced module with another number of logits
        raise UnsupportedError(f"{expected}: {error}") from error
    # two outputs for a single logit, which the model turns into those of two classes
    outputs = count_classes(model_for_classes, model.input_size)
    if outputs != len(classes):
        raise UnsupportedError(f"{expected}, found {outputs}")
    return model_for_classes.eval().requires_grad_(False)


def _copy_of(model: Model) -> nn.Module:
    """Return a copy of the model's module.

    Raises UnsupportedError inside a context that changes it, such as `intervene`.
    """
    if is_within_context(model.module):
        raise UnsupportedError(
            f"expected an unchanged {model.alias}, found it changed by a context such as "
            "intervene, which a copy would lack; leave the context first"
        )
    return deepcopy(model.module)


def _resize_positions(module: VisionTransformer, size: tuple[int, int]) -> str:
    """Resize the position embeddings of our ViT to another image size.

    Return a note for the provenance.
    """
    height, width = module.config.image_size
    new_height, new_width = size
    config = replace(module.config, image_size=size)
    if module.pos_embed is not None:
        resized = module.positions(config.layout.grid).detach()
        if isinstance(module.pos_embed, nn.Parameter):
            resized = nn.Parameter(resized)
        module.pos_embed = resized
    module.config = config
    changes = {"learned": "resized the position embeddings", "none": "changed the image size"}
    change = changes.get(str(config.positions), "computed the position embeddings again")
    return f"{change} from {height}x{width} to {new_height}x{new_width} px"


def _zero_head(model: Model, module: Any, classes: int) -> None:
    """Replace the classifier of a copy of the model's module by one of zeros."""
    require_replaceable(model)
    if _resets_its_classifier(module):
        module.reset_classifier(classes)
        paths = named_classifiers(module)
    else:
        paths = classifiers(model)
        for path in paths:
            old_head = module.get_submodule(path)
            head = nn.Linear(old_head.in_features, classes, bias=old_head.bias is not None)
            head = head.to(old_head.weight.device, old_head.weight.dtype)
            parent, _, attribute = path.rpartition(".")
            setattr(module.get_submodule(parent), attribute, head)
    for path in paths:
        for parameter in module.get_submodule(path).parameters():
            nn.init.zeros_(parameter)


@requirement("new head")
def require_replaceable(model: Model) -> None:
    """Raise UnsupportedError for a model whose head cannot be replaced."""
    if isinstance(model.module, LanguageImage):
        raise UnsupportedError(
            f"expected a model that ends in a classifier, found the image tower {model.alias!r}"
        )
    if _resets_its_classifier(model.module):
        return
    for path in classifiers(model):
        layer = model.module.get_submodule(path)
        if not isinstance(layer, nn.Linear):
            raise UnsupportedError(
                f"expected a linear layer {path!r} of {model.alias}, found {type(layer).__name__}"
            )


def _resets_its_classifier(module: Any) -> bool:
    """Return True for a module of ours or of timm with a method that replaces its head.

    Some heads are more than a linear layer. A user's method of this name may do something else.
    """
    is_ours = type(module).__module__.startswith("vitlens.")
    is_timm = getattr(module, "pretrained_cfg", None) is not None
    return (is_ours or is_timm) and hasattr(module, "reset_classifier")


def classifiers(model: Model) -> tuple[str, ...]:
    """Return the names of the modules that compute the logits: one, or two in a distilled model.

    If the structure was read from forward passes, the classifier is the linear layer that returns
    the logits. Otherwise, the library's attributes or the names of its layers show it. Raises
    UnsupportedError for a model without such a layer.
    """
    if model.structure_hints is not None:
        return _observed_classifier(model)
    return named_classifiers(model.module)


def named_classifiers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that compute the logits.

    They are read from timm's pretrained_cfg. Without it, the classifier is the last linear layer,
    and DeiT's head_dist comes with its head.
    """
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and config.get("classifier"):
        classifier = config["classifier"]
        return (classifier,) if isinstance(classifier, str) else tuple(classifier)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UnsupportedError(
            "expected a model that ends in a linear layer, found none; choose another model"
        )
    if linear[-1] == "head_dist":
        return ("head", "head_dist")
    return (linear[-1],)


@per_model
def _observed_classifier(model: Model) -> tuple[str, ...]:
    """Return the linear layer that returns the logits in a forward pass of noise."""
    outputs: dict[str, Tensor] = {}

    def record(name: str, _arguments: Arguments, output: Tensor) -> None:
        outputs[name] = output

    linear = [name for name, layer in model.module.named_modules() if isinstance(layer, nn.Linear)]
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(_TRIAL_IMAGES, 3, *model.input_size, generator=generator).to(model.device)
    with evaluating(model), torch.no_grad(), watching(model.module, linear, record):
        logits = first_output(model.module(model.prepare(noise)))
    with_these_outputs = []
    for name, output in outputs.items():
        # a single logit may be squeezed
        if output.numel() == logits.numel() and torch.equal(output.reshape(logits.shape), logits):
            with_these_outputs.append(name)
    if not with_these_outputs:
        raise UnsupportedError(
            f"expected the logits of {model.alias} to be the output of a linear layer, "
            f"found none that gives them (of {len(linear)}); end forward in an nn.Linear"
        )
    return (with_these_outputs[-1],)


def prune_heads(
    model: Model, heads: Mapping[int, Collection[int]], *, means: Mapping[int, Tensor] | None = None
) -> Model:
    """Return a copy of the model without these heads.

    The copy lacks their rows of the qkv projection and their columns of the output projection. Its
    logits are those of the model with the heads set to zero or, with means, to their means. A layer
    without any heads left outputs its bias: it is then a block without attention, and the other
    layers keep their numbers. The copy can be saved, loaded and pruned again; the original is not
    changed.

    Raises InputError for a head that does not exist, and for a mean per token, which a bias cannot
    hold. Raises UnsupportedError for attention that cannot be cut (ours, timm's standard and
    torchvision's can), and inside `intervene` or with a user's hook.

    heads: the heads by layer, both counted from 0.
    means: the mean output of each head over tokens and images, (heads, head_dim) by layer. The
        means of the removed heads are added to the bias of the output projection.
    """
    removed_by_layer = {
        layer: sorted(set(removed)) for layer, removed in sorted(heads.items()) if removed
    }
    if not removed_by_layer:
        raise InputError("expected at least one head to remove, found none; give {layer: heads}")
    for layer, removed in removed_by_layer.items():
        _require_prunable(model, layer, removed)
    names = model.anatomy.attention_by_layer
    counts = {name: model.anatomy.parts[name].heads for name in names.values()}
    module = _copy_of(model)
    architecture = Architecture.from_json(model.architecture)
    # heads count as in the model now; `pruned` counts them as in the whole model
    pruned = dict(architecture.pruned)
    for layer, removed in removed_by_layer.items():
        name = names[layer]
        if means is not None:
            add_means(module.get_submodule(name), removed, means.get(layer), layer=layer)
        removed_before = pruned.get(name, [])
        whole_count = counts[name] + len(removed_before)
        remaining = [head for head in range(whole_count) if head not in removed_before]
        pruned[name] = sorted(removed_before + [remaining[head] for head in removed])
    cut_heads(module, {names[layer]: removed for layer, removed in removed_by_layer.items()})
    removed_count = sum(len(removed) for removed in removed_by_layer.values())
    note = f"removed {removed_count} of {sum(counts.values())} heads"
    provenance = replace(model.provenance, notes=(*model.provenance.notes, note))
    return rebuilt(model, module, replace(architecture, pruned=pruned), provenance).train(
        model.training
    )


def _require_prunable(model: Model, layer: int, heads: Sequence[int]) -> None:
    """Raise an error unless these heads of a layer exist and can be cut.

    Raises InputError for a layer or head that does not exist, UnsupportedError for attention that
    cannot be cut.
    """
    names = model.anatomy.attention_by_layer
    if layer not in names:
        raise InputError(no_layer([*names], layer, model.alias))
    name = names[layer]
    attention = model.module.get_submodule(name)
    output_projection(attention)
    if is_changed(attention):
        raise UnsupportedError(
            f"expected an unchanged {name} of {model.alias}, found it changed by an "
            "intervention, a hook or another forward; leave the context or remove the "
            "hook first"
        )
    if model.anatomy.family == "windowed":
        raise UnsupportedError(
            f"expected attention that can be cut, found the windows of {model.alias}; {UNCUT}"
        )
    count = model.anatomy.parts[name].heads
    for head in heads:
        if not 0 <= head < count:
            raise InputError(
                f"expected a head from 0 to {count - 1} in layer {layer} of {model.alias}, found "
                f"{head}"
            )
