"""open_clip's models (`open-clip:ARCH/TAG`): the image tower as a model, with its text tower.

open_clip is an optional dependency. Only this module imports it, and only if it is needed.
"""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn

from vitlens.errors import ModelError, UnknownNameError, argument, in_one_line
from vitlens.models.anatomy import Anatomy, read_anatomy, read_layout
from vitlens.models.fitting import fit_names
from vitlens.models.language_image import LanguageImage, TextTower, Tokenizer
from vitlens.models.model import Model
from vitlens.models.rebuild import count_classes, provenance_of, seeded
from vitlens.models.sources.hub import endpoint, pretrained_download
from vitlens.models.sources.registry import ModelRequest
from vitlens.models.weights import read_weights, require_finite, to_save
from vitlens.preprocessing import Interpolation, Preprocessing
from vitlens.shapes import TokenLayout
from vitlens.signatures import is_safetensors

PREFIX: Final = "open-clip:"
_HINT: Final = f"vitlens models '{PREFIX}*'"
_OF_JAX: Final = (".npz", ".npy")  # suffixes of JAX's weights, which open_clip converts
_MOST_LISTED: Final = 6  # tags in a message
# settings of the preprocessing in training
_TRAINED: Final = ("mean", "std", "interpolation", "resize_mode")
_CONTEXT: Final = 77  # most tokens of a text, if the configuration does not say it (CLIP's)


def load(request: ModelRequest) -> Model:
    """Return the image tower of `open-clip:ARCH[/TAG]` as a model with embeddings as outputs.

    TAG is open_clip's name of the weights. They are downloaded unless a file or random weights are
    requested. QuickGELU and the preprocessing are those of the tag. Without a tag, QuickGELU is the
    architecture's default, and the preprocessing what all its weights share. Raises ModelError if
    open_clip is not installed, the hub is not reachable or weights do not fit. Raises
    UnknownNameError for a name that is not in open_clip's lists.
    """
    library = open_clip()
    file = request.file
    pretrained = not (file or request.random)
    arch, _, tag = request.short.partition("/")
    _require_known(arch, tag, needs_tag=pretrained)
    config, notes = configuration(arch, tag or None)
    full_name = f"{PREFIX}{arch}"
    if tag and pretrained:
        full_name += f"/{tag}"
    preprocess_config = {key: value for key, value in config.items() if key != "quick_gelu"}
    options: dict[str, Any] = {
        "quick_gelu": config["quick_gelu"],
        "force_image_size": request.image_size,
        "force_preprocess_cfg": preprocess_config,
        # the meta device if only shapes are needed, which get_default_device() of an older torch
        # does not know
        "device": str(torch.empty(0).device),
        "pretrained_text": False,  # otherwise a tower of another library downloads weights as well
    }
    with (
        seeded(request.seed),
        in_one_line(f"open_clip to build {full_name}", f"see {_HINT}"),
        quietly(),
    ):
        if pretrained:
            with pretrained_download(full_name, endpoint()):
                model: nn.Module = library.create_model(
                    arch, pretrained=tag, require_pretrained=True, **options
                )
        else:
            model = library.create_model(arch, **options)
    if file is not None:
        _load_file(model, file, arch)
    model.eval().requires_grad_(False)
    preprocessing = _preprocessing(model, config)
    context = int(_of_texts(arch).get("context_length", _CONTEXT))
    tower = TextTower(model, lambda: tokenizer(arch), context, request.name)
    wrapped = _wrap_tower(model.visual, tower, preprocessing.size)
    size = "{}x{} px".format(*preprocessing.size)
    with in_one_line(f"{full_name} at {size} to run", f"check {argument('image_size')}"):
        count_classes(wrapped, preprocessing.size)
    return Model(
        wrapped,
        alias=request.alias,
        anatomy=_anatomy(wrapped, preprocessing.size),
        preprocessing=preprocessing,
        classes=(),  # none without prompts
        provenance=provenance_of(request, notes, open_clip=version("open_clip_torch")),
        architecture={"kind": request.source.kind, "name": f"{arch}/{tag}" if tag else arch},
    ).eval()


def _require_known(arch: str, tag: str, *, needs_tag: bool) -> None:
    """Raise an error unless open_clip has this architecture and weights with this tag.

    needs_tag: whether the weights of a tag are requested.
    """
    library = open_clip()
    if arch not in library.list_models():
        raise UnknownNameError("open_clip architecture", arch, library.list_models(), hint=_HINT)
    tags = library.list_pretrained_tags_by_model(arch)
    if tag and tags and not library.get_pretrained_cfg(arch, tag):
        raise UnknownNameError(f"weights of {PREFIX}{arch}", tag, tags, hint=_HINT)
    has_unlisted_tag = tag and not tags  # of an architecture without weights
    lacks_tag = needs_tag and not tag
    if has_unlisted_tag or lacks_tag:
        advice = "give "
        if tags:
            advice = f"write {PREFIX}{arch}/TAG (tags: {', '.join(tags[:_MOST_LISTED])}), "
        raise ModelError(
            f"expected known weights of {PREFIX}{arch}, found none; "
            f"{advice}{argument('weights', 'FILE')}, or {argument('random_weights', True)}"
        )


