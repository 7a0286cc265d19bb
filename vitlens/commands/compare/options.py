"""The options of `vitlens compare`."""

from dataclasses import dataclass

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.run.flags import choices, option
from vitlens.commands.run.options import SharedOptions, data_option, several_models


@dataclass(frozen=True)
class CompareOptions(SharedOptions):
    """Two models on the same labelled images.

    method: of the maps, one for both models or one each (none: of the preferred ones of each model's family, the one
    that passes its checks best). target:
    the class whose logit is explained, "predicted", "true" or a class. panels: images shown; maps: images, drawn with
    the seed, over which the statistics of maps are averaged. harder: whether it is measured what the models rely on,
    and accuracy on filtered, shuffled and occluded images, on `disturbed` of them at most; every_cue: by all
    interventions, or by one on each of the main cues. checked: images on which methods are checked, at most.
    cue_conflict: images whose shape and texture belong to different classes.
    """

    models: tuple[str, ...] = several_models()
    data: str | None = data_option()
    method: tuple[str, ...] = choices(
        "--method",
        "Of the maps: one for both models, or one each (default: the best checked of relevance, gradcam, layercam).",
        tuple(ATTRIBUTIONS),
        default=(),
        metavar="A,B",
        shown=False,
    )
    target: str = option(
        "--target", "Of the maps: predicted, true, or a class (name or index).", default="predicted", metavar="CLASS"
    )
    panels: int = option("--panels", "Images shown side by side.", default=50, metavar="N", low=1)
    maps: int = option("--maps", "Images whose maps are averaged, at most.", default=500, metavar="N", low=1)
    checked: int = option(
        "--checked",
        "Images on which the methods of maps are checked, at most (0: none are).",
        default=64,
        metavar="N",
        low=0,
    )
    harder: bool = option("--harder/--no-harder", "Also what the models rely on, on changed images.", default=True)
    disturbed: int = option(
        "--disturbed", "Images that are changed to see what models rely on, at most.", default=500, metavar="N", low=1
    )
    every_cue: bool = option(
        "--every-cue/--main-cues",
        "All interventions on cues, or one on each of the main cues.",
        default=True,
        shown=False,
    )
    cue_conflict: str | None = option(
        "--cue-conflict",
        "Images named shapeN-textureM, for the shape bias (default: those of DATA, where it has some).",
        metavar="DATA",
        shown=False,
    )
