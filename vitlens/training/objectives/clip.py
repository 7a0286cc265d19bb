"""Learning from images and captions (CLIP, Radford 2021) in miniature, with two towers.

The image tower is the ViT: an image's embedding is the input of its classifier. The text tower is a
small transformer over the words of the captions. Within a batch, each image is matched with its
caption among all captions, and each caption with its image. With several processes, or gradient
accumulation, the others are only those of the same share.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float
from safetensors.torch import save as as_bytes
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.data.captions import PROMPTS, with_name
from vitlens.files import write_bytes
from vitlens.models.derived import for_classes
from vitlens.models.model import Model
from vitlens.models.weights import to_save
from vitlens.models.word_tower import (
    TEMPERATURE,
    TEXT_FILE,
    WordTower,
    WordTowerConfig,
    read_tower,
    words_of,
)
from vitlens.processes import Processes
from vitlens.shapes import Images

_SHARPEST: Final = 100.0  # largest factor from cosine to logit (Radford 2021, section 2.4)
# captions(keys, epoch) returns the captions of images by their keys
Captions = Callable[[Tensor, int], Sequence[str]]
Unit = Float[Tensor, "batch dim"]  # vectors of length 1


class Pair(NamedTuple):
    """The embeddings of images and of their captions.

    images: embeddings of length 1.
    texts: embeddings of length 1.
    scale: the factor from cosine to logit.
    """

    images: Unit
    texts: Unit
    scale: Tensor


class ImagesAndCaptions(nn.Module):
    """Both towers and the learned temperature, in the form of `Pretrained`.

    Raises InputError for a text tower that cannot be built.

    settings: text_dim, text_depth and text_heads are the width, the depth and the heads of the text
        tower.
    captions: the captions of the training images.
    vocabulary: texts with every word of the captions, one of them as long as any caption.
    classes: the classes of the data for the zero-shot classifier, or () for none.
    """

    def __init__(
        self,
        model: Model,
        settings: Mapping[str, Any],
        *,
        captions: Captions,
        vocabulary: Sequence[str],
        classes: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.model = model
        self.captions = captions
        self.classes = classes
        vit: Any = model.module
        words: set[str] = set()
        # words of the longest text; without texts, a tower must still have a position
        context = 0 if vocabulary else 1
        for text in vocabulary:
            text_words = words_of(text)
            words.update(text_words)
            context = max(context, len(text_words))
        config = WordTowerConfig(
            words=tuple(sorted(words)),
            context=context,
            dim=settings["text_dim"],
            depth=settings["text_depth"],
            heads=settings["text_heads"],
            out=vit.config.dim,
        )
        self.text = WordTower(config)
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(TEMPERATURE)))

    def inputs(self, images: Images, keys: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return the images and the tokens of their captions in this epoch."""
        return images, self.text.tokens(self.captions(keys, epoch)).to(images.device)

    def forward(self, images: Images, tokens: Tensor) -> Pair:
        """Return the embeddings."""
        image_embeddings = F.normalize(self.model(images).float(), dim=-1)
        text_embeddings = F.normalize(self.text(tokens).float(), dim=-1)
        return Pair(image_embeddings, text_embeddings, self._scale())

    def _scale(self) -> Tensor:
        """Return the factor from cosine to logit, the inverse temperature."""
        return self.logit_scale.clamp(max=math.log(_SHARPEST)).exp()

    def losses(self, outputs: Any) -> Float[Tensor, " batch"]:
        """Return each image's share of the loss, in nats."""
        return info_nce(*outputs)

    def updated(self, progress: float, processes: Processes) -> None:
        """Do nothing after an update."""

    def exported(self) -> Model:
        """Return the image tower, with a classifier of the classes' names in all prompts if any."""
        if not self.classes:
            return self.model
        classifier = for_classes(self.model, self.classes)
        vit: Any = classifier.module
        # As in a cosine, the head divides by the length of its input. The last norm returns
        # s x + b, with x of mean 0 and variance 1. So E|s x + b|² = sum s² + sum b².
        last_norm = vit.norm if vit.cls_token is not None else vit.fc_norm
        scale = last_norm.weight
        shift = last_norm.bias
        expected_length = (scale.square().sum() + shift.square().sum()).sqrt()
        embeddings = embedded(self.text, self.classes, PROMPTS).to(vit.head.weight.device)
        with torch.no_grad():
            directions = F.normalize(embeddings.mean(0), dim=-1)
            vit.head.weight.copy_(directions * self._scale() / expected_length)
        return classifier

    def write_parts(self, folder: Path) -> None:
        """Write the text tower into the run's folder, atomically."""
        config = json.dumps(asdict(self.text.config), sort_keys=True)
        scale = self.logit_scale.detach().clamp(max=math.log(_SHARPEST))
        metadata = {"vitlens": config, "logit_scale": repr(float(scale))}
        content = as_bytes(to_save(self.text.state_dict()), metadata=metadata)
        write_bytes(folder / TEXT_FILE, content)

    def measures(self, outputs: Sequence[Any]) -> Mapping[str, float]:
        """Return the learned temperature."""
        return {"temperature": float(1 / outputs[0].scale)}


def info_nce(images: Unit, texts: Unit, scale: Tensor | float) -> Float[Tensor, " batch"]:
    """Return each pair's InfoNCE loss, in nats (van den Oord 2018; Radford 2021, figure 3).

    It is the mean of two cross-entropies: of the text among all texts for the image, and of the
    image among all images for the text.
    """
    logits = scale * images @ texts.T
    targets = torch.arange(len(images), device=images.device)
    text_loss = F.cross_entropy(logits, targets, reduction="none")
    image_loss = F.cross_entropy(logits.T, targets, reduction="none")
    return (text_loss + image_loss) / 2


def text_classifier(
    folder: Path, classes: Sequence[str], wordings: Sequence[str] = PROMPTS
) -> Float[Tensor, "wordings classes dim"]:
    """Return the embeddings, of length 1, of every class in every wording.

    The text tower of a run folder computes them. Their cosine with an image's features is highest
    for the class that the wording predicts. The features are the classifier's input, as
    `vitlens.features` returns it for the last layer.

    wordings: texts with {} in place of the class.
    """
    return embedded(read_tower(folder), classes, wordings)


@torch.no_grad()
def embedded(
    tower: WordTower, classes: Sequence[str], wordings: Sequence[str]
) -> Float[Tensor, "wordings classes dim"]:
    """Return the embeddings of every class in every wording, like `text_classifier`, by a tower.

    Raises InputError for a wording without a place for the class.
    """
    texts = []
    for wording in wordings:
        texts += [with_name(wording, name) for name in classes]
    device = tower.pos_embed.device
    embeddings = F.normalize(tower(tower.tokens(texts).to(device)).float(), dim=-1)
    return embeddings.view(len(wordings), len(classes), -1)
