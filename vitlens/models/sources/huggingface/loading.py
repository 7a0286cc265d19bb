"""Loading of `hf:REPO` and `hf:FOLDER`; CLIP and SigLIP with their text towers."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from torch import Tensor, nn

from vitlens.errors import ModelError, VitlensError, lacks_memory
from vitlens.files import sha256
from vitlens.models.assembly import count_classes, default_classes, seeded, versions
from vitlens.models.language_image import LanguageImage, TextTower, Tokenizer
from vitlens.models.model import Model, Provenance
from vitlens.models.sources.huggingface.description import WHOLE, Description, describe, read_preprocessing
from vitlens.models.sources.huggingface.folder import Folder, find, first_line, quietly, transformers
from vitlens.models.sources.huggingface.module import (
    TransformersModule,
    architecture_of,
    create,
    native_size,
    network,
)
from vitlens.models.sources.registry import ModelRequest
from vitlens.models.weights import read_weights
from vitlens.models.wrap import wrapped

_LARGEST: Final = 64 << 20  # bytes of a tokenizer's file


def load(request: ModelRequest) -> Model:
    """The model of a folder or repository, with its safetensors weights, those of a file, or random ones.

    Its outputs are the logits of a classifier, else features. Raises ModelError for files that are missing or do not
    fit, UnsupportedError for models that are refused by name.
    """
    transformers()  # says first where it is not installed
    file, own = request.file, not (request.file or request.random)
    folder = find(request.name, request.short, weights=own)
    found = describe(folder)
    notes = list(found.notes)
    native = native_size(found.config())
    state, digest = None, None
    if own:
        state, digest = folder.read_state()
    elif file is not None:
        weights = read_weights(file)
        state, digest = weights.state, sha256(file)
        notes += weights.notes
    preprocessing, read = read_preprocessing(folder, str(found.fields["model_type"]), native, request)
    size = preprocessing.size
    with seeded(request.seed):
        if found.class_name in WHOLE:
            module: nn.Module = _with_texts(found, folder, state=state)
        else:
            module = create(found, state=state, name=request.name)
    outputs = _outputs(module, size, native, request)
    if size != native:
        notes.append(f"images of {size[0]}x{size[1]} px, position embeddings of {native[0]}x{native[1]} px")
    classes = _classes(found, outputs, request.name)
    told = getattr(module, "told", None)
    architecture = architecture_of(found, request.alias, len(classes), size)
    provenance = Provenance(
        request.name,
        file.name if file else "random" if request.random else "hub" if folder.from_hub else "model.safetensors",
        digest,
        versions() | {"transformers": version("transformers")},
        (*folder.notes, *notes, *read),
    )
    return wrapped(module, architecture, preprocessing, classes, request.alias, provenance, told=told).eval()


def _outputs(module: nn.Module, size: tuple[int, int], native: tuple[int, int], request: ModelRequest) -> int:
    """The number of outputs, measured. Raises ModelError for a size at which the model does not run."""
    try:
        return count_classes(module, size)
    except VitlensError:
        raise
    except Exception as error:  # transformers raises many types for sizes that do not fit
        if lacks_memory(error):
            raise
        reason = first_line(error)
        made_for = "{}x{}".format(*native)
        raise ModelError(
            f"expected {request.name} at {size[0]}x{size[1]} px to run, found: {reason}; made for {made_for} px: "
            "check --image-size"
        ) from error


def _classes(found: Description, outputs: int, name: str) -> tuple[str, ...]:
    if found.output != "logits":
        return ()
    if found.labels and len(found.labels) != outputs:
        raise ModelError(f"expected {outputs} labels in config.json of {name}, found {len(found.labels)}")
    return found.labels or default_classes(outputs)


def _with_texts(found: Description, folder: Folder, *, state: Mapping[str, Tensor] | None) -> LanguageImage:
    """The image tower of a whole model, whose outputs are embeddings, with its text tower."""
    whole: Any = network(found, state=state, name=folder.name)
    projection = getattr(whole, "visual_projection", None)  # SigLIP has none
    visual = TransformersModule(_ImageTower(whole.vision_model, projection), "embedding")
    context = int(whole.config.text_config.max_position_embeddings)
    text = TextTower(_TextTower(whole), lambda: _tokenizer(folder.path, context), context, folder.name)
    return LanguageImage(visual, text, layout=None, pooling="token" if projection is not None else "map")


class _ImageTower(nn.Module):
    """The image tower and its projection into the space of the texts."""

    def __init__(self, vision: nn.Module, projection: nn.Module | None) -> None:
        super().__init__()
        self.vision = vision
        self.projection = projection or nn.Identity()
        self.config = vision.config

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> SimpleNamespace:
        """The embeddings (batch, dim), as image_embeds."""
        output = self.vision(pixel_values=pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        return SimpleNamespace(image_embeds=self.projection(output.pooler_output))


class _TextTower(nn.Module):
    """The whole model, as `TextTower` asks for it."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole = whole
        self.logit_scale: Tensor = whole.logit_scale
        self.logit_bias: Tensor | None = getattr(whole, "logit_bias", None)

    def encode_text(self, ids: Tensor) -> Tensor:
        """Embeddings (texts, dim) of token ids (texts, context), all of which are attended to, as in training."""
        features: Tensor = self.whole.get_text_features(input_ids=ids).pooler_output
        return features


class _Tokens:
    """A tokenizer of transformers, as `TextTower` calls it."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context

    def __call__(self, texts: list[str]) -> Tensor:
        """Token ids (texts, context)."""
        with quietly():
            ids: Tensor = self._tokenizer(
                texts, padding="max_length", max_length=self._context, truncation=True, return_tensors="pt"
            )["input_ids"]
        return ids

    def encode(self, text: str) -> list[int]:
        """The tokens of a text without two, for which `TextTower` counts the start and the end."""
        with quietly():
            return list(self._tokenizer(text)["input_ids"])[:-2]


def _tokenizer(folder: Path, context: int) -> Tokenizer:
    """The tokenizer of a folder, never with code of its own. Raises ModelError where it cannot be read."""
    for file in (*folder.glob("*.json"), *folder.glob("*.txt"), *folder.glob("*.model")):
        if file.stat().st_size > _LARGEST:
            raise ModelError(f"expected files of a tokenizer of at most {_LARGEST:,} bytes, found more in {file}")
    try:
        with quietly():
            found = transformers().AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # each kind of tokenizer raises its own types
        raise ModelError(
            f"expected the tokenizer's files in {folder}, found: {first_line(error)}; download them, too"
        ) from error
    return _Tokens(found, context)
