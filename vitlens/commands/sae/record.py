"""The record of `vitlens sae`: a dictionary, its baselines, its latents and their images."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitlens.analysis.dictionary.rows import ClassLatentRow, DictionaryRow, LatentRow
from vitlens.arrays import Pixels, Stack
from vitlens.commands.shared.label_rows import NoteRow
from vitlens.record import OfModel, Record, arrays, col, table


@dataclass(frozen=True, kw_only=True)
class SetupRow(OfModel):
    """The place of the dictionary, its size, and the tokens that it was made of.

    k: the number of latents that reconstruct a token.
    kind: the rule by which they are chosen.
    trained: False for a dictionary of a file.
    images: the number of training images.
    tokens: the number of their tokens.
    seen: the number of tokens seen in the training, repetitions included.
    left_out: the share of patch tokens that are left out for their exceptional norm.
    prefix: the number of tokens before the patches of an image, which are left out.
    encoder: the model by which images are compared, or "pixels".
    """

    place: str = col("place")
    latents: int = col("latents")
    dim: int = col("components of a token")
    k: int = col("k")
    kind: str = col("kind")
    trained: bool = col("trained")
    images: int = col("training images", default=0)
    tokens: int = col("training tokens", default=0)
    seen: int = col("tokens seen, repetitions included")
    left_out: float = col("patch tokens of exceptional norm", unit="fraction")
    prefix: int = col("prefix tokens left out of an image")
    encoder: str = col("encoder for monosemanticity")


@dataclass(frozen=True)
class ExemplarRow:
    """An image of a latent.

    rank: its place among the images of the latent, from 0, the largest value first.
    value: the largest activation among its patches.
    """

    latent: int = col("latent")
    rank: int = col("rank")
    image: str = col("image")
    label: str | None = col("label")
    value: float = col("largest activation", unit="")


@dataclass(frozen=True)
class GalleryArrays:
    """The images of the exemplars, in the order of their rows.

    images: their pixels.
    maps: (exemplars, rows, columns), what the pixels of each patch add to the latent.
    """

    images: Pixels
    maps: Stack


@dataclass(frozen=True, kw_only=True)
class SaeRecord(Record):
    """A dictionary of one place in a model.

    setup: one row.
    dictionaries: the dictionary, then its baselines.
    latents: the tested latents, the largest effect first.
    classes: the latents with the largest estimated effects on each class.
    exemplars: the images of latents, in the order of the gallery.
    """

    setup: tuple[SetupRow, ...] = table()
    dictionaries: tuple[DictionaryRow, ...] = table()
    latents: tuple[LatentRow, ...] = table()
    classes: tuple[ClassLatentRow, ...] = table()
    exemplars: tuple[ExemplarRow, ...] = table()
    notes: tuple[NoteRow, ...] = table()
    gallery: Mapping[str, GalleryArrays] = arrays("gallery-{model}")
