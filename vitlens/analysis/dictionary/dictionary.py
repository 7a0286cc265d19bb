"""A dictionary: an autoencoder with the model and the place that it belongs to; saved and loaded.

It changes the model as any change of a place does: see `Dictionary.splice` and `Dictionary.scale`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

import torch
from safetensors.torch import save as as_bytes
from torch import Tensor

from vitlens.analysis.dictionary.autoencoder import Latents, SparseAutoencoder, Sparsity
from vitlens.analysis.dictionary.tokens import PatchTokens, is_high, patches_at
from vitlens.errors import InputError, ModelError
from vitlens.files import write_bytes
from vitlens.lens.latents import latent_places
from vitlens.models.fitting import load_strictly
from vitlens.models.model import Model
from vitlens.models.saved import model_fingerprint
from vitlens.models.weights import read_weights, to_save
from vitlens.names import AutoencoderKind
from vitlens.summary import Line, Summary
from vitlens.typed import length, parse_json, read_as
from vitlens.version import __version__

DICTIONARY_FILE: Final = "dictionary.safetensors"
MOST_LATENTS: Final = 1 << 22
_KEY: Final = "vitlens-dictionary"  # the key of the description in the file's metadata

TokenChange = Callable[[PatchTokens], PatchTokens]  # from the tokens at a place to changed ones


@dataclass(frozen=True)
class About:
    """The description of a dictionary in its file.

    model: the fingerprint of the model.
    place: the place of the tokens.
    dim, latents: the sizes of the autoencoder.
    k, kind, prefixes: its sparsity, see `Sparsity`.
    tokens: the number of training tokens.
    vitlens: the version that wrote the file.
    """

    model: str
    place: str
    dim: int
    latents: int
    k: int
    kind: AutoencoderKind
    prefixes: Annotated[tuple[int, ...], length(0, 64)]
    tokens: int
    vitlens: str = ""


@dataclass(frozen=True, repr=False, eq=False)
class Dictionary(Summary):
    """A sparse autoencoder of one place of one model.

    model: the model.
    place: the name of the place, such as "blocks.8.residual".
    autoencoder: the autoencoder, on the model's device and in evaluation mode.
    tokens: the number of training tokens that it has seen, repetitions included.
    notes: remarks for a report.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> images = torch.rand(8, 3, 32, 32)
    >>> plan = vitlens.DictionaryPlan(k=4, expansion=1, tokens=1024)
    >>> sae = vitlens.fit_sae(vit, images, "blocks.2.residual", plan)
    >>> with sae.places():
    ...     captured = vitlens.capture(vit, images, "blocks.2.residual.latents")
    >>> captured["blocks.2.residual.latents"].shape
    torch.Size([8, 64, 128])
    """

    model: Model
    place: str
    autoencoder: SparseAutoencoder
    tokens: int = 0
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        """Return the number of latents."""
        return self.autoencoder.count

    @property
    def patches(self) -> str:
        """Return the place of the patch tokens, which is what it changes."""
        return f"{self.place}[patch]"

    def summary(self) -> Iterator[Line]:
        """Yield the sizes of the dictionary."""
        sparsity = self.autoencoder.sparsity
        yield Line("dictionary", f"{self.place} of {self.model.alias}")
        yield Line("latents", self.autoencoder.count)
        yield Line("latents of a token", sparsity.k)
        yield Line("kind", sparsity.kind)
        if sparsity.prefixes:
            yield Line("prefixes", ", ".join(map(str, sparsity.prefixes)))
        yield Line("training tokens", self.tokens)
        for note in self.notes:
            yield Line("note", note)

    def encode(self, tokens: PatchTokens) -> Latents:
        """Return the latents of patch tokens (..., dim); 0 for tokens of exceptional norm."""
        latents = self.autoencoder.encode(tokens.float())
        access = patches_at(self.model, self.place)
        return latents.masked_fill(is_high(access, tokens)[..., None], 0)

    def splice(self) -> dict[str, TokenChange]:
        """Return the change for `intervene` that replaces patch tokens by their reconstruction.

        Tokens of exceptional norm stay as they are.
        """
        access = patches_at(self.model, self.place)

        def change(tokens: PatchTokens) -> PatchTokens:
            reconstructed = self.autoencoder.reconstruct(tokens.float()).to(tokens.dtype)
            return torch.where(is_high(access, tokens)[..., None], tokens, reconstructed)

        return {self.patches: change}

    def scale(self, factors: Mapping[int, float]) -> dict[str, TokenChange]:
        """Return the change for `intervene` that multiplies some latents.

        What the dictionary does not reconstruct stays as it is.

        factors: the factor of each latent, by its number. 0 removes a latent, 2 doubles it.

        Raises InputError for a number that is not a latent.
        """
        numbers = self._numbers(factors)
        # a factor f adds f - 1 times the latent
        weights = torch.tensor([factors[number] - 1 for number in numbers.tolist()])
        access = patches_at(self.model, self.place)

        def change(tokens: PatchTokens) -> PatchTokens:
            latents = self.autoencoder.encode(tokens.float())[..., numbers]
            directions = self.autoencoder.directions[numbers]
            added = (latents * weights.to(latents)) @ directions
            changed = tokens + added.to(tokens.dtype)
            return torch.where(is_high(access, tokens)[..., None], tokens, changed)

        return {self.patches: change}

    @property
    def directions(self) -> Tensor:
        """Return what a latent of 1 adds to a token (latents, dim)."""
        return self.autoencoder.directions

    def places(self, latents: Sequence[int] | None = None) -> AbstractContextManager[Model]:
        """Return a context in which its latents are places of its model.

        They are "blocks.8.residual.latents" (patches, latents) and "blocks.8.residual.latent.5"
        (patches,), for `capture`, `intervene`, `replay`, `patch` and `ablate`.

        latents: the latents that have a place each, which `ablate` removes (None: all).

        Raises InputError for a number that is not a latent.
        """
        numbers: Sequence[int] = range(len(self))
        if latents is not None:
            numbers = self._numbers(latents).tolist()
        return latent_places(self.model, self.place, self, numbers)

    def _numbers(self, latents: Iterable[int]) -> Tensor:
        """Return the numbers of latents without repeats.

        Raises InputError for a number that is not a latent.
        """
        numbers = list(dict.fromkeys(latents))
        for number in numbers:
            if not 0 <= number < len(self):
                raise InputError(f"expected a latent from 0 to {len(self) - 1}, found {number}")
        return torch.tensor(numbers, dtype=torch.long)

    def save(self, path: Path | str) -> None:
        """Save it as one safetensors file, from which `load_sae` restores it."""
        autoencoder = self.autoencoder
        about = About(
            model=model_fingerprint(self.model),
            place=self.place,
            dim=autoencoder.dim,
            latents=autoencoder.count,
            **asdict(autoencoder.sparsity),  # k, kind and prefixes
            tokens=self.tokens,
            vitlens=__version__,
        )
        metadata = {_KEY: json.dumps(asdict(about), sort_keys=True)}
        write_bytes(Path(path), as_bytes(to_save(autoencoder.state_dict()), metadata=metadata))


def load_sae(model: Model, path: Path | str, *, place: str | None = None) -> Dictionary:
    """Return the dictionary in a file that `Dictionary.save` wrote.

    place: the place that the dictionary must belong to, such as "blocks.8.residual" (None: any).

    Raises ModelError for a file without a dictionary, and InputError for a dictionary of another
    model or place.

    >>> import tempfile, torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> images = torch.rand(8, 3, 32, 32)
    >>> plan = vitlens.DictionaryPlan(k=4, expansion=1, tokens=1024)
    >>> sae = vitlens.fit_sae(vit, images, "blocks.2.residual", plan)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sae.save(f"{folder}/sae.safetensors")
    ...     restored = vitlens.load_sae(vit, f"{folder}/sae.safetensors")
    >>> restored.place, len(restored)
    ('blocks.2.residual', 128)
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(
            f"expected a dictionary, found no file {path}; vitlens sae writes {DICTIONARY_FILE}"
        )
    stored = read_weights(path)
    if _KEY not in stored.metadata:
        raise ModelError(
            f"expected a dictionary that vitlens sae wrote in {path}, found other weights"
        )
    source = f"the description in {path}"
    hint = "take another copy of the file, or train it again"
    description = parse_json(stored.metadata[_KEY], source=source, error=ModelError, hint=hint)
    about = read_as(About, description, source=source, error=ModelError, hint=hint)
    if place is not None and about.place != place:
        raise InputError(f"expected a dictionary of {place} in {path}, found one of {about.place}")
    if about.model != model_fingerprint(model):
        raise InputError(
            f"expected a dictionary of {model.alias} in {path}, found one of another model or of "
            "other weights; train one with vitlens sae"
        )
    # checked before the autoencoder is made: a damaged file could ask for any amount of memory
    stored_numbers = sum(tensor.numel() for tensor in stored.state.values())
    if not 0 < about.latents * about.dim <= stored_numbers:
        raise ModelError(f"expected tensors of {about.latents} latents in {path}; {hint}")
    sparsity = Sparsity(about.k, about.kind, about.prefixes)
    autoencoder = SparseAutoencoder(about.dim, about.latents, sparsity)
    load_strictly(autoencoder, stored.state, where=f"the dictionary in {path}")
    width = patches_at(model, about.place).place.shape[-1]
    if width != about.dim:
        raise ModelError(f"expected directions of {width} components in {path}; {hint}")
    autoencoder.to(model.device).eval().requires_grad_(False)
    return Dictionary(model, about.place, autoencoder, about.tokens)
