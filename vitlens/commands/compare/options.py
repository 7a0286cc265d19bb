"""The options of `vitlens compare`."""

from dataclasses import dataclass
from functools import partial

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.run.flags import option
from vitlens.commands.run.options import SharedOptions, data_option, several_models
from vitlens.commands.shared.methods import LIBRARY_METHODS, methods_of_text


@dataclass(frozen=True)
class CompareOptions(SharedOptions):
    """The two models, their images, the maps that are compared, and the changes of the images.

    method: the method of the maps, one for both models or one for each; empty for the preferred
        method of each family that passes its checks best.
    target: class whose logit the maps explain.
    panels: images that are shown.
    maps: randomly drawn images over which statistics of maps are averaged.
    checked: images on which methods are checked.
    harder: True to measure reliance on cues and accuracy on disturbed images, on at most
        `disturbed` of them.
    every_cue: True for all interventions, False for one on each of the main cues.
    cue_conflict: images with the shape of one class and the texture of another.
    """

    models: tuple[str, ...] = several_models()
    data: str | None = data_option()
    method: tuple[str, ...] = option(
        "--method",
        "Method of the maps: one for both models, or one each, also of another library "
        f"({LIBRARY_METHODS}) (default: of relevance, gradcam and layercam, the one that passes "
        "its checks best).",
        default=(),
        metavar="A,B",
        parse=partial(methods_of_text, own=tuple(ATTRIBUTIONS)),
        shown=False,
    )
    target: str = option(
        "--target",
        "Class that the maps explain: predicted, true, or a class (name or index).",
        default="predicted",
        metavar="CLASS",
    )
    panels: int = option(
        "--panels",
        "Number of images shown side by side.",
        default=50,
        metavar="N",
        low=1,
    )
    maps: int = option(
        "--maps",
        "Average statistics of maps over at most N images.",
        default=500,
        metavar="N",
        low=1,
    )
    checked: int = option(
        "--checked",
        "Check the methods of the maps on at most N images (0: no checks).",
        default=64,
        metavar="N",
        low=0,
    )
    harder: bool = option(
        "--harder/--no-harder",
        "Also change images to measure what the models rely on.",
        default=True,
    )
    disturbed: int = option(
        "--disturbed",
        "Change at most N images.",
        default=500,
        metavar="N",
        low=1,
    )
    every_cue: bool = option(
        "--every-cue/--main-cues",
        "Run all interventions on cues, or one on each of the main cues.",
        default=True,
        shown=False,
    )
    cue_conflict: str | None = option(
        "--cue-conflict",
        "Images named shapeN-textureM for the shape bias (default: those of DATA, if it has any).",
        metavar="DATA",
        shown=False,
    )
