"""The options of `vitlens sae`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import ModelOnImages, attributes_option, predicted_option
from vitlens.commands.run.parsing import names_of
from vitlens.names import AutoencoderKind

_DICTIONARY = "Dictionary"
_TESTS = "Latents"


@dataclass(frozen=True)
class SaeOptions(ModelOnImages):
    """The model, the place and size of the dictionary, and the latents that are tested.

    layer: None for one at two thirds of the depth.
    part: residual, attention, mlp or head.N.
    dictionary: a file of an earlier run, in place of a training.
    encoder: a model in whose features images are compared, None for pixels.
    show: paths of the images of the gallery, empty for held-out images.
    """

    layer: int | None = option(
        "--layer",
        "Block of the dictionary, from 0 (default: at two thirds of the depth).",
        metavar="N",
        low=0,
    )
    part: str = option(
        "--part",
        "Output of the block: residual, attention, mlp or head.N.",
        default="residual",
        metavar="NAME",
    )
    dictionary: Path | None = option(
        "--dictionary",
        "Show the dictionary in this file, which an earlier run wrote, and train none.",
        metavar="FILE",
    )
    k: int = option(
        "--k",
        "Latents that reconstruct a token.",
        default=32,
        metavar="N",
        low=1,
        panel=_DICTIONARY,
    )
    kind: AutoencoderKind = option(
        "--kind",
        "Keep the k largest latents of each token, or k for each token on average.",
        default="topk",
        panel=_DICTIONARY,
    )
    expansion: int = option(
        "--expansion",
        "Latents for each component of a token.",
        default=8,
        metavar="N",
        low=1,
        panel=_DICTIONARY,
    )
    prefixes: int = option(
        "--prefixes",
        "Nested dictionaries that must each reconstruct the tokens (Matryoshka); 1 for none.",
        default=1,
        metavar="N",
        low=1,
        panel=_DICTIONARY,
    )
    tokens: int = option(
        "--tokens",
        "Tokens seen in the training, repetitions included.",
        default=400_000,
        metavar="N",
        low=1,
        panel=_DICTIONARY,
    )
    bank: int = option(
        "--bank",
        "Use at most N training images, balanced over classes.",
        default=1000,
        metavar="N",
        low=1,
        panel=_DICTIONARY,
    )
    crops: int = option(
        "--crops",
        "Also train on N random crops of each training image.",
        default=0,
        metavar="N",
        low=0,
        panel=_DICTIONARY,
    )
    seeds: int = option(
        "--seeds",
        "Trainings that are compared for stability, 1 or 2.",
        default=2,
        metavar="N",
        low=1,
        high=2,
        panel=_DICTIONARY,
    )
    tested: int = option(
        "--tested",
        "Latents with the largest effects that are removed and doubled.",
        default=24,
        metavar="N",
        low=1,
        panel=_TESTS,
    )
    latent: int | None = option(
        "--latent", "Test and show only this latent.", metavar="N", low=0, panel=_TESTS
    )
    of_class: tuple[str, ...] = option(
        "--class",
        "List the latents that matter most for these classes (default: all, at most 20).",
        default=(),
        metavar="LIST",
        parse=names_of,
        panel=_TESTS,
    )
    encoder: str | None = option(
        "--encoder",
        "Model in whose features images are compared for monosemanticity (default: pixels).",
        metavar="MODEL",
        complete="model",
        panel=_TESTS,
    )
    show: tuple[str, ...] = option(
        "--show",
        "Paths of the images that the gallery shows (default: held-out images).",
        default=(),
        metavar="LIST",
        parse=names_of,
        panel=_TESTS,
    )
    attributes: Path | None = attributes_option()
    predicted: bool = predicted_option()
    cache: bool = option("--cache/--no-cache", "Keep tokens in --data-dir.", default=True)
