"""transformers' models as modules from images to logits or features, and towers for texts."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor, nn

from vitlens.errors import ModelError, in_one_line
from vitlens.models.anatomy import StructureHints
from vitlens.models.rebuild import count_classes
from vitlens.models.sources.huggingface.configuration import FEATURES, Output, Size
from vitlens.models.sources.huggingface.files import SETTINGS, quietly, transformers
from vitlens.typed import SIZE

_DEFAULT_SIZE: Final = 224  # px, for a configuration that names no size
# names of the classifiers in transformers' classes
_CLASSIFIERS: Final = ("cls_classifier", "distillation_classifier", "classifier")


class TransformersModule(nn.Module):
    """A model of transformers, from normalised images to logits or features (batch, outputs).

    output: "logits" of a classifier; "cls", the CLS token after the last norm; "pooler", its
        pooler_output; "embedding", its image_embeds.
    head: on the features, of a model that got a classifier here.
    native: (height, width) of its position embeddings, which are interpolated for images of another
        size.
    """

    def __init__(self, model: nn.Module, output: Output, classes: int | None = None) -> None:
        super().__init__()
        config: Any = model.config
        self.network = model
        self.output = output
        vision_config = getattr(config, "vision_config", config)  # of a model with a text tower
        size = getattr(vision_config, "image_size", None) or _DEFAULT_SIZE
        self.native: Size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        parameters = inspect.signature(model.forward).parameters
        self.interpolates = "interpolate_pos_encoding" in parameters or config.model_type == "clip"
        # the structure is read from forward passes, but these do not show that DeiT's second token
        # is for distillation
        self.structure_hints = StructureHints()
        if config.model_type == "deit":
            self.structure_hints = StructureHints(prefix=("cls", "distillation"))
        self.head: nn.Module = nn.Identity()
        if classes and output != "logits":
            self.reset_classifier(classes)

    @property
    def pretrained_cfg(self) -> dict[str, tuple[str, ...]]:
        """Return the names of its classifiers, in timm's form."""
        if self.output != "logits":
            return {"classifier": ("head",)}
        classifiers = []
        for name in _CLASSIFIERS:
            if isinstance(getattr(self.network, name, None), nn.Linear):
                classifiers.append(f"network.{name}")
        return {"classifier": tuple(classifiers)}

    def reset_classifier(self, classes: int) -> None:
        """Replace the classifier by one for this number of classes, with random weights."""
        for path in self.pretrained_cfg["classifier"]:
            parent, _, attribute = path.rpartition(".")
            old = self.get_submodule(path)
            if isinstance(old, nn.Linear):
                width = old.in_features
            else:  # the head is the identity: its outputs are the features
                width = count_classes(self, self.native)
            device = next(self.parameters()).device
            classifier = nn.Linear(width, classes, device=device)
            setattr(self.get_submodule(parent), attribute, classifier)

    def forward(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch outputs"]:
        """Return logits (batch, classes) or features (batch, dim)."""
        options = {}
        if self.interpolates and tuple(images.shape[-2:]) != self.native:
            options["interpolate_pos_encoding"] = True
        result: Any = self.network(pixel_values=images, **options)
        attribute, _ = FEATURES[self.output]
        features: Tensor = getattr(result, attribute)
        if self.output == "cls":
            features = features[:, 0]
        # ConvNeXt's features are (batch, dim, 1, 1) in some versions
        outputs: Tensor = self.head(features.flatten(1))
        return outputs


class ProjectedImageTower(nn.Module):
    """The image tower and its projection into the space of the texts."""

    def __init__(self, vision: nn.Module, projection: nn.Module | None) -> None:
        super().__init__()
        self.vision = vision
        self.projection = projection or nn.Identity()
        self.config = vision.config

    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool = False
    ) -> SimpleNamespace:
        """Return the embeddings (batch, dim), as image_embeds."""
        output = self.vision(
            pixel_values=pixel_values, interpolate_pos_encoding=interpolate_pos_encoding
        )
        return SimpleNamespace(image_embeds=self.projection(output.pooler_output))


class TextEncoder(nn.Module):
    """An image-text model in the form that `TextTower` takes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.logit_scale: Tensor = model.logit_scale
        self.logit_bias: Tensor | None = getattr(model, "logit_bias", None)

    def encode_text(self, ids: Tensor) -> Tensor:
        """Return embeddings (texts, dim) of token ids (texts, context).

        All tokens are attended to, as in training.
        """
        features: Tensor = self.model.get_text_features(input_ids=ids).pooler_output
        return features


class Tokens:
    """The tokenizer of a folder, without the folder's code, in the form that `TextTower` takes."""

    def __init__(self, folder: Path, context: int) -> None:
        for pattern in SETTINGS:
            for file in folder.glob(pattern):
                if file.stat().st_size > SIZE:
                    raise ModelError(
                        f"expected files of a tokenizer of at most {SIZE:,} bytes, found more in "
                        f"{file}"
                    )
        with in_one_line(f"the tokenizer's files in {folder}", "download them, too"), quietly():
            self._tokenizer: Any = transformers().AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True
            )
        self._options = {
            "padding": "max_length",
            "max_length": context,
            "truncation": True,
            "return_tensors": "pt",
        }

    def __call__(self, texts: list[str]) -> Tensor:
        """Return token ids (texts, context)."""
        with quietly():
            ids: Tensor = self._tokenizer(texts, **self._options)["input_ids"]
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text without the last two, which `TextTower` counts separately.

        Their number plus 2 is that of all tokens, also with a single special token (SigLIP).
        """
        with quietly():
            return list(self._tokenizer(text)["input_ids"])[:-2]
