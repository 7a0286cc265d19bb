"""A list of every source of models, with one entry for each.

The module is free of torch, because loading, `vitlens models`, completion, docs and tests read it.
To add a source, add its file in this folder and its entry here.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, Literal

from vitlens.errors import ModelError, UnknownNameError, argument, nearest
from vitlens.names import BUNDLED, PRESETS
from vitlens.references import resolved

WeightsFrom = Literal["own", "hub", "none"]
# suffixes of files of weights
WEIGHTS_FILES: Final = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".pth.tar")


@dataclass(frozen=True)
class ModelSource:
    """One source of models.

    A name belongs to a source if it begins with `prefix`, is one of `names`, or is recognised by
    `recognises`.

    kind: the name of the source. It is also in the files that `save` writes, so never change one.
    usage: the form of its models' names.
    help: one sentence about the source.
    example: a name that can be loaded.
    prefix: the beginning of its models' names, or "".
    names: all names of its models, or () if they have a prefix or are paths.
    recognises: a function that recognises its models by path, or None.
    glob: matches a file in each folder that completion offers as a name.
    build: builds an architecture, as "module:function" of (architecture, *, state, pretrained). It
        returns the module, with the weights of the state dict, the hub's or random ones, and its
        preprocessing.
    load: loads a model, as "module:function" of (request). By default, an architecture is built and
        gets its weights.
    restore: builds the model of a file that `save` wrote, as "module:function" of (request,
        architecture, classes, preprocessing). It is only for modules that the user's code builds,
        and does not load the weights.
    list_names: lists all names without the prefix, as "module:function" of no arguments. It is ""
        if the names are in `names` or cannot be listed.
    folder_config: reads preprocessing and classes next to a weights file, as "module:function" of
        (weights file). It returns None if there are none (see timm_folder.py).
    weights: the origin of weights without --weights: "own" (the model includes its weights and
        accepts no others), "hub" (they are downloaded) or "none" (the model must be trained first).
    extra: the extra of vitlens that its library needs, or "".
    texts: whether its models also embed texts.
    own_input: whether --mean and --std are refused.
    any_size: whether a built model accepts images of any size.
    adapters: whether LoRA adapters can be merged into its models.
    """

    kind: str
    usage: str
    help: str
    example: str
    prefix: str = ""
    names: tuple[str, ...] = ()
    recognises: Callable[[str], bool] | None = None
    glob: str = ""
    build: str = ""
    load: str = "vitlens.models.loading:load_built"
    restore: str = ""
    list_names: str = ""
    folder_config: str = ""
    weights: WeightsFrom = "hub"
    extra: str = ""
    texts: bool = False
    own_input: bool = False
    any_size: bool = False
    adapters: bool = False

    @property
    def typed_usage(self) -> str:
        """Return the form of its models' names as the caller types it."""
        return self.usage.replace("--model-file", argument("code_files", flag="model-file"))

    def has(self, name: str) -> bool:
        """Return True if a name has the form of this source; its model may not exist."""
        if self.recognises is not None:
            return self.recognises(name)
        return name in self.names or (self.prefix != "" and name.startswith(self.prefix))

    def all_names(self) -> list[str]:
        """Return every name that can be loaded, with the prefix, except paths.

        There are none if the extra is not installed.
        """
        names = resolved(self.list_names)() if self.list_names else self.names
        return [f"{self.prefix}{name}" for name in names]

    def matching(self, pattern: str) -> list[str]:
        """Return the names that match a pattern, with or without the prefix, or contain it."""
        prefixed = f"{self.prefix}{pattern}"
        names = []
        for name in self.all_names():
            if pattern in name or fnmatch(name, pattern) or fnmatch(name, prefixed):
                names.append(name)
        return names


def _is_other_file(name: str) -> bool:
    """Return True for a file of any suffix but that of Python."""
    return Path(name).is_file() and not name.endswith(".py")


@dataclass(frozen=True)
class ModelRequest:
    """A request for one model.

    source: the source of the model.
    name: the name without alias and weights.
    alias: the name of the model in reports.
    file: a file of weights, or None.
    adapter: the folder of a LoRA adapter, or None.
    random: whether the weights are random.
    arch: the architecture of a weights file that does not describe its model.
    image_size: the (height, width) in pixels, or None for that of the model.
    mean, std: the normalisation of the model's training, or None for that of the source.
    seed: the seed of random weights.
    code_files: every FILE.py:FUNCTION with code that may be run.
    """

    source: ModelSource
    name: str
    alias: str
    file: Path | None = None
    adapter: Path | None = None
    random: bool = False
    arch: str | None = None
    image_size: tuple[int, int] | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    seed: int = 0
    code_files: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """Return the name without the source's prefix."""
        return self.name.removeprefix(self.source.prefix)


