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

    name: its name within the cue.
    change, control: the images after the intervention and after the control, as the words that
        follow "on images".
    edit: the function of the intervention, as "module:function".
    match: the function of the control, as "module:function".
    region: the part of the image that it changes.
    level: a number for both functions, with the meaning that it has there.
    main: True if it is measured also if there is no time for all interventions.
    disturbance: the name of a disturbance, if the intervention is a level of it and has no `edit`.
    objects: True if it is only for images with known objects, False if it is only for others, None
        for all images.
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
        """Return True if it applies to images with (or without) masks of objects."""
        if self.region != "image":
            return has_masks
        return self.objects is None or self.objects == has_masks


@dataclass(frozen=True)
class Cue:
    """A property of images that a model may use.

    name: its key in CUES.
    title: its name in words, which follow "relies on".
    interventions: the interventions on it.
    parts: cues that are a part of it. If one explains its effect, it is named instead.
    holds: cues that its interventions change as well. If one has half of its effect, it is named
        first.
    """

    name: str
    title: str
    interventions: tuple[Intervention, ...]
    parts: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


def _recolour(region: Region, name: str, *, change: str, edit: str) -> Intervention:
    """Return an intervention on the colours of a region; the main one removes them."""
    return Intervention(
        name=name,
        change=change,
        control="brightened or darkened",
        edit=f"{_EDITS}:{edit}",
        match=f"{_CONTROLS}:change_brightness",
        region=region,
        main=name == "greyed",
    )


