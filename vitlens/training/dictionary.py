"""Train the dictionary of a layer: a sparse autoencoder, by the steps of `fit`, on tokens.

The optimiser, its schedule, gradients averaged over processes, bf16 and the refusal of losses that
are not finite are those of `Updates`. The files and tests of a run are left out. A dictionary
trains in minutes, has no labels to be tested on, and is measured once by separate measures.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitlens.analysis.dictionary.autoencoder import (
    Codes,
    SparseAutoencoder,
    Sparsity,
    losses,
    nested_sizes,
)
from vitlens.analysis.dictionary.dictionary import Dictionary
from vitlens.analysis.dictionary.tokens import TokenSet, patches_at, read_tokens
from vitlens.data.split import Split
from vitlens.errors import InputError, argument, by_caller
from vitlens.inputs import takes_splits
from vitlens.models.anatomy import Anatomy
from vitlens.models.model import Model
from vitlens.models.rebuild import seeded
from vitlens.names import AutoencoderKind
from vitlens.pixels import AnyImages
from vitlens.processes import accelerated
from vitlens.training.feed import epoch_batches, process_share
from vitlens.training.recipe import Recipe
from vitlens.training.speed import choose_precision
from vitlens.training.task import Task
from vitlens.training.updates import Updates

TOKENS: Final = 1_000_000  # tokens seen in a training, including repetitions
BATCH: Final = 1024  # tokens of a step
EXPANSION: Final = 8  # latents for each component of a token
FEWEST_TOKENS: Final = 4  # fewest training tokens for each latent
# a latent that is 0 for so many tokens, or for as many as there are, is dead
PATIENCE: Final = 200_000
_TOKENS_AT_ONCE: Final = 65_536  # tokens read at a time to find their mean

RECIPE: Final = Recipe(
    batch_size=BATCH,
    learning_rate=3e-3,
    weight_decay=0.0,
    warmup=0.05,
    minimum=0.01,
    clip=1.0,
)

Advance = Callable[[int], object]  # called with the number of tokens just seen


@dataclass(frozen=True)
class DictionaryPlan:
    """The size of a dictionary and of its training.

    k: the number of latents that reconstruct a token.
    kind: "topk", or "batch-topk", in which k is a mean over tokens.
    expansion: the number of latents for each component of a token.
    prefixes: the number of nested dictionaries that must each reconstruct the tokens (Matryoshka),
        1 for none.
    tokens: the number of tokens seen in the training, including repetitions.
    recipe: the settings of the optimiser, whose epochs follow from the tokens.

    >>> import vitlens
    >>> vitlens.DictionaryPlan(k=16, expansion=4).sparsity(256).k
    16
    """

    k: int = 32
    kind: AutoencoderKind = "topk"
    expansion: int = EXPANSION
    prefixes: int = 1
    tokens: int = TOKENS
    recipe: Recipe = RECIPE

    def sparsity(self, count: int) -> Sparsity:
        """Return the sparsity of a dictionary with so many latents."""
        return Sparsity(self.k, self.kind, nested_sizes(count, self.prefixes))


@dataclass(frozen=True)
class Reconstruction:
    """The objective of a dictionary's training.

    autoencoder: the sparse autoencoder.
    patience: a latent that is 0 for so many tokens is dead (see `losses`).
    """

    autoencoder: SparseAutoencoder
    patience: int

    def module(self, model: Model) -> nn.Module:
        """Return the autoencoder."""
        return model.module

    def logits(self, outputs: Any) -> None:  # noqa: ARG002
        """Return None, as no classes are predicted."""
        return

    def loss(self, outputs: Codes, targets: Tensor, images: Tensor, *, smoothing: float) -> Tensor:  # noqa: ARG002
        """Return the loss summed over the tokens, which are passed as images."""
        return losses(self.autoencoder, outputs, images, patience=self.patience).total

    def identity(self) -> Mapping[str, object]:
        """Return the settings of the objective."""
        return {"patience": self.patience}


@takes_splits
def fit_sae(
    model: Model,
    images: AnyImages,
    place: str,
    plan: DictionaryPlan = DictionaryPlan(),
    *,
    seed: int = 0,
    precision: str = "fp32",
    cache: Path | None = None,
) -> Dictionary:
    """Train a sparse autoencoder on the patch tokens at one place of a model.

    Prefix tokens and patch tokens of exceptional norm are left out. Raises InputError for an
    unknown layer and for too few images, UnsupportedError for a model or place without a token for
    each patch.

    images: images in any form that `vitlens.images` takes.
    place: the residual stream, attention, a head or the MLP of a block, for example
        "blocks.8.residual".
    plan: the size of the dictionary and of its training.
    cache: a folder of cached features; None holds the tokens in memory.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> images = torch.rand(8, 3, 32, 32)
    >>> plan = vitlens.DictionaryPlan(k=4, expansion=1, tokens=4096)
    >>> sae = vitlens.fit_sae(vit, images, "blocks.3.residual", plan)
    >>> len(sae), sae.encode(torch.zeros(1, 64, 128)).shape
    (128, torch.Size([1, 64, 128]))
    >>> with vitlens.intervene(vit, sae.scale({5: 0.0})):
    ...     without_latent_5 = vit(images)
    """
    assert isinstance(images, Split)
    require_enough(model, len(images), place, plan)
    token_set = read_tokens(model, images, place, cache=cache, precision=precision)
    return train_dictionary(model, token_set, images, place, plan, seed=seed, precision=precision)


def require_enough(model: Model, images: int, place: str, plan: DictionaryPlan) -> None:
    """Raise InputError for a plan that does not fit the place, or needs more images than these."""
    patches, dim = patches_at(model, place).place.shape
    latents = plan.expansion * dim
    plan.sparsity(latents).require_fitting(latents)
    needed = math.ceil(FEWEST_TOKENS * latents / patches)
    if images < needed:
        raise InputError(
            f"expected at least {needed} images for {latents} latents ({FEWEST_TOKENS} tokens "
            f"each, {patches} from an image), found {images}; give more, or a smaller "
            f"{argument('expansion')}"
        )


def train_dictionary(
    model: Model,
    tokens: TokenSet,
    split: Split,
    place: str,
    plan: DictionaryPlan,
    *,
    seed: int = 0,
    precision: str = "fp32",
    progress: AbstractContextManager[Advance] | None = None,
) -> Dictionary:
    """Return a dictionary of a place, trained on the tokens that are kept.

    Raises InputError if too few tokens are kept.

    split: the images of the tokens.
    progress: a context that yields a function of the number of tokens just seen.
    """
    kept = tokens.kept  # indices of the tokens without those of exceptional norm
    dim = tokens.values.shape[-1]
    latents = plan.expansion * dim
    if len(kept) < FEWEST_TOKENS * latents:
        raise InputError(
            f"expected at least {FEWEST_TOKENS * latents} tokens for {latents} latents, found "
            f"{len(kept)}; {by_caller(python='give more images', command='raise --limit')}"
        )
    with seeded(seed):
        autoencoder = SparseAutoencoder(dim, latents, plan.sparsity(latents))
    autoencoder.fit_normalisation(map(tokens.pick, kept.split(_TOKENS_AT_ONCE)))
    if len(kept) > plan.tokens:
        generator = torch.Generator().manual_seed(seed)
        kept = kept[torch.randperm(len(kept), generator=generator)[: plan.tokens]]
    recipe = replace(plan.recipe, epochs=max(1, round(plan.tokens / len(kept))))
    objective = Reconstruction(autoencoder, min(PATIENCE, len(kept)))
    with ExitStack() as stack:
        accelerator, processes = accelerated(model.device)
        precision, note = choose_precision(processes.device, precision)
        devices = [processes.device] if processes.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        task = Task(
            model=_as_model(model, autoencoder.to(processes.device)),
            train=split,
            test=split,  # not used: there is no test
            recipe=recipe,
            seed=seed,
            precision=precision,
            objective=objective,
            processes=processes,
            examples=len(kept),
        )
        updates = Updates(task, accelerator)
        advance = stack.enter_context(progress or nullcontext(_ignore))
        autoencoder.train()
        for epoch in range(recipe.epochs):
            for batch in epoch_batches(len(kept), recipe.batch_size, seed=seed, epoch=epoch):
                share = process_share(batch, processes.index, processes.count)
                # share has positions in `kept`, which has the numbers of tokens
                vectors = tokens.pick(kept[share]).to(processes.device)
                normalised = autoencoder.normalised(vectors)
                # the objective uses no labels: the tokens' numbers take their place
                updates.apply(normalised, labels=share, batch_size=len(batch))
                autoencoder.normalise_decoder()
                advance(len(batch))
    autoencoder.eval().requires_grad_(False)
    seen = updates.step * task.batch_size
    notes = (note,) if note else ()
    return Dictionary(model, place, autoencoder, seen, notes=notes)


def _ignore(_done: int) -> None:
    """Show no progress."""


def _as_model(model: Model, autoencoder: SparseAutoencoder) -> Model:
    """Return the autoencoder as a model for a Task; it takes tokens, not images."""
    return Model(
        autoencoder,
        alias=model.alias,
        anatomy=Anatomy("other", ()),
        preprocessing=model.preprocessing,
        classes=(),
        provenance=model.provenance,
        architecture={},
    )
