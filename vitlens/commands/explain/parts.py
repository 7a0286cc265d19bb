"""How many images `vitlens explain` passes through a model, counted from its options; an upper limit."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.analysis.faithfulness.composite_kinds import COMPOSITE_KINDS
from vitlens.analysis.faithfulness.defaults import OTHER_IMAGES, OTHER_STEPS
from vitlens.analysis.faithfulness.deletion import STEPS
from vitlens.analysis.faithfulness.league import BASELINES, randomised_images
from vitlens.analysis.faithfulness.randomisation import PARTS
from vitlens.analysis.faithfulness.steadiness import DISTURBANCES, STEADY_IMAGES
from vitlens.attribution.choice import IMAGES, KIND, MOSAICS
from vitlens.attribution.choice import STEPS as CHOICE_STEPS
from vitlens.attribution.entry import Attribution
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.scaffold.expected import Part

_SEARCHED: Final = 16  # passes of the search for a counterfactual, by image and method, about
_BOTH: Final = 3  # forward passes that take as long as one forward and backward pass, about


def explain_parts(
    methods: Sequence[str],
    images: int,
    *,
    verify: bool,
    counterfactuals: bool,
    substrates: int = 0,
    stability: bool = False,
    composites: int = 0,
    views: int = 1,
    times: str | None = None,
) -> Iterator[Part]:
    """Maps by each method, and the checks of each.

    substrates: the number of others; composites: maps on them; views: of each image; times: the method whose maps all
    others are multiplied by.
    """
    computed = _computed(methods, times)
    forwards = views * sum(method.forwards for method in computed)
    backwards = views * sum(method.backwards for method in computed)
    slow = [name for name in methods if ATTRIBUTIONS[name].slow]
    shorter = f"--method without {', '.join(slow)}" if slow else ""
    yield Part("maps", forwards * images, backwards * images, shorter)
    if verify:
        # deletion and insertion, and ROAD's two orders, of each method and baseline; maps again after each stage
        curves = 4 * STEPS * (len(methods) + len(BASELINES)) * images
        counts = [(entry, views * (PARTS + 2) * min(images, _randomised(entry))) for entry in computed]
        again = [sum(entry.forwards * n for entry, n in counts), sum(entry.backwards * n for entry, n in counts)]
        yield Part("checks", curves + again[0], again[1])
        if counterfactuals:
            searched = _SEARCHED * len(methods) * images
            yield Part("counterfactuals", searched, shorter="--no-counterfactuals")
        if substrates:
            repeated = substrates * 2 * OTHER_STEPS * (len(methods) + len(BASELINES)) * min(images, OTHER_IMAGES)
            yield Part("other substrates", repeated, shorter="--other-substrates none")
        if stability:
            disturbed = len(DISTURBANCES) * min(images, STEADY_IMAGES)
            yield Part("stability", forwards * disturbed, backwards * disturbed, "--no-stability")
        if composites:
            yield Part("composites", forwards * composites, backwards * composites, "--composites none")


def passes(method: str, *, views: int = 1, times: str | None = None) -> int:
    """The map of one image in forward passes of about the same time; views and times as for `explain_parts`."""
    return max(1, round(views * sum(entry.forwards + _BOTH * entry.backwards for entry in _computed((method,), times))))


def _computed(methods: Sequence[str], times: str | None) -> list[Attribution]:
    """The methods whose maps are made, the one that all are multiplied by once for each."""
    return [ATTRIBUTIONS[name] for each in methods for name in (each, *((times,) if times else ()))]


def _randomised(entry: Attribution) -> int:
    return randomised_images(entry.forwards + entry.backwards)


def composite_maps(kinds: Sequence[str], count: int) -> int:
    """The number of maps of each method on at most count composites of each kind."""
    return sum(COMPOSITE_KINDS[name].explained for name in kinds) * count


def choice_part(candidates: Sequence[str], images: int, *, has_masks: bool, views: int = 1) -> Part:
    """The choice between candidates: maps of the images and mosaics by each, and removal curves."""
    used = min(images, IMAGES)
    maps = views * (used if has_masks else used + 2 * MOSAICS * COMPOSITE_KINDS[KIND].explained)
    curves = 2 * CHOICE_STEPS * (len(candidates) + len(BASELINES)) * used
    entries = [ATTRIBUTIONS[name] for name in candidates]
    forwards, backwards = sum(entry.forwards for entry in entries), sum(entry.backwards for entry in entries)
    return Part("choosing a method", curves + forwards * maps, backwards * maps, "--method with fewer candidates")


def costliest(methods: Sequence[str]) -> str:
    """The method of the most passes."""
    return max(methods, key=lambda name: ATTRIBUTIONS[name].forwards + ATTRIBUTIONS[name].backwards)
