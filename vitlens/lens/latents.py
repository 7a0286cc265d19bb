"""Latents of a dictionary as places of a model.

These are, for example, blocks.8.residual.latents and blocks.8.residual.latent.5. A place of latents
is read by encoding the patch tokens. A change of latents moves the tokens along their directions.
What the dictionary does not reconstruct stays as it is.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from vitlens.lens.access import Access, Place
from vitlens.lens.place_patterns import resolve_places
from vitlens.lens.places import further_places
from vitlens.models.model import Model


class Encoder(Protocol):
    """A dictionary of one place, such as a sparse autoencoder."""

    def __len__(self) -> int:
        """Return the number of latents."""
        ...

    def encode(self, tokens: Tensor) -> Tensor:
        """Return the latents (..., latents) of patch tokens (..., dim)."""
        ...

    @property
    def directions(self) -> Float[Tensor, "latents dim"]:
        """Return what a latent of 1 adds to a token."""
        ...


class LatentView:
    """The latents of tokens, or one of them; see `lens.access.View`."""

    def __init__(self, encoder: Encoder, latent: int | None = None) -> None:
        self.encoder = encoder
        self.latent = latent

    def read(self, tokens: Tensor) -> Tensor:
        """Return the latents (..., latents) of tokens (..., dim), or one of them (...)."""
        latents = self.encoder.encode(tokens)
        return latents if self.latent is None else latents[..., self.latent]

    def write(self, tokens: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return the tokens with new latents in the place of the old ones."""
        directions = self.encoder.directions.to(tokens)  # (latents, dim)
        difference = (new - old).to(tokens)
        if self.latent is None:  # (.., latents)
            return tokens + difference @ directions
        return tokens + difference[..., None] * directions[self.latent]


@contextmanager
def latent_places(
    model: Model, place: str, encoder: Encoder, latents: Sequence[int]
) -> Iterator[Model]:
    """Add the latents of a dictionary to the places of a model; removed on exit.

    place: the place of the dictionary, such as "blocks.8.residual".
    latents: the numbers of the latents that get separate places, too.
    """
    (patches,) = resolve_places(model, f"{place}[patch]")
    with further_places(model, list(_accesses(patches, place, encoder, latents))):
        yield model


def _accesses(
    patches: Access, place: str, encoder: Encoder, latents: Sequence[int]
) -> Iterator[Access]:
    """Yield the access to all latents together, then to each of them."""
    count = patches.place.shape[0]
    all_latents = Place(
        f"{place}.latents",
        kind="latents",
        axes=("patches", "latents"),
        shape=(count, len(encoder)),
    )
    yield replace(patches, place=all_latents, view=LatentView(encoder))
    for latent in latents:
        single_latent = Place(
            f"{place}.latent.{latent}", kind="latent", axes=("patches",), shape=(count,)
        )
        yield replace(patches, place=single_latent, view=LatentView(encoder, latent))