_WITH_SMOOTH_NOISE: Final = "with smooth noise"  # the control of several interventions
_CUES: Final = (
    Cue(
        name="colour",
        title="colour",
        interventions=(
            _recolour("image", "greyed", change="without colour", edit="remove_colour"),
            _recolour("image", "hue-turned", change="with opposite hues", edit="turn_hue"),
            _recolour("image", "hue-exchanged", change="with exchanged hues", edit="exchange_hue"),
        ),
        parts=("background-colour", "object-colour"),
    ),
    Cue(
        name="background-colour",
        title="the colour of the background",
        interventions=(
            _recolour(
                "background",
                "greyed",
                change="with colourless backgrounds",
                edit="remove_colour",
            ),
            _recolour(
                "background",
                "hue-turned",
                change="with opposite background hues",
                edit="turn_hue",
            ),
            _recolour(
                "background",
                "hue-exchanged",
                change="with exchanged background hues",
                edit="exchange_hue",
            ),
        ),
    ),
    Cue(
        name="object-colour",
        title="the colour of the object",
        interventions=(
            _recolour("object", "greyed", change="with colourless objects", edit="remove_colour"),
            _recolour("object", "hue-turned", change="with opposite object hues", edit="turn_hue"),
        ),
    ),
    Cue(
        name="background",
        title="the background",
        interventions=(
            Intervention(
                name="exchanged",
                change="with exchanged backgrounds",
                control="with moved and relit backgrounds",
                edit=f"{_EDITS}:exchange_background",
                match=f"{_CONTROLS}:move_background",
                region="background",
                main=True,
            ),
            Intervention(
                name="blurred",
                change="with blurred backgrounds",
                control=f"{_WITH_SMOOTH_NOISE} in the background",
                edit=f"{_EDITS}:blur_background",
                match=f"{_CONTROLS}:add_coarse_noise",
                region="background",
                level=0.3,
            ),
        ),
        parts=("background-colour",),
        holds=("fine-detail", "coarse-detail", "contrast", "brightness", "border"),
    ),
    Cue(
        name="fine-detail",
        title="texture and fine detail",
        interventions=(
            Intervention(
                name="low-pass",
                change="without frequencies above 30 % of Nyquist's",
                control=_WITH_SMOOTH_NOISE,
                edit=f"{_EDITS}:remove_fine_detail",
                match=f"{_CONTROLS}:add_coarse_noise",
                level=0.3,
            ),
            Intervention(
                name="pixelated",
                change="pixelated on the patch grid",
                control=_WITH_SMOOTH_NOISE,
                edit=f"{_EDITS}:pixelate",
                match=f"{_CONTROLS}:add_block_noise",
                main=True,
            ),
            Intervention(
                name="pixelated-off-grid",
                change="pixelated half a patch off the grid",
                control=_WITH_SMOOTH_NOISE,
                edit=f"{_EDITS}:pixelate",
                match=f"{_CONTROLS}:add_block_noise",
                level=0.5,
                main=True,
            ),
        ),
    ),
    Cue(
        name="coarse-detail",
        title="shading and coarse detail",
        interventions=(
            Intervention(
                name="high-pass",
                change="without frequencies up to 10 % of Nyquist's",
                control="with fine noise",
                edit="",
                match=f"{_CONTROLS}:add_fine_noise",
                level=0.1,
                disturbance="high-pass",
            ),
        ),
    ),
    Cue(
        name="layout",
        title="shape and layout",
        interventions=(
            Intervention(
                name="tiles",
                change="cut into 4 x 4 shuffled tiles",
                control="moved by whole patches",
                edit="",
                match=f"{_CONTROLS}:roll_patches",
                level=4.0,
                main=True,
                disturbance="shuffle",
            ),
            Intervention(
                name="patches",
                change="cut into shuffled patches",
                control="moved by whole patches",
                edit=f"{_EDITS}:shuffle_patches",
                match=f"{_CONTROLS}:roll_patches",
            ),
            Intervention(
                name="patches-off-grid",
                change="cut into shuffled tiles off the patch grid",
                control="moved by whole patches",
                edit=f"{_EDITS}:shuffle_patches",
                match=f"{_CONTROLS}:roll_patches",
                level=0.5,
            ),
        ),
    ),
    Cue(
        name="position",
        title="position in the image",
        interventions=(
            Intervention(
                name="shifted",
                change="shifted by an eighth of a side",
                control="with only the surroundings shifted",
                edit=f"{_EDITS}:shift_image",
                match=f"{_CONTROLS}:shift_surroundings",
                main=True,
                objects=True,
            ),
            Intervention(
                name="shifted-whole",
                change="shifted by an eighth of a side",
                control="shifted back and turned a little",
                edit=f"{_EDITS}:shift_image",
                match=f"{_CONTROLS}:shift_and_turn",
                main=True,
                objects=False,
            ),
        ),
    ),
    Cue(
        name="size",
        title="size",
        interventions=(
            Intervention(
                name="shrunk",
                change="shrunk to 75 %",
                control="with only the surroundings shrunk",
                edit=f"{_EDITS}:shrink_image",
                match=f"{_CONTROLS}:shrink_surroundings",
                objects=True,
            ),
            Intervention(
                name="shrunk-whole",
                change="shrunk to 75 %",
                control="enlarged again and turned a little",
                edit=f"{_EDITS}:shrink_image",
                match=f"{_CONTROLS}:enlarge_and_turn",
                objects=False,
            ),
        ),
    ),
    Cue(
        name="contrast",
        title="contrast",
        interventions=(
            Intervention(
                name="halved",
                change="with half of their contrast",
                control="with another luminance",
                edit=f"{_EDITS}:halve_contrast",
                match=f"{_CONTROLS}:change_luminance",
                main=True,
            ),
        ),
    ),
    Cue(
        name="brightness",
        title="brightness",
        interventions=(
            Intervention(
                name="changed",
                change="brightened or darkened",
                control="lit from one side",
                edit=f"{_EDITS}:change_brightness",
                match=f"{_CONTROLS}:light_from_side",
                main=True,
            ),
        ),
    ),
    Cue(
        name="border",
        title="the border of the image",
        interventions=(
            Intervention(
                name="covered",
                change="with a covered border",
                control="with the same area covered elsewhere",
                edit=f"{_EDITS}:cover_border",
                match=f"{_CONTROLS}:cover_inside",
                main=True,
            ),
        ),
    ),
    Cue(
        name="parts",
        title="single parts",
        interventions=(
            Intervention(
                name="covered",
                change="with a quarter of their squares covered",
                control="with another luminance in these squares",
                edit="",
                match=f"{_CONTROLS}:change_luminance_there",
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

    has_masks: True if objects are known. Otherwise, interventions that need masks are also yielded,
        so that they can be recorded as left out.
    thorough: False for only the main interventions.
    """
    for name in names:
        cue = CUES[name]
        for intervention in cue.interventions:
            is_for_these = intervention.objects is None or intervention.objects == has_masks
            is_wanted = thorough or intervention.main
            if is_for_these and is_wanted:
                yield cue, intervention
