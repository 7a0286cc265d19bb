"""Models of images and texts: the image tower, its text tower, and zero-shot classifiers.

`TextTower` embeds texts. `LanguageImage` is the module of an image tower. It holds the text tower
and the embeddings of prompts. The functions below them make classifiers of texts (`zero_shot`,
`with_text`) and read their scores.

Contrastive models (CLIP, Radford 2021; SigLIP, Zhai 2023) embed images and texts in one space. With
prompts, the logits are the similarities of an image to each prompt. Everything that works on a
classifier then works on these models, also rollout and relevance. The embedding of a class is the
mean of the normalised embeddings of its prompts, one per template, normalised again (Radford 2021,
section 3.1.4).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import as_device, evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.anatomy import read_anatomy
from vitlens.models.model import Model
from vitlens.models.sources.registry import SOURCES
from vitlens.models.vit import VisionTransformer
from vitlens.models.word_tower import TEXT_FILE, WordTokenizer, read_tower
from vitlens.names import imagenet_classes
from vitlens.shapes import Logits, TokenLayout
from vitlens.typed import short

Embeddings = Float[Tensor, "texts dim"]
Tokenizer = Callable[[list[str]], Tensor]
_BATCH_SIZE = 256  # texts embedded in one forward pass
PLACE: Final = "{}"  # placeholder of the class in a template
PHOTO: Final = ("a photo of a {}.",)
# templates of phrases; the first one is the phrase itself
PHRASES: Final = (PLACE, *PHOTO, "an image of a {}.", "a picture of a {}.")
MOST_PHRASES: Final = 12  # up to this number, each phrase has its maps in a report
# words that a phrase may begin with, in place of a template's
_ARTICLES: Final = ("a", "an", "the")
ByTemplate = Float[Tensor, "templates classes dim"]


@dataclass(eq=False)
class TextTower:
    """The text encoder of a model.

    model: the whole model, which encodes token ids by encode_text.
    tokenizer: a function that builds the tokenizer; it is called on first use.
    context: the most tokens of a text, including the added ones.
    name: the name of the model, for messages.
    added: the number of tokens added to a text, 2 for its start and its end.
    """

    model: nn.Module
    tokenizer: Callable[[], Tokenizer]
    context: int
    name: str
    added: int = 2

    @cached_property
    def _built(self) -> Tokenizer:
        return self.tokenizer()

    @property
    def scale(self) -> float:
        """Return the factor from cosine similarity to logit."""
        return float(self.model.logit_scale.detach().exp())  # type: ignore[operator]

    @property
    def bias(self) -> float:
        """Return the bias added to the scaled similarity (SigLIP's; 0 elsewhere)."""
        value = getattr(self.model, "logit_bias", None)
        return 0.0 if value is None else float(value.detach())

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """Return token ids (texts, context).

        Raises InputError for no text, an empty one, or one that would be truncated.
        """
        if not texts or any(not text.strip() for text in texts):
            raise InputError(
                "expected texts with a word, found an empty one; give 'a photo of a dog'"
            )
        encode = getattr(self._built, "encode", None)
        if encode is None:  # some tokenizers do not give the number of tokens
            return self._built(list(texts))
        for text in texts:
            length = self.added + len(encode(text))
            if length > self.context:
                raise InputError(
                    f"expected texts of at most {self.context} tokens for {self.name}, found "
                    f"{length}: {short(text)!r}"
                )
        return self._built(list(texts))

    def unknown_words(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Return the words of texts that the tower was not trained on, without repetition.

        There are none with open_clip's tokenizers, which divide words into parts.
        """
        unknown = getattr(self._built, "unknown", None)
        if unknown is None:
            return ()
        words: dict[str, None] = {}
        for text in texts:
            words.update(dict.fromkeys(unknown(text)))
        return tuple(words)

    def embed(self, texts: Sequence[str], *, device: torch.device | str = "cpu") -> Embeddings:
        """Return normalised embeddings (texts, dim) on a device, to which the towers are moved.

        Raises what `tokens` raises.
        """
        device = as_device(device)
        ids = self.tokens(texts)
        self.model.to(device)
        parts = []
        with torch.no_grad(), evaluating(self.model):
            for start in range(0, len(ids), _BATCH_SIZE):
                batch = ids[start : start + _BATCH_SIZE].to(device)
                embeddings = self.model.encode_text(batch)  # type: ignore[operator]
                parts.append(F.normalize(embeddings.float(), dim=-1))
        return torch.cat(parts)


class LanguageImage(nn.Module):
    """The image tower of a model of images and texts.

    Its output is the similarity of an image to each prompt or, without prompts, its embedding. The
    text tower is not a submodule: it adds no parameters and does not run in a forward pass.

    visual: the image tower of the library.
    text: the text tower.
    layout: the layout of the tokens, or None for a CNN.
    pooling: the pooling of the tokens, by timm's names ("token", "avg", "map"). The attribute has
        timm's name, `global_pool`, by which `anatomy` reads it.
    prompts: normalised embeddings (prompts, dim), or None.
    """

    def __init__(
        self,
        visual: nn.Module,
        text: TextTower,
        *,
        layout: TokenLayout | None,
        pooling: str,
        prompts: Embeddings | None = None,
    ) -> None:
        super().__init__()
        self.visual = visual
        self.text = text
        self.layout = layout
        self.patch_size = None if layout is None else layout.patch_size
        self.global_pool = pooling
        self.register_buffer("prompts", prompts)
        self.prompts: Tensor | None

    @property
    def norm(self) -> nn.Module | None:
        """Return the norm after the last block, or None."""
        trunk = getattr(self.visual, "trunk", self.visual)
        module = getattr(trunk, "ln_post", None) or getattr(trunk, "norm", None)
        return module if isinstance(module, nn.Module) else None

    @property
    def pos_embed(self) -> Tensor | None:
        """Return learned position embeddings, of all tokens or of the patches."""
        trunk = getattr(self.visual, "trunk", self.visual)
        positions = getattr(trunk, "positional_embedding", None)
        return positions if positions is not None else getattr(trunk, "pos_embed", None)

    def forward(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch outputs"]:
        """Return logits (batch, prompts) = scale · cosine + bias.

        Without prompts, return embeddings (batch, dim).
        """
        output = self.visual(images)
        # CoCa returns a pair, with its tokens in second place
        embedding: Tensor = output[0] if isinstance(output, tuple) else output
        if self.prompts is None:
            return embedding
        logits: Tensor = (
            self.text.scale * F.normalize(embedding, dim=-1) @ self.prompts.to(embedding).T
        )
        return logits + self.text.bias


def text_tower(model: Model) -> TextTower:
    """Return a model's text tower: open_clip's, or that of a run folder with captions.

    Raises UnsupportedError for a model without one; the message lists models that have one.
    """
    if isinstance(model.module, LanguageImage):
        return model.module.text
    folder = _folder_with_texts(model)
    if folder is None:
        sources = [source for source in SOURCES.values() if source.texts]
        raise UnsupportedError(
            f"expected a model with a text tower, found {model.alias!r}, which embeds no texts; "
            f"{', '.join(source.example for source in sources)} and their like have one, and so "
            "has a run folder of vitlens train --objective clip; see vitlens models "
            f"'{sources[0].prefix}*'"
        )
    tower = read_tower(folder)
    start_tokens = 1  # our texts have no token for their end
    return TextTower(
        model=tower,
        tokenizer=lambda: WordTokenizer(tower),
        context=start_tokens + tower.config.context,
        name=model.alias,
        added=start_tokens,
    )


def has_text_tower(model: Model) -> bool:
    """Return True if a model also embeds texts."""
    return is_language_image(model) or _folder_with_texts(model) is not None


def is_language_image(model: Model) -> bool:
    """Return True for an image tower that has a classifier of prompts, or none at all."""
    return isinstance(model.module, LanguageImage)


def _folder_with_texts(model: Model) -> Path | None:
    """Return the run folder of a ViT that has a text tower next to its weights."""
    has_file = model.provenance.weights not in ("random", "training", "hub", "bundled")
    if not has_file or not isinstance(model.module, VisionTransformer):
        return None
    path = Path(model.provenance.name)
    folder = path if path.is_dir() else path.parent
    return folder if (folder / TEXT_FILE).is_file() else None


def with_prompts(model: Model, names: Sequence[str], prompts: Embeddings | None) -> Model:
    """Return the same image tower with other prompts.

    Raises UnsupportedError for a model without a text tower, InputError unless each prompt has a
    different name.

    names: the names of the prompts, which become the classes.
    prompts: the embeddings of the prompts; with None, the outputs are embeddings.
    """
    has_repeated = len(set(names)) != len(names)
    if has_repeated or (prompts is not None and len(prompts) != len(names)):
        raise InputError(
            f"expected {0 if prompts is None else len(prompts)} names, each once, found "
            f"{list(names)[:5]}"
        )
    tower = text_tower(model)
    if isinstance(model.module, LanguageImage):
        visual = model.module.visual
        layout = model.module.layout
        pooling = model.module.global_pool
    else:
        visual = deepcopy(model.module)
        assert isinstance(visual, VisionTransformer)  # text_tower raises for any other module
        visual.reset_classifier(0)
        layout = model.layout
        pooling = "token" if model.anatomy.readout == "cls" else "avg"
    module = LanguageImage(visual, tower, layout=layout, pooling=pooling, prompts=prompts)
    anatomy = model.anatomy
    if not isinstance(model.module, LanguageImage):
        anatomy = read_anatomy(module, image_size=model.input_size)
    prompted = Model(
        module,
        alias=model.alias,
        anatomy=anatomy,
        preprocessing=model.preprocessing,
        classes=tuple(names),
        provenance=model.provenance,
        architecture=model.architecture,
    )
    return prompted.to(model.device).eval().requires_grad_(False)


def zero_shot(
    model: Model,
    classes: Sequence[str],
    *,
    templates: Sequence[str] = PHOTO,
    names: Sequence[str] | None = None,
) -> Model:
    """Return a language-image model as a classifier of these classes, without training.

    The result can be used like any other model. A class is the mean of the embeddings of its
    prompts. Raises UnsupportedError for a model without a text tower, InputError for a template
    without {}.

    templates: prompts with {} in place of a class.
    names: the classes' names in the prompts. By default, these are the classes; for ImageNet, they
        are unambiguous names.

    Example:
        clip = vitlens.load("open-clip:ViT-B-32/openai")
        maps = vitlens.relevance(vitlens.zero_shot(clip, ["cat", "dog"]), images)
    """
    tower = text_tower(model)
    embeddings = by_template(tower, names or prompt_names(classes), templates, device=model.device)
    return with_prompts(model, tuple(classes), ensemble(embeddings))


def by_template(
    tower: TextTower,
    names: Sequence[str],
    templates: Sequence[str],
    *,
    device: torch.device | str = "cpu",
) -> ByTemplate:
    """Return normalised embeddings of every class in every template.

    Raises InputError for a template without {}.
    """
    for template in templates:
        if PLACE not in template:
            raise InputError(
                f"expected {PLACE} in a template for the class, found {template!r}; e.g. "
                f"{PHOTO[0]!r}"
            )
    if not templates or not names:
        raise InputError(f"expected templates and classes, found {len(templates)} and {len(names)}")
    texts = []
    for template in templates:
        texts += [with_phrase(template, name) for name in names]
    embeddings = tower.embed(texts, device=device)
    return embeddings.view(len(templates), len(names), -1)


def with_phrase(template: str, phrase: str) -> str:
    """Return a template with a phrase in place of {}: its article replaces that of the template.

    >>> with_phrase("a photo of a {}.", "the dog")
    'a photo of the dog.'
    """
    before, _, after = template.partition(PLACE)
    words = before.split()
    is_article = bool(words) and words[-1].lower() in _ARTICLES and before.endswith(" ")
    first_words = phrase.lower().split()[:1]  # empty for an empty phrase
    if is_article and first_words and first_words[0] in _ARTICLES:
        before = before.rstrip().removesuffix(words[-1])
    return before + phrase + after.replace(PLACE, phrase)


def with_text(model: Model, texts: Sequence[str], *, templates: Sequence[str] = PHRASES) -> Model:
    """Return a language-image model whose classes are phrases: `zero_shot` with their checks.

    Raises as `zero_shot`, and InputError for no phrase, an empty one, or one given twice.
    """
    if isinstance(texts, str):
        raise InputError(f"expected a list of phrases, found the text {texts!r}; give [{texts!r}]")
    phrases = tuple(text.strip() for text in texts)
    if not phrases or not all(phrases):
        content = "an empty one" if phrases else "none"
        raise InputError(f"expected phrases with a word, found {content}; give 'a dog'")
    seen = set[str]()
    for phrase in phrases:
        plain = " ".join(phrase.lower().split())
        if plain in seen:
            raise InputError(f"expected each phrase once, found {short(phrase)!r} twice")
        seen.add(plain)
    prompted = zero_shot(model, phrases, templates=templates, names=phrases)
    notes = [f"its classes are phrases, each embedded as the mean of {len(templates)} prompts"]
    if len(phrases) == 1:
        notes.append("with one phrase its output is a similarity, not a probability")
    unknown = text_tower(model).unknown_words(phrases)
    if unknown:
        words = ", ".join(map(repr, unknown))
        notes.append(f"no caption of its training has {words}, so these words mean nothing to it")
    provenance = prompted.provenance
    prompted.provenance = replace(provenance, notes=(*provenance.notes, *notes))
    return prompted


def has_prompts(model: Model) -> bool:
    """Return True for a language-image model that classifies by texts."""
    return isinstance(model.module, LanguageImage) and model.module.prompts is not None


def shows_phrases(model: Model) -> bool:
    """Return True for a model of so few texts that each gets its own maps."""
    return has_prompts(model) and len(model.classes) <= MOST_PHRASES


def similarities(model: Model, logits: Logits) -> Float[Tensor, "*batch classes"]:
    """Return the cosine similarity of each image to each text, from a model's logits.

    Raises UnsupportedError for a model that does not classify by texts.
    """
    tower = text_tower(model)
    return (logits.float() - tower.bias) / tower.scale


def class_scores(model: Model, logits: Logits) -> Float[Tensor, "*batch classes"]:
    """Return the probability of each class, or the cosine similarity with a single text.

    The probability of a single class would always be 1.
    """
    if has_prompts(model) and len(model.classes) == 1:
        return similarities(model, logits)
    return logits.float().softmax(-1)


def ensemble(embeddings: ByTemplate) -> Float[Tensor, "classes dim"]:
    """Return the ensemble of all templates: the mean embedding of every class, normalised."""
    return F.normalize(embeddings.mean(0), dim=-1)


def prompt_names(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the classes' names in prompts.

    For ImageNet, these are open_clip's unambiguous names. Other names lose their underscores.
    """
    if tuple(classes) == imagenet_classes():
        from vitlens.models.sources.open_clip import imagenet_prompt_names

        return imagenet_prompt_names()
    return tuple(name.replace("_", " ").strip() for name in classes)
