"""Explain: the map of a class by two methods, of one model or two, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import vitlens
from vitlens.analysis.answers.targets import class_index
from vitlens.attribution.explain import methods_for, preferred_methods
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts.overlay import OPACITY
from vitlens.commands.explain.measure import measure
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.run.options import RunOptions
from vitlens.demo.badges import Badges
from vitlens.demo.limits import PASSES
from vitlens.demo.markup import badge, cards, joined, map_card, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.site import Asked, Export, Here, TabParts, Updates, open_slider, typed
from vitlens.demo.tabs.look import map_array, top_classes
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
    values: NDArray[np.float64]
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
    return [PREDICTED, *(name for name, _ in top_classes(model, picture, CHOICES))]


def explained(model: Model, picture: Picture, method: str, target: str) -> ExplainedSide:
    """The map of one side. Raises UnknownNameError for a class that does not exist, with the nearest names."""
    wanted = _target(target)
    maps = vitlens.explain(model, picture.images(model), targets=wanted, method=method)
    if not ATTRIBUTIONS[method].needs_class:
        named = "every class"
    elif wanted == "predicted":
        named = top_classes(model, picture, 1)[0][0]
    else:
        named = model.classes[class_index(wanted, model.classes)]
    return ExplainedSide(model.alias, method, named, map_array(maps))


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


def _target(chosen: str) -> str:
    return "predicted" if chosen in ("", PREDICTED) else chosen


def sides_html(sides: Sequence[tuple[ExplainedSide, Model]], picture: Picture, badges: Badges, opacity: float) -> str:
    """The maps side by side, each with the verdict on its method."""
    drawn, marks = [], []
    for side, model in sides:
        method, known = ATTRIBUTIONS[side.method], badges.of(model, side.method)
        lacks = f", as it has no class {side.lacks!r}" if side.lacks else ""
        what, of = f"{method.title} of {side.alias}", f"for {side.target}{lacks}"
        card = map_card(picture.array(model), side.values, what, of, signed=method.signed, opacity=opacity)
        drawn.append(card)
        marks.append(badge(f"{side.alias}, {method.title}: {known.words}", known.state))
    signs = "Red is evidence for the class, blue against it; each map is a share of its own largest value."
    return joined(cards(drawn, large=True), *marks, sentence(signs, "quiet"))


def write_explain(
    models: tuple[Model, ...], picture: Picture, run: RunOptions, *, methods: Sequence[str], target: str
) -> Path | None:
    """The report of `vitlens explain` on the models of the sides, each with its methods."""
    own = {model.alias: model for model in models}
    by_model = [tuple(dict.fromkeys(n for each, n in zip(models, methods) if each.alias == alias)) for alias in own]
    names = tuple(model.provenance.name for model in own.values())
    chosen, wanted = tuple(dict.fromkeys(methods)), _target(target)
    more = () if wanted == "predicted" else ("--target", wanted)
    line = typed("explain", *names, "--images", picture.name, "--method", ",".join(chosen), *more)
    options = ExplainOptions(
        models=names, images=(picture.name,), method=chosen, target=wanted, run=replace(run, command=line)
    )
    return measure(options, tuple(own.values()), [picture.split(model) for model in own.values()], by_model)


def _export(_: str, shown: tuple[tuple[Any, ...], Sequence[ExplainedSide]]) -> Export:
    """A report is of one class: a side that explains another one is left out."""
    chosen, kept = shown
    sides = [side for side in kept if not side.lacks]
    write = partial(write_explain, methods=[side.method for side in sides], target=chosen[-1])
    return Export(tuple(side.alias for side in sides), write)


def explain_tab(here: Here) -> TabParts:
    """The map of a class by two methods; the left one of the page's model, the right one of any."""
    import gradio

    pool, badges = here.pool, here.site.badges
    first, second = pool.models[0], pool.models[min(1, len(pool.models) - 1)]
    methods = first_methods(pool.models)

    def listed(model: Model) -> list[tuple[str, str]]:
        """Titles of the methods, and the names that they stand for."""
        return [(ATTRIBUTIONS[name].title, name) for name in offered_methods(model)]

    with gradio.Row():
        left, other, right = (
            gradio.Dropdown(choices, value=value, label=label, elem_id=f"explain-{name}", min_width=140)
            for choices, value, label, name in (
                (listed(first), methods[0], "Left: method", "left"),
                (list(pool.aliases), second.alias, "Right: model", "model"),
                (listed(second), methods[1], "Right: method", "right"),
            )
        )
    with gradio.Row():
        target = gradio.Dropdown(
            [PREDICTED], value=PREDICTED, allow_custom_value=True, elem_id="explain-class",
            label="Class: one of the ten most probable, or type any",
        )  # fmt: skip
        opacity = open_slider(
            0, 1, value=OPACITY, step=0.05, label="Opacity of the maps", elem_id="explain-opacity", min_width=160
        )
    inputs = left, other, right, target, opacity
    result = gradio.HTML(elem_id="explain-result")
    sides = gradio.State(((), ()))  # of what the maps are, and the maps

    def drawn(now: Asked, *chosen: Any) -> Updates:
        """Both maps and what is said of them."""
        one, second_alias, two, wanted, share = chosen
        with here.turn(now, now.alias, second_alias) as models:
            pair = both_explained(models, now.picture, (one, two), wanted)
            html = sides_html(tuple(zip(pair, models)), now.picture, badges, share)
        return {result: html, sides: ((now.picture.key, now.alias, *chosen[:4]), pair)}

    def refresh(now: Asked, *chosen: Any) -> Updates:
        """Another picture or model: other classes to choose from, and methods that the model has."""
        one, second_alias, two, _, share = chosen
        with here.turn(now) as (model,):
            choices = class_choices(model, now.picture)
            one = one if one in offered_methods(model) else first_methods((model,))[0]
            own = listed(model)
        updates = drawn(now, one, second_alias, two, PREDICTED, share)
        chosen_class = gradio.Dropdown(choices=choices, value=PREDICTED)
        return {**updates, target: chosen_class, left: gradio.Dropdown(choices=own, value=one)}

    def another(now: Asked, *chosen: Any) -> Updates:
        """Another model on the right: its methods."""
        one, second_alias, two, wanted, share = chosen
        with here.turn(now, second_alias) as (model,):
            two = two if two in offered_methods(model) else first_methods((model,))[0]
            own = listed(model)
        updates = drawn(now, one, second_alias, two, wanted, share)
        return {**updates, right: gradio.Dropdown(choices=own, value=two)}

    def faded(now: Asked, *chosen: Any) -> Updates:
        """The same maps in another opacity, or, where others were asked for meanwhile, those."""
        *_, share, (of, kept) = chosen
        if of != (now.picture.key, now.alias, *chosen[:4]):
            return drawn(now, *chosen[:5])
        pairs = tuple((side, pool.model(side.alias)) for side in kept)
        return {result: sides_html(pairs, now.picture, badges, share)}

    for control in (left, right, target):
        here.on(control.input, drawn, inputs, (result, sides))
    here.on(other.input, another, inputs, (result, sides, right))
    here.on(opacity.release, faded, (*inputs, sides), (result, sides), quiet=True)
    return TabParts(here.tab, inputs, (result, sides, target, left), refresh, "explain", _export, sides)