def _load_file(model: nn.Module, file: Path, arch: str) -> None:
    """Load a weights file by open_clip's loader, without its code and without prefixes of names."""
    if not file.is_file():
        raise ModelError(
            f"expected a weights file, found nothing at {file}; give {argument('weights', 'FILE')}"
        )
    with TemporaryDirectory() as folder:
        source = file
        if file.suffix not in _OF_JAX:
            weights = read_weights(file)
            state, notes = fit_names(weights.state, model.state_dict())
            if weights.notes or notes or not is_safetensors(file):
                source = Path(folder) / "weights.safetensors"
                save_file(to_save(state), source)
        try:
            with quietly():
                open_clip("factory").load_checkpoint(
                    model, str(source), strict=True, weights_only=True
                )
        except Exception as error:  # torch's reader raises a dozen types for a damaged file
            reason = _loading_fault(error)
            raise ModelError(
                f"weights in {file} do not fit {PREFIX}{arch}: {reason[:160]}; check ARCH"
            ) from error
    require_finite(model.state_dict(), file)


def _loading_fault(error: Exception) -> str:
    """Return the line of a loading error that names keys or sizes, else its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if "key(s)" in line or "size mismatch" in line:
            return line
    return lines[0] if lines else type(error).__name__


def _preprocessing(model: nn.Module, config: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing of open_clip's evaluation (`image_transform`).

    The resize_mode of a configuration is "shortest" (resize, then crop), "longest" (resize, then
    pad) or "squash" (resize the whole image).
    """
    settings: dict[str, Any] = open_clip().get_model_preprocess_cfg(model) | dict(config)
    size = settings["size"]
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    resize_mode = settings.get("resize_mode") or "shortest"
    interpolation: Interpolation = "bicubic"
    if settings.get("interpolation") == "bilinear":
        interpolation = "bilinear"
    plain = Preprocessing(
        size=(height, width),
        resize=None,
        interpolation=interpolation,
        mean=_triple(settings["mean"]),
        std=_triple(settings["std"]),
    )
    if resize_mode == "squash":
        return plain
    if resize_mode == "longest":
        grey = int(settings.get("fill_color") or 0)
        return replace(plain, box=plain.size, crop_mode="border", fill=(grey, grey, grey))
    if height == width:
        return replace(plain, resize=height)
    # for an image that is not square, open_clip always uses its default interpolation
    return replace(plain, box=plain.size, interpolation="bicubic")


def _triple(numbers: Any) -> tuple[float, float, float]:
    """Return one number for each channel, from three or from one for all."""
    if not isinstance(numbers, list | tuple):
        numbers = [numbers] * 3
    red, green, blue = numbers
    return float(red), float(green), float(blue)


def _wrap_tower(visual: Any, tower: TextTower, size: tuple[int, int]) -> LanguageImage:
    """Return the image tower with the layout of its tokens, None for a CNN."""
    trunk = getattr(visual, "trunk", None)
    layout = None
    pooling = "avg"
    if trunk is not None:  # a model of timm inside: its attributes give the layout
        layout = read_layout(trunk, size)
        pooling = str(getattr(trunk, "global_pool", "avg"))
    elif getattr(visual, "grid_size", None) is not None:
        rows, columns = visual.grid_size
        height, width = visual.patch_size
        layout = TokenLayout((rows, columns), (height, width), ("cls",))
        pooling = {"tok": "token", "avg": "avg"}.get(visual.pool_type, "map")
    return LanguageImage(visual, tower, layout=layout, pooling=pooling)


def _anatomy(wrapped: LanguageImage, size: tuple[int, int]) -> Anatomy:
    """Return the anatomy, without the image tower's attention pooling, which is not a block."""
    anatomy = read_anatomy(wrapped, image_size=size)
    blocks = []
    has_pooling = getattr(wrapped.visual, "attnpool", None) is not None
    if anatomy.layout is None and has_pooling:  # CLIP's ResNets
        for name, _ in wrapped.named_modules():
            if re.fullmatch(r"visual\.layer\d\.\d+", name):
                blocks.append(name)
        return Anatomy("cnn", tuple(blocks))
    for name in anatomy.blocks:
        holds_others = any(other.startswith(f"{name}.") for other in anatomy.blocks)
        if not holds_others:  # the module around attention pooling holds all blocks
            blocks.append(name)
    return replace(anatomy, blocks=tuple(blocks))


