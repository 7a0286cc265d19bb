"""The text tower of models that `vitlens train --objective clip` trains, over words of captions."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitlens.errors import InputError
from vitlens.models.configs import ViTConfig
from vitlens.models.fitting import load_strictly
from vitlens.models.vit import NORM_EPSILON, TransformerBlock, initialise
from vitlens.models.weights import read_weights
from vitlens.typed import between, length, parse_json, read_as

TEXT_FILE: Final = "text.safetensors"  # the text tower, next to the image tower's weights
TEMPERATURE: Final = 0.07  # before training (Radford 2021, section 2.4)
# token numbers
_PAD: Final = 0  # no word
_START: Final = 1  # the start of a text
_UNKNOWN: Final = 2  # a word that is not in the vocabulary
_FIRST_WORD: Final = 3  # the first word of the vocabulary
_WORD: Final = re.compile(r"\w+")
_HINT: Final = "train it again"
_LogScale = Annotated[float, between(-20, 20)]


@dataclass(frozen=True)
class WordTowerConfig:
    """The shape of a text tower.

    words: the words of the vocabulary, in the order of their numbers.
    context: the largest number of words in a text.
    dim: the width of the residual stream.
    depth: the number of blocks.
    heads: the number of heads in each block.
    out: the dimension of the embeddings.
    """

    words: Annotated[tuple[Annotated[str, length(1, 200)], ...], length(0, 100_000)]
    context: Annotated[int, between(1, 1000)]
    dim: Annotated[int, between(1, 4096)]
    depth: Annotated[int, between(1, 100)]
    heads: Annotated[int, between(1, 256)]
    out: Annotated[int, between(1, 65_536)]


class WordTower(nn.Module):
    """A transformer over words; the embedding is read from the start token, which sees all.

    logit_scale: the natural logarithm of the factor from cosine to logit.
    """

    def __init__(self, config: WordTowerConfig) -> None:
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
        scale = torch.tensor(-math.log(TEMPERATURE))
        self.register_buffer("logit_scale", scale, persistent=False)
        self.logit_scale: Tensor

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
        """Return the embeddings of texts, which are not normalised."""
        outputs = self.norm(self.blocks(self.embed(tokens) + self.pos_embed))
        embeddings: Tensor = self.projection(outputs[:, 0])
        return embeddings

    def encode_text(self, tokens: Int[Tensor, "texts tokens"]) -> Float[Tensor, "texts dim"]:
        """Return the embeddings of texts, by the name that open_clip's models have for it."""
        embeddings: Tensor = self(tokens)
        return embeddings


@dataclass(frozen=True)
class WordTokenizer:
    """The tokenizer of our text tower, which is called like those of open_clip."""

    tower: WordTower

    def __call__(self, texts: list[str]) -> Int[Tensor, "texts tokens"]:
        """Return the token numbers of each text."""
        return self.tower.tokens(texts)

    def encode(self, text: str) -> list[str]:
        """Return the words of a text."""
        return words_of(text)

    def unknown(self, text: str) -> list[str]:
        """Return the words of a text that were in no caption of the training."""
        return [word for word in words_of(text) if word not in self.tower.numbers]


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def read_tower(folder: Path) -> WordTower:
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
    tower = WordTower(read_as(WordTowerConfig, config, source=str(file), hint=_HINT))
    load_strictly(tower, stored.state, where=str(file))
    if "logit_scale" in stored.metadata:  # not in files of earlier versions
        scale = parse_json(stored.metadata["logit_scale"], source=str(file), hint=_HINT)
        tower.logit_scale.fill_(read_as(_LogScale, scale, source=str(file), hint=_HINT))
    return tower.eval().requires_grad_(False)
