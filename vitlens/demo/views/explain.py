"""Explain: the map of a class by two methods, of one model or two, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import vitlens
from vitlens.attribution.explain import methods_for, preferred_methods
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.demo.badges import Badges
from vitlens.demo.limits import PASSES
from vitlens.demo.markup import Card, badge, cards, joined, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.views.look import top_classes
from vitlens.demo.views.maps import Floats, drawn_over, map_array
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model

PREDICTED: Final = "the predicted class"
CHOICES: Final = 10  # classes to choose from; others are typed


@dataclass(frozen=True)
class ExplainedSide:
    """One map. target: the class that it explains; values: (rows, columns), raw; lacks: the class that was asked for
    where the model has none of that name, so that the map explains the predicted one; else ""."""

    alias: str
    method: str
    target: str
    values: Floats
    lacks: str = ""


def offered_methods(model: Model) -> tuple[str, ...]:
    """The methods that a page can run: those that the model supports in at most PASSES passes."""
    return tuple(
        name for name in methods_for(model) if ATTRIBUTIONS[name].forwards + ATTRIBUTIONS[name].backwards <= PASSES
    )


def first_methods(models: tuple[Model, ...]) -> tuple[str, str]:
    """What the two sides show at first: of two models the best of each, else one model's two best."""
    if len(models) > 1:
        return preferred_methods(models[0], 1)[0], preferred_methods(models[1], 1)[0]
    two = (*preferred_methods(models[0], 2), *offered_methods(models[0]))
    return two[0], next((name for name in two if name != two[0]), two[0])


def class_choices(model: Model, picture: Picture) -> list[str]:
    """The predicted class, and the ten most probable ones."""
    return [PREDICTED, *(each.name for each in top_classes(model, picture, CHOICES))]


def explained(model: Model, picture: Picture, method: str, target: str) -> ExplainedSide:
    """The map of one side. Raises UnknownNameError for a class that does not exist, with the nearest names."""
    wanted = "predicted" if target in ("", PREDICTED) else target
    predicted = top_classes(model, picture, 1)[0].name
    needs = ATTRIBUTIONS[method].needs_class if method in ATTRIBUTIONS else True
    maps = vitlens.explain(model, picture.images(model), targets=wanted, method=method)
    named = predicted if wanted == "predicted" else _named(model, wanted)
    return ExplainedSide(model.alias, method, named if needs else "every class", map_array(maps))


def both_explained(
    models: Sequence[Model], picture: Picture, methods: tuple[str, str], target: str
) -> tuple[ExplainedSide, ExplainedSide]:
    """The maps of both sides; where the right model has other classes and no `target`, of the class that it predicts.

    Raises UnknownNameError for a class that the left model does not have.
    """
    left, right = models
    one = explained(left, picture, methods[0], target)
    try:
        if target in left.classes and target not in right.classes:  # nor the index of one, where names are digits
            raise UnknownNameError("class", target, right.classes)
        return one, explained(right, picture, methods[1], target)
    except InputError:  # of the class; one of the method comes again
        if right.classes == left.classes:
            raise
        return one, replace(explained(right, picture, methods[1], PREDICTED), lacks=target)


def _named(model: Model, target: str) -> str:
    """The class as the model names it."""
    from vitlens.analysis.answers.targets import class_index

    return model.classes[class_index(target, model.classes)]


def sides_html(sides: tuple[tuple[ExplainedSide, Model], ...], picture: Picture, badges: Badges, opacity: float) -> str:
    """The maps side by side, each with the verdict on its method."""
    drawn = [_drawn(side, model, picture, opacity) for side, model in sides]
    marks = [
        badge(f"{side.alias}, {ATTRIBUTIONS[side.method].title}: {known.words}", known.state)
        for (side, model) in sides
        for known in (badges.of(model, side.method),)
    ]
    signs = "Red is evidence for the class, blue against it; each map is a share of its own largest value."
    return joined(cards(drawn, large=True), *marks, sentence(signs, "quiet"))


def _drawn(side: ExplainedSide, model: Model, picture: Picture, opacity: float) -> Card:
    method = ATTRIBUTIONS[side.method]
    over = partial(drawn_over, picture, model, side.values, signed=method.signed)
    pixels, flaw = over(opacity=opacity)
    what = f"{method.title} of {side.alias}"
    lacks = f", as it has no class {side.lacks!r}" if side.lacks else ""
    note = f"for {side.target}{lacks}{f'; the map is {flaw}' if flaw else ''}"
    return Card(pixels, what, f"{what} for {side.target} over {picture.name}", note)
