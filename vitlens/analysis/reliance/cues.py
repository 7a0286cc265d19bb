"""Cues that a model may rely on, with interventions and their controls; free of torch.

An intervention changes one cue of every image. Its control changes the pixels by the same mean
absolute distance and leaves the cue as it is. Levels of a disturbance
(analysis/failures/disturbances.py) are interventions, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Region = Literal["image", "background", "object"]
_EDITS: Final = "vitlens.analysis.reliance.edits"
_CONTROLS: Final = "vitlens.analysis.reliance.controls"


@dataclass(frozen=True)
class Intervention:
    """One change of a cue in all images.

    name: within its cue.
    change, control: the changed images in words, after "on images".
    edit, match: the functions that make the two, as module:function, with the region and the level.
    main: whether it stands for its cue where there is no time for all.
    disturbance: the one of which this is a level, in place of a function.
    objects: whether it is for images with known objects only (True), for others only (False), or
        for both.
    """

    name: str
    change: str
    control: str
    edit: str
    match: str
    region: Region = "image"
    level: float = 0.0
    main: bool = False
    disturbance: str = ""
    objects: bool | None = None

    def suits(self, *, has_masks: bool) -> bool:
        """Return True where it applies to images with, or without, masks of objects."""
        if self.region != "image":
            return has_masks
        return self.objects is None or self.objects == has_masks


@dataclass(frozen=True)
class Cue:
    """A property of images that a model may use.

    title: after "relies on".
    parts: cues that are a part of this one, named in its place where they explain its effect.
    holds: cues that are changed together with it in part, named before it where they explain half
        of its effect.
    """

    name: str
    title: str
    interventions: tuple[Intervention, ...]
    parts: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


def _recolour(region: Region, name: str, change: str, edit: str) -> Intervention:
    """Return an intervention on the colours of a region; the main one removes them."""
    return Intervention(
        name,
        change,
        "brightened or darkened",
        f"{_EDITS}:{edit}",
        f"{_CONTROLS}:change_brightness",
        region,
        main=name == "greyed",
    )


_COARSE: Final = "with smooth noise"
_CUES: Final = (
    Cue(
        "colour",
        "colour",
        (
            _recolour("image", "greyed", "without colour", "remove_colour"),
            _recolour("image", "hue-turned", "with opposite hues", "turn_hue"),
            _recolour("image", "hue-exchanged", "with exchanged hues", "exchange_hue"),
        ),
        parts=("background-colour", "object-colour"),
    ),
    Cue(
        "background-colour",
        "the colour of the background",
        (
            _recolour("background", "greyed", "with colourless backgrounds", "remove_colour"),
            _recolour("background", "hue-turned", "with opposite background hues", "turn_hue"),
            _recolour(
                "background", "hue-exchanged", "with exchanged background hues", "exchange_hue"
            ),
        ),
    ),
    Cue(
        "object-colour",
        "the colour of the object",
        (
            _recolour("object", "greyed", "with colourless objects", "remove_colour"),
            _recolour("object", "hue-turned", "with opposite object hues", "turn_hue"),
        ),
    ),
    Cue(
        "background",
        "the background",
        (
            Intervention(
                "exchanged",
                "with exchanged backgrounds",
                "with moved and relit backgrounds",
                f"{_EDITS}:exchange_background",
                f"{_CONTROLS}:move_background",
                "background",
                main=True,
            ),
            Intervention(
                "blurred",
                "with blurred backgrounds",
                f"{_COARSE} in the background",
                f"{_EDITS}:blur_background",
                f"{_CONTROLS}:add_coarse_noise",
                "background",
                level=0.3,
            ),
        ),
        parts=("background-colour",),
        holds=("fine-detail", "coarse-detail", "contrast", "brightness", "border"),
    ),
    Cue(
        "fine-detail",
        "texture and fine detail",
        (
            Intervention(
                "low-pass",
                "without frequencies above 30 % of Nyquist's",
                _COARSE,
                f"{_EDITS}:remove_fine_detail",
                f"{_CONTROLS}:add_coarse_noise",
                level=0.3,
            ),
            Intervention(
                "pixelated",
                "pixelated on the patch grid",
                _COARSE,
                f"{_EDITS}:pixelate",
                f"{_CONTROLS}:add_block_noise",
                main=True,
            ),
            Intervention(
                "pixelated-off-grid",
                "pixelated half a patch off the grid",
                _COARSE,
                f"{_EDITS}:pixelate",
                f"{_CONTROLS}:add_block_noise",
                level=0.5,
                main=True,
            ),
        ),
    ),
    Cue(
        "coarse-detail",
        "shading and coarse detail",
        (
            Intervention(
                "high-pass",
                "without frequencies up to 10 % of Nyquist's",
                "with fine noise",
                "",
                f"{_CONTROLS}:add_fine_noise",
                level=0.1,
                disturbance="high-pass",
            ),
        ),
    ),
    Cue(
        "layout",
        "shape and layout",
        (
            Intervention(
                "tiles",
                "cut into 4 x 4 shuffled tiles",
                "moved by whole patches",
                "",
                f"{_CONTROLS}:roll_patches",
                level=4.0,
                main=True,
                disturbance="shuffle",
            ),
            Intervention(
                "patches",
                "cut into shuffled patches",
                "moved by whole patches",
                f"{_EDITS}:shuffle_patches",
                f"{_CONTROLS}:roll_patches",
            ),
            Intervention(
                "patches-off-grid",
                "cut into shuffled tiles off the patch grid",
                "moved by whole patches",
                f"{_EDITS}:shuffle_patches",
                f"{_CONTROLS}:roll_patches",
                level=0.5,
            ),
        ),
    ),
    Cue(
        "position",
        "position in the image",
        (
            Intervention(
                "shifted",
                "shifted by an eighth of a side",
                "with only the surroundings shifted",
                f"{_EDITS}:shift_image",
                f"{_CONTROLS}:shift_surroundings",
                main=True,
                objects=True,
            ),
            Intervention(
                "shifted-whole",
                "shifted by an eighth of a side",
                "shifted back and turned a little",
                f"{_EDITS}:shift_image",
                f"{_CONTROLS}:shift_and_turn",
                main=True,
                objects=False,
            ),
        ),
    ),
    Cue(
        "size",
        "size",
        (
            Intervention(
                "shrunk",
                "shrunk to 75 %",
                "with only the surroundings shrunk",
                f"{_EDITS}:shrink_image",
                f"{_CONTROLS}:shrink_surroundings",
                objects=True,
            ),
            Intervention(
                "shrunk-whole",
                "shrunk to 75 %",
                "enlarged again and turned a little",
                f"{_EDITS}:shrink_image",
                f"{_CONTROLS}:enlarge_and_turn",
                objects=False,
            ),
        ),
    ),
    Cue(
        "contrast",
        "contrast",
        (
            Intervention(
                "halved",
                "with half of their contrast",
                "with another luminance",
                f"{_EDITS}:halve_contrast",
                f"{_CONTROLS}:change_luminance",
                main=True,
            ),
        ),
    ),
    Cue(
        "brightness",
        "brightness",
        (
            Intervention(
                "changed",
                "brightened or darkened",
                "lit from one side",
                f"{_EDITS}:change_brightness",
                f"{_CONTROLS}:light_from_side",
                main=True,
            ),
        ),
    ),
    Cue(
        "border",
        "the border of the image",
        (
            Intervention(
                "covered",
                "with a covered border",
                "with the same area covered elsewhere",
                f"{_EDITS}:cover_border",
                f"{_CONTROLS}:cover_inside",
                main=True,
            ),
        ),
    ),
    Cue(
        "parts",
        "single parts",
        (
            Intervention(
                "covered",
                "with a quarter of their squares covered",
                "with another luminance in these squares",
                "",
                f"{_CONTROLS}:change_luminance_there",
                level=0.25,
                disturbance="occlusion",
            ),
        ),
    ),
)
CUES: Final[Mapping[str, Cue]] = MappingProxyType({cue.name: cue for cue in _CUES})


def interventions_of(
    names: Sequence[str], *, has_masks: bool, thorough: bool = True
) -> Iterator[tuple[Cue, Intervention]]:
    """Yield the interventions on these cues (keys of CUES), all of them or the main ones.

    has_masks: whether objects are known. Without them, interventions of cues that need masks are
    yielded, too: they are recorded as left out.
    """
    for name in names:
        cue = CUES[name]
        for intervention in cue.interventions:
            is_for_others = intervention.objects is not None and intervention.objects != has_masks
            if not is_for_others and (thorough or intervention.main):
                yield cue, intervention
