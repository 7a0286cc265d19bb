"""The options of `vitlens explain`."""

from dataclasses import dataclass
from functools import partial
from typing import Final

from vitlens.analysis.attention.registry import REFINE_STEPS
from vitlens.analysis.faithfulness.defaults import (
    COMPOSITE_KINDS,
    COMPOSITES,
    OTHER_SUBSTRATES,
    SUBSTRATE,
)
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.commands.run.flags import bundle, choices, option
from vitlens.commands.run.options import SharedOptions, data_option, images_option, several_models
from vitlens.commands.run.parsing import layers_of, names_of
from vitlens.commands.shared.methods import LIBRARY_METHODS, methods_of_text
from vitlens.names import SUBSTRATES, Refining, Substrate, Upsampling

ALL: Final = "all"
AUTO: Final = "auto"
NONE: Final = "none"
_DEFAULT_COMPOSITES: Final = tuple(kind.name for kind in COMPOSITE_KINDS.values() if kind.default)


@dataclass(frozen=True)
class RefineOptions:
    """The refinement of every map (attribution/refinement.py).

    times: a method of the registry, or "none".
    """

    refine: Refining = option(
        "--refine",
        "affinity: smooth maps of patches by the model's attention between patches.",
        default="none",
    )
    layers: tuple[int, ...] | None = option(
        "--refine-layers",
        "With --refine: layers whose attention smooths the maps, from 0.",
        metavar="LIST",
        parse=layers_of,
        shown="all",
    )
    steps: int = option(
        "--refine-steps",
        "With --refine: number of smoothing steps, an even number.",
        default=REFINE_STEPS,
        metavar="N",
        low=0,
    )
    views: int = option(
        "--views",
        "Average maps over N views: shifts by half a patch, then mirrored.",
        default=1,
        metavar="N",
        low=1,
    )
    times: str = option(
        "--times",
        "Multiply every map by the map of this method.",
        default=NONE,
        metavar="METHOD",
    )
    upsample: Upsampling = option(
        "--upsample",
        "image: enlarge maps to pixels, along the edges of the image.",
        default="none",
    )


@dataclass(frozen=True)
class ExplainOptions(SharedOptions):
    """The options for attribution maps of one or several models.

    method: names of the registry or of other libraries, or "all" (empty: the default methods); each
        model gets those that are defined for it.
    target: "predicted", "true", or a class by name or index.
    verify: by default with all methods and on all images; without it and without a limit, only a
        few images of a data set are explained.
    maps: files of maps that were made elsewhere, with which all images are explained.
    show: file names of the images in figures.
    """

    models: tuple[str, ...] = several_models()
    images: tuple[str, ...] = images_option()
    data: str | None = data_option()
    method: tuple[str, ...] = option(
        "--method",
        f"Comma-separated, or all: {', '.join(ATTRIBUTIONS)}; or of another library, "
        f"{LIBRARY_METHODS}, LIBRARY:{ALL} for all of it.",
        default=(),
        metavar="LIST",
        parse=partial(methods_of_text, own=(*ATTRIBUTIONS, ALL), several=True),
        shown=f"those of {', '.join(default_methods())} that a model has",
    )
    auto: bool = option(
        "--auto",
        "Choose among the methods of --method by quick checks on half of up to 40 images; the "
        "other half judges it.",
        default=False,
    )
    target: str = option(
        "--target",
        "Class to explain: predicted, true, or a class by name or index.",
        default="predicted",
        metavar="CLASS",
    )
    verify: bool = option(
        "--verify",
        "Check every method: remove patches, randomise weights, score localisation, and rank the "
        "methods.",
        default=False,
    )
    substrate: Substrate = option(
        "--substrate",
        "With --verify: replacement of removed patches.",
        default=SUBSTRATE,
    )
    counterfactuals: bool = option(
        "--counterfactuals/--no-counterfactuals",
        "With --verify: search for patches whose removal changes the prediction (the slowest "
        "check).",
        default=True,
    )
    maps: tuple[str, ...] = option(
        "--maps",
        "Also judge maps that were made elsewhere: an .npz with maps (n, rows, columns) and, to "
        "match images, their names as files; may be repeated.",
        default=(),
        metavar="[NAME=]FILE",
        shown=False,
    )
    show: tuple[str, ...] = option(
        "--show",
        "Draw these images, by file name (default: the first).",
        default=(),
        metavar="LIST",
        parse=names_of,
    )
    composites: tuple[str, ...] = choices(
        "--composites",
        f"With --verify: {', '.join(COMPOSITE_KINDS)}, {NONE}, or {AUTO}: "
        f"{' and '.join(_DEFAULT_COMPOSITES)} without masks.",
        (*COMPOSITE_KINDS, AUTO, NONE),
        default=(AUTO,),
        shown=AUTO,
    )
    composite_count: int = option(
        "--composite-count",
        "Maximum number of composite images of each kind.",
        default=COMPOSITES,
        metavar="N",
        low=2,
    )
    other_substrates: tuple[str, ...] = choices(
        "--other-substrates",
        f"With --verify: {', '.join(SUBSTRATES)}, or {NONE}: further replacements, to compare "
        "rankings of methods.",
        (*SUBSTRATES, NONE),
        default=OTHER_SUBSTRATES,
        shown=", ".join(OTHER_SUBSTRATES),
    )
    stability: bool = option(
        "--stability/--no-stability",
        "With --verify: check that maps follow shifts of the images by 1/4, 1/2 and 1 px, and a "
        "flip.",
        default=True,
    )
    refine: RefineOptions = bundle(RefineOptions)
