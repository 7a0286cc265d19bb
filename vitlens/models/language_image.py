"""A model that knows images and texts: its image tower as a model's model, its text tower beside it.

Contrastive models (CLIP, Radford 2021; SigLIP, Zhai 2023) put images and texts into one space. With the embeddings of
some prompts in place, the logits are how similar an image is to each: everything that works on a classifier works on
these, rollout and relevance among it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.layout import TokenLayout
from vitlens.models.model import Model

Embeddings = Float[Tensor, "texts dim"]
Tokenizer = Callable[[list[str]], Tensor]
_AT_ONCE = 256  # texts


@dataclass(eq=False)
class TextTower:
    """What a model makes of texts.

    model: the whole model, which encodes token ids with encode_text; tokenizer: makes it, when it is first needed;
    context: tokens that a text may have, its first and last included; name: of the model, for messages.
    """

    model: nn.Module
    tokenizer: Callable[[], Tokenizer]
    context: int
    name: str
    _made: list[Tokenizer] = field(default_factory=list)

    @property
    def scale(self) -> float:
        """What a cosine is multiplied by to be a logit."""
        return float(self.model.logit_scale.detach().exp())  # type: ignore[operator]

    @property
    def bias(self) -> float:
        """What is then added (SigLIP's; 0 elsewhere)."""
        found = getattr(self.model, "logit_bias", None)
        return 0.0 if found is None else float(found.detach())

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """Token ids (texts, context). Raises InputError for no text, an empty one, or one that would be cut off."""
        if not texts or any(not text.strip() for text in texts):
            raise InputError(
                "expected texts with at least a word, found an empty one; give --prompt 'a photo of a dog'"
            )
        if not self._made:
            self._made.append(self.tokenizer())
        encode = getattr(self._made[0], "encode", None)
        for text in texts:
            if encode is None:  # a tokenizer that does not say how long a text becomes
                break
            length = 2 + len(encode(text))  # a first and a last token
            if length > self.context:
                raise InputError(
                    f"expected texts of at most {self.context} tokens for {self.name}, found {length}: {text!r}"
                )
        return self._made[0](list(texts))

    def embed(self, texts: Sequence[str], *, device: torch.device | str = "cpu") -> Embeddings:
        """Embeddings (texts, dim) of length 1, on a device; the towers are moved there. Errors as of tokens."""
        ids = self.tokens(texts)
        self.model.to(device)
        parts = []
        with torch.no_grad(), evaluating(self.model):
            for start in range(0, len(ids), _AT_ONCE):
                found = self.model.encode_text(ids[start : start + _AT_ONCE].to(device))  # type: ignore[operator]
                parts.append(F.normalize(found.float(), dim=-1))
        return torch.cat(parts)


class LanguageImage(nn.Module):
    """The image tower; with prompts it answers with the similarity of an image to each, without with the embedding.

    pooling: how the tower makes one vector of its tokens ("token", "avg", "map"), in timm's words; layout: of its
    tokens, None for a CNN; prompts: embeddings (prompts, dim) of length 1, or None. The text tower is no part of it: it
    has no parameters here and takes no part in a forward pass.
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
        """The norm after the last block, where it has one of its own."""
        trunk = getattr(self.visual, "trunk", self.visual)
        found = getattr(trunk, "ln_post", None) or getattr(trunk, "norm", None)
        return found if isinstance(found, nn.Module) else None

    @property
    def pos_embed(self) -> Tensor | None:
        """Learned position embeddings, of all tokens or of the patches."""
        trunk = getattr(self.visual, "trunk", self.visual)
        found = getattr(trunk, "positional_embedding", None)
        return found if found is not None else getattr(trunk, "pos_embed", None)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch outputs"]:
        """Logits (batch, prompts) = scale · cosine + bias; without prompts embeddings (batch, dim), any length."""
        found = self.visual(images)
        embedding: Tensor = found[0] if isinstance(found, tuple) else found  # CoCa gives its tokens, too
        if self.prompts is None:
            return embedding
        logits: Tensor = self.text.scale * F.normalize(embedding, dim=-1) @ self.prompts.to(embedding).T
        return logits + self.text.bias


def text_tower(model: Model) -> TextTower:
    """A model's text tower. Raises UnsupportedError for one without, naming models that have one."""
    if not isinstance(model.module, LanguageImage):
        raise UnsupportedError(
            f"expected a model with a text tower, found {model.alias!r}, which knows no texts; those of open_clip "
            "have one: open-clip:ViT-B-32/openai, open-clip:ViT-B-16-SigLIP/webli; see vitlens models 'open-clip:*'"
        )
    return model.module.text


def has_text_tower(model: Model) -> bool:
    """Whether a model knows texts."""
    return isinstance(model.module, LanguageImage)


def with_prompts(model: Model, names: Sequence[str], prompts: Embeddings | None) -> Model:
    """The same image tower with other prompts, whose names become the classes; None: embeddings again.

    Raises UnsupportedError for a model without a text tower, InputError unless there is one name a prompt, each once.
    """
    tower = text_tower(model)
    old = model.module
    assert isinstance(old, LanguageImage)  # text_tower has let nothing else through
    if len(set(names)) != len(names) or (prompts is not None and len(prompts) != len(names)):
        raise InputError(f"expected {0 if prompts is None else len(prompts)} names, each once, found {list(names)[:5]}")
    module = LanguageImage(old.visual, tower, layout=old.layout, pooling=old.global_pool, prompts=prompts)
    made = Model(
        module,
        alias=model.alias,
        anatomy=replace(model.anatomy),
        preprocessing=model.preprocessing,
        classes=tuple(names),
        provenance=model.provenance,
        architecture=model.architecture,
    )
    return made.to(model.device).eval().requires_grad_(False)
