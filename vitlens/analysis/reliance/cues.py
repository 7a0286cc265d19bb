"""The cues that a model may rely on, with the interventions on each and their controls; free of
torch.

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

    name: within its cue; change, control: what becomes of the images, after "on images"; edit,
    match: the functions that make the two, as module:function, with the region and the level; main:
    whether it stands for its cue where there is no time for all; disturbance: the one of which this
    is a level, in place of a function; objects: whether it is for images with known objects only
    (True), for others only (False), or for both.
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
        """Return True where it can be made on images whose objects are known, or are not."""
        if self.region != "image":
            return has_masks
        return self.objects is None or self.objects == has_masks


@dataclass(frozen=True)
class Cue:
    """Something that images have and a model may use.

    title: after "relies on"; parts: cues that are a part of this one, named in its place where they
    explain its effect; holds: cues that are changed together with it in part, named before it where
    they explain half of its effect.
    """

    name: str
    title: str
    interventions: tuple[Intervention, ...]
    parts: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


def _recoloured(region: Region, changes: Mapping[str, str], main: str) -> tuple[Intervention, ...]:
    """Return the interventions on the colours of a region; changes: what becomes of the images, by
    name.
    """
    return tuple(
        Intervention(
            name,
            change,
            "brightened or darkened",
            f"{_EDITS}:{name.replace('-', '_')}",
            f"{_CONTROLS}:other_brightness",
            region,
            main=name == main,
        )
        for name, change in changes.items()
    )


_COARSE: Final = "with smooth noise"
_CUES: Final = (
    Cue(
        "colour",
        "colour",
        _recoloured(
            "image",
            {
                "greyed": "without colour",
                "hue-turned": "with opposite hues",
                "hue-exchanged": "with exchanged hues",
            },
            main="greyed",
        ),
        parts=("background-colour", "object-colour"),
    ),
    Cue(
        "background-colour",
        "the colour of the background",
        _recoloured(
            "background",
            {
                "greyed": "with colourless backgrounds",
                "hue-turned": "with opposite background hues",
                "hue-exchanged": "with exchanged background hues",
            },
            main="greyed",
        ),
    ),
    Cue(
        "object-colour",
        "the colour of the object",
        _recoloured(
            "object",
            {"greyed": "with colourless objects", "hue-turned": "with opposite object hues"},
            main="greyed",
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
                f"{_EDITS}:background_exchanged",
                f"{_CONTROLS}:background_moved",
                "background",
                main=True,
            ),
            Intervention(
                "blurred",
                "with blurred backgrounds",
                f"{_COARSE} in the background",
                f"{_EDITS}:background_blurred",
                f"{_CONTROLS}:coarse_noise",
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
                f"{_EDITS}:low_pass",
                f"{_CONTROLS}:coarse_noise",
                level=0.3,
            ),
            Intervention(
                "pixelated",
                "pixelated on the patch grid",
                _COARSE,
                f"{_EDITS}:pixelated",
                f"{_CONTROLS}:noise_of_blocks",
                main=True,
            ),
            Intervention(
                "pixelated-off-grid",
                "pixelated half a patch off the grid",
                _COARSE,
                f"{_EDITS}:pixelated",
                f"{_CONTROLS}:noise_of_blocks",
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
                f"{_CONTROLS}:fine_noise",
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
                f"{_CONTROLS}:rolled",
                level=4.0,
                main=True,
                disturbance="shuffle",
            ),
            Intervention(
                "patches",
                "cut into shuffled patches",
                "moved by whole patches",
                f"{_EDITS}:patches_shuffled",
                f"{_CONTROLS}:rolled",
            ),
            Intervention(
                "patches-off-grid",
                "cut into shuffled tiles off the patch grid",
                "moved by whole patches",
                f"{_EDITS}:patches_shuffled",
                f"{_CONTROLS}:rolled",
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
                f"{_EDITS}:shifted",
                f"{_CONTROLS}:surroundings_shifted",
                main=True,
                objects=True,
            ),
            Intervention(
                "shifted-whole",
                "shifted by an eighth of a side",
                "shifted back and turned a little",
                f"{_EDITS}:shifted",
                f"{_CONTROLS}:shifted_back",
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
                f"{_EDITS}:shrunk",
                f"{_CONTROLS}:surroundings_shrunk",
                objects=True,
            ),
            Intervention(
                "shrunk-whole",
                "shrunk to 75 %",
                "enlarged again and turned a little",
                f"{_EDITS}:shrunk",
                f"{_CONTROLS}:enlarged_back",
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
                f"{_EDITS}:contrast_halved",
                f"{_CONTROLS}:other_luminance",
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
                f"{_EDITS}:brightness_changed",
                f"{_CONTROLS}:lit",
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
                f"{_EDITS}:border_covered",
                f"{_CONTROLS}:covered_inside",
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
                f"{_CONTROLS}:other_luminance_there",
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

    has_masks: whether objects are known. Without them, those of cues that need masks are yielded,
    too: they are recorded as left out.
    """
    for name in names:
        cue = CUES[name]
        for intervention in cue.interventions:
            replaced = intervention.objects is not None and intervention.objects != has_masks
            if not replaced and (thorough or intervention.main):
                yield cue, intervention