def open_clip(part: str = "") -> Any:
    """Return the library, or one of its modules. Raises ModelError if it is not installed."""
    name = f"open_clip.{part}" if part else "open_clip"
    try:
        with quietly():
            return import_module(name)
    except ImportError as error:
        raise ModelError(
            f"expected open_clip for language and image models, found it missing ({error}); "
            "type pip install 'vitlens[clip]'"
        ) from error


def open_clip_names() -> list[str]:
    """Return every ARCH/TAG with weights in open_clip; none without the extra."""
    try:
        return sorted(f"{arch}/{tag}" for arch, tag in open_clip().list_pretrained())
    except ModelError:
        return []


def template_sets() -> Mapping[str, tuple[str, ...]]:
    """Return open_clip's templates by name, with {} in place of the class.

    They are "simple" (7) and "openai" (80, Radford 2021).
    """
    library = open_clip()
    # open_clip's templates are functions from the class to the prompt
    functions_by_name = {
        "simple": library.SIMPLE_IMAGENET_TEMPLATES,
        "openai": library.OPENAI_IMAGENET_TEMPLATES,
    }
    sets = {}
    for name, functions in functions_by_name.items():
        sets[name] = tuple(str(function("{}")) for function in functions)
    return sets


def imagenet_prompt_names() -> tuple[str, ...]:
    """Return the names of ImageNet's 1000 classes in prompts, in the order of the logits."""
    return tuple(open_clip().IMAGENET_CLASSNAMES)


def configuration(arch: str, tag: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the weights' activation and preprocessing, and notes for the provenance.

    The keys are quick_gelu, mean, std, interpolation and resize_mode. Without a tag, quick_gelu is
    the architecture's default. Of the preprocessing, only values that all weights of the
    architecture share are returned.
    """
    library = open_clip()
    architecture = library.get_model_config(arch) or {}
    default_quick = bool(architecture.get("quick_gelu", False))
    tags = [tag] if tag else library.list_pretrained_tags_by_model(arch)
    configs = [library.get_pretrained_cfg(arch, name) for name in tags] or [{}]
    first_config = configs[0]
    # without a tag, that of the architecture: its tags differ
    is_quick = default_quick
    if tag:  # the only config is that of the tag
        is_quick = bool(first_config.get("quick_gelu", False))
    settings: dict[str, Any] = {"quick_gelu": is_quick}
    is_complete = True  # whether all settings of the preprocessing are known
    for key in _TRAINED:
        value = first_config.get(key)
        if key in first_config and all(config.get(key) == value for config in configs):
            settings[key] = value
        else:
            is_complete = False
    notes = []
    if is_quick != default_quick:
        activation = "QuickGELU" if is_quick else "GELU"
        notes.append(f"{activation}, as the weights {tag!r} were trained with")
    if not tag and not is_complete:
        notes.append("preprocessing by open_clip's default: no weights specify it")
    return settings, tuple(notes)


def tokenizer(arch: str) -> Tokenizer:
    """Return the architecture's tokenizer.

    SigLIP's and some others are downloaded once, and need transformers.
    """
    library = open_clip()
    if not _of_texts(arch).get("hf_tokenizer_name"):
        bundled: Tokenizer = library.get_tokenizer(arch)  # it comes with open_clip
        return bundled
    description = f"the tokenizer of {PREFIX}{arch}"
    advice = "a network is needed once"
    with (
        in_one_line(f"transformers for {description}", "type pip install transformers"),
        pretrained_download(description, endpoint(), advice=advice),
        quietly(),
    ):
        downloaded = library.get_tokenizer(arch)
    return DownloadedTokenizer(downloaded)


@dataclass(frozen=True)
class DownloadedTokenizer:
    """A tokenizer of transformers in open_clip's form, which also counts the tokens of a text.

    tokenizer: open_clip's, which truncates texts without a word.
    """

    tokenizer: Any

    def __call__(self, texts: list[str]) -> torch.Tensor:
        """Return token ids (texts, context)."""
        ids: torch.Tensor = self.tokenizer(texts)
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text without the last two, which `TextTower` counts separately."""
        return list(self.tokenizer.tokenizer(text)["input_ids"])[:-2]


def _of_texts(arch: str) -> dict[str, Any]:
    """Return the configuration of an architecture's text tower."""
    return dict((open_clip().get_model_config(arch) or {}).get("text_cfg", {}))


@contextmanager
def quietly() -> Iterator[None]:
    """Silence open_clip's log and its warning about QuickGELU, which `configuration` handles."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(level)