# a name belongs to the first source that recognises it; `vitlens models` lists them in this order
_ENTRIES: Final = (
    ModelSource(
        kind="bundled",
        usage=BUNDLED[0],
        help="Trained models that come with vitlens.",
        example=BUNDLED[0],
        names=BUNDLED,
        load="vitlens.models.saved:load_bundled",
        weights="own",
    ),
    ModelSource(
        kind="run",
        usage="a run folder",
        help="A folder that vitlens train or vitlens ablate --prune wrote.",
        example="runs/vit-micro",
        recognises=lambda name: Path(name).is_dir(),
        glob="runs/*/model.safetensors",
        load="vitlens.models.saved:load_run",
        weights="own",
    ),
    ModelSource(
        kind="file",
        usage="a weights file",
        help=(
            "A file that vitlens wrote, or with --arch a state dict as safetensors or of "
            "torch.save."
        ),
        example="weights.safetensors --arch vit-micro",
        recognises=lambda name: name.endswith(WEIGHTS_FILES) or _is_other_file(name),
        load="vitlens.models.saved:load_weights",
        weights="own",
    ),
    ModelSource(
        kind="preset",
        usage="a preset",
        help="Architectures of vitlens, to be trained or given weights.",
        example=PRESETS[0],
        names=PRESETS,
        build="vitlens.models.sources.preset:build",
        weights="none",
        any_size=True,
        adapters=True,
    ),
    ModelSource(
        kind="timm",
        usage="timm:NAME",
        help="timm's models, with the weights of its hub.",
        example="timm:deit_tiny_patch16_224",
        prefix="timm:",
        build="vitlens.models.sources.timm:build",
        list_names="vitlens.models.sources.timm:timm_names",
        adapters=True,
        folder_config="vitlens.models.sources.timm_folder:read_folder_config",
    ),
    ModelSource(
        kind="torchvision",
        usage="torchvision:NAME",
        help="torchvision's classification models, with its weights.",
        example="torchvision:vit_b_16",
        prefix="torchvision:",
        build="vitlens.models.sources.torchvision:build",
        list_names="vitlens.models.sources.torchvision:torchvision_names",
        adapters=True,
    ),
    ModelSource(
        kind="open-clip",
        usage="open-clip:ARCH/TAG",
        help="open_clip's models of images and texts, with the weights of a tag.",
        example="open-clip:ViT-B-32/openai",
        prefix="open-clip:",
        load="vitlens.models.sources.open_clip:load",
        list_names="vitlens.models.sources.open_clip:open_clip_names",
        extra="clip",
        texts=True,
        own_input=True,
    ),
    ModelSource(
        kind="hf",
        usage="hf:REPO|FOLDER",
        help=(
            "transformers' vision models: a repository of the hub, or a folder of save_pretrained."
        ),
        example="hf:google/vit-base-patch16-224",
        prefix="hf:",
        build="vitlens.models.sources.huggingface.loading:build",
        load="vitlens.models.sources.huggingface.loading:load",
        adapters=True,
        extra="hf",
    ),
    ModelSource(
        kind="code",
        usage="FILE.py:FUNCTION with --model-file",
        help="A model that a function of yours returns (vitlens.wrap makes one of any module).",
        example="my_model.py:build --model-file my_model.py:build",
        recognises=lambda name: re.fullmatch(r".+\.py(:.*)?", name, re.DOTALL) is not None,
        load="vitlens.models.sources.code_file:load",
        restore="vitlens.models.sources.code_file:restore",
        weights="own",
        own_input=True,
    ),
)
SOURCES: Final[Mapping[str, ModelSource]] = {source.kind: source for source in _ENTRIES}


def source_of(name: str) -> ModelSource | None:
    """Return the source that a name without alias and weights belongs to."""
    for source in SOURCES.values():
        if source.has(name):
            return source
    return None


def require_source(name: str) -> ModelSource:
    """Return the source of a name.

    Raises ModelError for a path that does not exist, UnknownNameError with the nearest names for
    any other name.
    """
    source = source_of(name)
    if source is None:
        if "/" in name or name.startswith((".", "~")):
            raise ModelError(
                f"expected a run folder or weights file, found nothing at {name}; see vitlens "
                "models"
            )
        raise unknown_model(name)
    return source


def unknown_model(name: str, *, hint: str = "vitlens models") -> UnknownNameError:
    """Return the error for a name that no source has.

    It suggests the nearest names, else lists vitlens's names and the forms of the others.
    """
    names: list[str] = []
    forms: list[str] = []
    for source in SOURCES.values():
        if not source.extra:
            names += source.all_names()
        if source.prefix:
            forms.append(source.typed_usage)
        else:
            forms += source.all_names()
    if not nearest(name, names):
        names = forms
    return UnknownNameError("model", name, names, hint=hint)


def describe_names() -> str:
    """Return the forms of model names: the usage of every source."""
    return ", ".join(source.usage for source in SOURCES.values())
