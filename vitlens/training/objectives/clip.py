"""Images and captions (CLIP, Radford 2021) in miniature: two towers whose embeddings of an image
and its caption agree.

The image tower is the ViT: an image's embedding is what its classifier would read. The text tower
is a small transformer over the words of the captions. Within a batch each image is told from all
captions, and each caption from all images; with several processes, or gradient accumulation, from
those of the same share alone.
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
from vitlens.models.model import Model
from vitlens.models.rebuild import for_classes
from vitlens.models.vit import NORM_EPSILON, TransformerBlock, initialise
from vitlens.models.weights import load_strictly, read_weights, to_save
from vitlens.processes import Processes
from vitlens.shapes import Images
from vitlens.typed import between, length, parse_json, read_as

TEXT_FILE: Final = "text.safetensors"  # of the text tower, beside the image tower's weights
TEMPERATURE: Final = 0.07  # at first (Radford 2021, section 2.4)
_SHARPEST: Final = 100.0  # largest factor from cosine to logit, there too
_PAD, _START, _OTHER = range(
    3
)  # numbers of no word, of the start of a text, and of an unknown word
_WORD: Final = re.compile(r"\w+")
_HINT: Final = "train it again"

Captions = Callable[[Tensor, int], Sequence[str]]  # of keys of images, in an epoch
Unit = Float[Tensor, "batch dim"]


class Pair(NamedTuple):
    """Embeddings of images and of their captions, of length 1, and the factor from cosine to
    logit."""

    images: Unit
    texts: Unit
    scale: Tensor


@dataclass(frozen=True)
class TextConfig:
    """A text tower. words: in the order of their numbers; context: most words of a text; out: of
    the embeddings.
    """

    words: Annotated[tuple[Annotated[str, length(1, 200)], ...], length(0, 100_000)]
    context: Annotated[int, between(1, 1000)]
    dim: Annotated[int, between(1, 4096)]
    depth: Annotated[int, between(1, 100)]
    heads: Annotated[int, between(1, 256)]
    out: Annotated[int, between(1, 65_536)]


class TextTower(nn.Module):
    """A transformer over words; the embedding is read from the token of the start, which sees all
    others.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        shape = ViTConfig(dim=config.dim, heads=config.heads)
        self.config = config
        self.numbers = {word: index + 3 for index, word in enumerate(config.words)}
        self.embed = nn.Embedding(len(config.words) + 3, config.dim)
        self.pos_embed = nn.Parameter(torch.empty(1, config.context + 1, config.dim))
        for weights in (self.embed.weight, self.pos_embed):
            nn.init.normal_(weights, std=0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(shape) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPSILON)
        self.projection = nn.Linear(config.dim, config.out, bias=False)
        for part in (self.blocks, self.projection):
            part.apply(initialise)

    def tokens(self, texts: Sequence[str]) -> Int[Tensor, "texts tokens"]:
        """Return the numbers of the words of each text after that of its start, cut or filled up to
        the context.
        """
        rows = []
        for text in texts:
            known = [self.numbers.get(word, _OTHER) for word in words_of(text)][
                : self.config.context
            ]
            rows.append([_START, *known, *[_PAD] * (self.config.context - len(known))])
        return torch.tensor(rows)

    def forward(self, tokens: Int[Tensor, "texts tokens"]) -> Float[Tensor, "texts dim"]:
        """Return the embeddings of texts, of any length."""
        read = self.norm(self.blocks(self.embed(tokens) + self.pos_embed))
        embedded: Tensor = self.projection(read[:, 0])
        return embedded


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
        found = [words_of(text) for text in vocabulary]
        known = tuple(sorted({word for each in found for word in each}))
        given = TextConfig(
            known,
            max(map(len, found), default=1),
            settings["text_dim"],
            settings["text_depth"],
            settings["text_heads"],
            vit.config.dim,
        )
        self.text = TextTower(given)
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(TEMPERATURE)))

    def inputs(self, images: Images, keys: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return the images and the words of their captions, which depend on the image and the
        epoch.
        """
        return images, self.text.tokens(self.captions(keys, epoch)).to(images.device)

    def forward(self, images: Images, tokens: Tensor) -> Pair:
        """Return the embeddings."""
        both = self.model(images), self.text(tokens)
        scale = self.logit_scale.clamp(max=math.log(_SHARPEST)).exp()
        images, texts = (F.normalize(each.float(), dim=-1) for each in both)
        return Pair(images, texts, scale)

    def losses(self, outputs: Any) -> Float[Tensor, " batch"]:
        """Return each image's share of the loss, in nats."""
        return info_nce(*outputs)

    def updated(self, progress: float, processes: Processes) -> None:
        """Nothing follows an update."""

    def exported(self) -> Model:
        """Return the image tower with a classifier of the classes' names in all prompts; without
        classes, with none.
        """
        if not self.classes:
            return self.model
        made = for_classes(self.model, self.classes)
        vit: Any = made.module
        # what the head reads was normalised to variance 1, scaled and shifted: its mean squared
        # length is known
        last = vit.norm if vit.cls_token is not None else vit.fc_norm
        length = (last.weight.square().sum() + last.bias.square().sum()).sqrt()
        each = embedded(self.text, self.classes, PROMPTS).to(vit.head.weight.device)
        with torch.no_grad():
            scale = self.logit_scale.clamp(max=math.log(_SHARPEST)).exp()
            vit.head.weight.copy_(F.normalize(each.mean(0), dim=-1) * scale / length)
        return made

    def write_beside(self, folder: Path) -> None:
        """Write the text tower into the run's folder, atomically."""
        about = json.dumps(asdict(self.text.config), sort_keys=True)
        write_bytes(
            folder / TEXT_FILE,
            as_bytes(to_save(self.text.state_dict()), metadata={"vitlens": about}),
        )

    def measures(self, outputs: Sequence[Any]) -> Mapping[str, float]:
        """Return the learned temperature."""
        return {"temperature": float(1 / outputs[0].scale)}


def info_nce(images: Unit, texts: Unit, scale: Tensor | float) -> Float[Tensor, " batch"]:
    """Return each pair's InfoNCE, in nats: the mean of the cross-entropies of finding its text
    among all texts by the image, and its image among all images by the text (van den Oord 2018;
    Radford 2021, figure 3).
    """
    logits = scale * images @ texts.T
    own = torch.arange(len(images), device=images.device)
    return (
        F.cross_entropy(logits, own, reduction="none")
        + F.cross_entropy(logits.T, own, reduction="none")
    ) / 2


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def load_text_tower(folder: Path) -> TextTower:
    """Return the text tower of a run folder. Raises InputError for a folder without one, ModelError
    for a damaged file.
    """
    file = folder / TEXT_FILE
    if not file.is_file():
        raise InputError(
            f"expected a run folder with {TEXT_FILE}, found none in {folder}; vitlens train "
            "--objective clip writes it"
        )
    stored = read_weights(file)
    about = parse_json(stored.metadata.get("vitlens", "null"), source=str(file), hint=_HINT)
    tower = TextTower(read_as(TextConfig, about, source=str(file), hint=_HINT))
    load_strictly(tower, stored.state, where=str(file))
    return tower.eval().requires_grad_(False)


def text_classifier(
    folder: Path, classes: Sequence[str], wordings: Sequence[str] = PROMPTS
) -> Float[Tensor, "wordings classes dim"]:
    """Return the embeddings, of length 1, of every class in every wording, by the text tower of a
    run folder.

    wordings: with {} in place of the class. The cosine of an image's features (what the classifier
    reads, as `vitlens.features` gives them for the last layer) with them is highest for the class
    that the wording predicts.
    """
    return embedded(load_text_tower(folder), classes, wordings)


@torch.no_grad()
def embedded(
    tower: TextTower, classes: Sequence[str], wordings: Sequence[str]
) -> Float[Tensor, "wordings classes dim"]:
    """As `text_classifier`, of a tower. Raises InputError for a wording without a place for the
    class.
    """
    texts = [with_name(wording, name) for wording in wordings for name in classes]
    device = tower.pos_embed.device
    embeddings = F.normalize(tower(tower.tokens(texts).to(device)).float(), dim=-1)
    return embeddings.view(len(wordings), len(classes), -1)
