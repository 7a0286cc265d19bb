"""Learning from images and captions (CLIP, Radford 2021) in miniature, with two towers.

The image tower is the ViT: an image's embedding is the input of its classifier. The text tower is a
small transformer over the words of the captions. Within a batch each image is matched with its
caption among all captions, and each caption with its image; with several processes, or gradient
accumulation, only among those of the same share.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import save as as_bytes
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.data.captions import PROMPTS, with_name
from vitlens.errors import InputError
from vitlens.files import write_bytes
from vitlens.models.configs import ViTConfig
from vitlens.models.fitting import load_strictly
from vitlens.models.model import Model
from vitlens.models.rebuild import for_classes
from vitlens.models.vit import NORM_EPSILON, TransformerBlock, initialise
from vitlens.models.weights import read_weights, to_save
from vitlens.processes import Processes
from vitlens.shapes import Images
from vitlens.typed import between, length, parse_json, read_as

TEXT_FILE: Final = "text.safetensors"  # of the text tower, next to the image tower's weights
TEMPERATURE: Final = 0.07  # at first (Radford 2021, section 2.4)
_SHARPEST: Final = 100.0  # largest factor from cosine to logit, there too
# token numbers of no word, of the start of a text, and of an unknown word
_PAD: Final = 0
_START: Final = 1
_UNKNOWN: Final = 2
_FIRST_WORD: Final = 3
_WORD: Final = re.compile(r"\w+")
_HINT: Final = "train it again"

Captions = Callable[[Tensor, int], Sequence[str]]  # of keys of images, in an epoch
Unit = Float[Tensor, "batch dim"]


class Pair(NamedTuple):
    """Embeddings of images and captions, of length 1, and the factor from cosine to logit."""

    images: Unit
    texts: Unit
    scale: Tensor


@dataclass(frozen=True)
class TextConfig:
    """The shape of a text tower.

    words: in the order of their numbers; context: largest number of words of a text; out: dimension
    of the embeddings.
    """

    words: Annotated[tuple[Annotated[str, length(1, 200)], ...], length(0, 100_000)]
    context: Annotated[int, between(1, 1000)]
    dim: Annotated[int, between(1, 4096)]
    depth: Annotated[int, between(1, 100)]
    heads: Annotated[int, between(1, 256)]
    out: Annotated[int, between(1, 65_536)]


class TextTower(nn.Module):
    """A transformer over words; the embedding is read from the start token, which sees all."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        shape = ViTConfig(dim=config.dim, heads=config.heads)
        self.config = config
        self.numbers = {word: number for number, word in enumerate(config.words, start=_FIRST_WORD)}
        self.embed = nn.Embedding(_FIRST_WORD + len(config.words), config.dim)
        self.pos_embed = nn.Parameter(torch.empty(1, config.context + 1, config.dim))
        for weights in (self.embed.weight, self.pos_embed):
            nn.init.normal_(weights, std=0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(shape) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPSILON)
        self.projection = nn.Linear(config.dim, config.out, bias=False)
        for part in (self.blocks, self.projection):
            part.apply(initialise)

    def tokens(self, texts: Sequence[str]) -> Int[Tensor, "texts tokens"]:
        """Return the token numbers of each text: its start, its words, and padding.

        Texts are cut or padded to the context.
        """
        context = self.config.context
        rows = []
        for text in texts:
            words = words_of(text)[:context]
            numbers = [self.numbers.get(word, _UNKNOWN) for word in words]
            padding = [_PAD] * (context - len(numbers))
            rows.append([_START, *numbers, *padding])
        return torch.tensor(rows)

    def forward(self, tokens: Int[Tensor, "texts tokens"]) -> Float[Tensor, "texts dim"]:
        """Return the embeddings of texts, of any length."""
        outputs = self.norm(self.blocks(self.embed(tokens) + self.pos_embed))
        embeddings: Tensor = self.projection(outputs[:, 0])
        return embeddings


class ImagesAndCaptions(nn.Module):
    """Both towers and the learned temperature.

    captions: of the training images; classes: of the data, for the zero-shot classifier, () for
    none; settings: text_dim, text_depth, text_heads. Raises InputError for a text tower that cannot
    be built.
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
        context = 0
        for text in vocabulary:
            text_words = words_of(text)
            words.update(text_words)
            context = max(context, len(text_words))
        config = TextConfig(
            words=tuple(sorted(words)),
            context=context if vocabulary else 1,
            dim=settings["text_dim"],
            depth=settings["text_depth"],
            heads=settings["text_heads"],
            out=vit.config.dim,
        )
        self.text = TextTower(config)
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(TEMPERATURE)))

    def inputs(self, images: Images, keys: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return the images and the tokens of their captions, by image and epoch."""
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
        # the head's input was normalised to variance 1, scaled and shifted, which determines its
        # mean squared length
        last_norm = vit.norm if vit.cls_token is not None else vit.fc_norm
        length = (last_norm.weight.square().sum() + last_norm.bias.square().sum()).sqrt()
        embeddings = embedded(self.text, self.classes, PROMPTS).to(vit.head.weight.device)
        with torch.no_grad():
            directions = F.normalize(embeddings.mean(0), dim=-1)
            vit.head.weight.copy_(directions * self._scale() / length)
        return classifier

    def write_beside(self, folder: Path) -> None:
        """Write the text tower into the run's folder, atomically."""
        config = json.dumps(asdict(self.text.config), sort_keys=True)
        content = as_bytes(to_save(self.text.state_dict()), metadata={"vitlens": config})
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


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def load_text_tower(folder: Path) -> TextTower:
    """Return the text tower of a run folder.

    Raises InputError for a folder without one, ModelError for a damaged file.
    """
    file = folder / TEXT_FILE
    if not file.is_file():
        raise InputError(
            f"expected a run folder with {TEXT_FILE}, found none in {folder}; vitlens train "
            "--objective clip writes it"
        )
    stored = read_weights(file)
    config = parse_json(stored.metadata.get("vitlens", "null"), source=str(file), hint=_HINT)
    tower = TextTower(read_as(TextConfig, config, source=str(file), hint=_HINT))
    load_strictly(tower, stored.state, where=str(file))
    return tower.eval().requires_grad_(False)


def text_classifier(
    folder: Path, classes: Sequence[str], wordings: Sequence[str] = PROMPTS
) -> Float[Tensor, "wordings classes dim"]:
    """Return the embeddings, of length 1, of every class in every wording.

    They are computed by the text tower of a run folder. wordings: with {} in place of the class.
    The cosine of an image's features (the classifier's input, as `vitlens.features` returns it for
    the last layer) with them is highest for the class that the wording predicts.
    """
    return embedded(load_text_tower(folder), classes, wordings)


@torch.no_grad()
def embedded(
    tower: TextTower, classes: Sequence[str], wordings: Sequence[str]
) -> Float[Tensor, "wordings classes dim"]:
    """Return the embeddings of `text_classifier` by a tower.

    Raises InputError for a wording without a place for the class.
    """
    texts = [with_name(wording, name) for wording in wordings for name in classes]
    device = tower.pos_embed.device
    embeddings = F.normalize(tower(tower.tokens(texts).to(device)).float(), dim=-1)
    return embeddings.view(len(wordings), len(classes), -1)
