"""CLIP and SigLIP of transformers with both towers: the image tower as a module, its text tower for prompts."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from torch import Tensor, nn

from vitlens.errors import ModelError
from vitlens.models.language_image import LanguageImage, TextTower, Tokenizer
from vitlens.models.sources.huggingface.configuration import Description
from vitlens.models.sources.huggingface.folder import Folder
from vitlens.models.sources.huggingface.library import quietly, transformers
from vitlens.models.sources.huggingface.module import TransformersModule, network

_LARGEST: Final = 64 << 20  # bytes of a tokenizer's file


def with_texts(found: Description, folder: Folder, *, state: Mapping[str, Tensor] | None) -> LanguageImage:
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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise ModelError(f"expected the tokenizer's files in {folder}, found: {reason}; download them, too") from error
    return _Tokens(found, context)
