"""The tab Explain."""

from typing import Any

import gradio

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts.overlay import OPACITY
from vitlens.demo.pictures import Picture
from vitlens.demo.pool import Pool
from vitlens.demo.site import Asked, DemoSite, Newest, NowShown, TabParts, Updates, asked, required
from vitlens.demo.tabs.slider import open_slider
from vitlens.demo.telling import told
from vitlens.demo.views.explain import (
    PREDICTED,
    both_explained,
    class_choices,
    first_methods,
    offered_methods,
    sides_html,
)
from vitlens.models.model import Model

_NAME = "Explain"


def explain_tab(site: DemoSite, shown: NowShown) -> TabParts:
    """The map of a class by two methods; the left one of the page's model, the right one of any."""
    pool = site.pool
    inputs = left, other, right, target, opacity = _controls(pool)
    result = gradio.HTML(elem_id="explain-result")
    sides = gradio.State(((), ()))  # of what the maps are, and the maps

    def drawn(now: Asked, chosen: tuple[Any, ...]) -> Updates:
        """Both maps and what is said of them."""
        one, second_alias, two, wanted, share = chosen
        with pool.turn(now.alias, second_alias, wanted=now.wanted) as models:
            pair = both_explained(models, now.picture, (one, two), wanted)
            html = sides_html(tuple(zip(pair, models)), now.picture, site.badges, share)
        return {result: html, sides: ((now.picture.key, now.alias, *chosen[:4]), pair)}

    def refresh(now: Asked, *chosen: Any) -> Updates:
        """Another picture or model: other classes to choose from, and methods that the model has."""
        one, second_alias, two, _, share = chosen
        with pool.turn(now.alias, wanted=now.wanted) as (model,):
            choices = class_choices(model, now.picture)
            one = one if one in offered_methods(model) else first_methods((model,))[0]
            listed = _listed(model)
        updates = drawn(now, (one, second_alias, two, PREDICTED, share))
        chosen_class = gradio.Dropdown(choices=choices, value=PREDICTED)
        return {**updates, target: chosen_class, left: gradio.Dropdown(choices=listed, value=one)}

    @told
    def again(picture: Picture | None, alias: str, newest: Newest, *chosen: Any) -> Updates:
        return drawn(asked(_NAME, picture, alias, newest), chosen)

    @told
    def another(picture: Picture | None, alias: str, newest: Newest, *chosen: Any) -> Updates:
        """Another model on the right: its methods."""
        one, second_alias, two, wanted, share = chosen
        now = asked(_NAME, picture, alias, newest)
        with pool.turn(second_alias, wanted=now.wanted) as (model,):
            two = two if two in offered_methods(model) else first_methods((model,))[0]
        updates = drawn(now, (one, second_alias, two, wanted, share))
        return {**updates, right: gradio.Dropdown(choices=_listed(model), value=two)}

    @told
    def faded(picture: Picture | None, alias: str, newest: Newest, *chosen: Any) -> Updates:
        """The same maps in another opacity, or, where others were asked for meanwhile, those."""
        *_, share, (of, kept) = chosen
        if of != (required(picture).key, alias, *chosen[:4]):
            return drawn(asked(_NAME, picture, alias, newest), chosen[:5])
        pairs = tuple((side, pool.model(side.alias)) for side in kept)
        return {result: sides_html(pairs, required(picture), site.badges, share)}

    given = [*shown.inputs, *inputs]
    for control in (left, right, target):
        control.input(again, given, [result, sides], **site.event)
    other.input(another, given, [result, sides, right], **site.event)
    opacity.release(faded, [*given, sides], [result, sides], **{**site.event, "show_progress": "hidden"})
    return TabParts(_NAME, inputs, (result, sides, target, left), refresh, {"sides": sides})


def _controls(pool: Pool) -> tuple[Any, ...]:
    """The methods of both sides, the model of the right one, the class, and the opacity."""
    first, second = pool.models[0], pool.models[min(1, len(pool.models) - 1)]
    methods = first_methods(pool.models)
    with gradio.Row():
        left = _method_choice("Left: method", first, methods[0], "explain-left")
        other = gradio.Dropdown(
            list(pool.aliases), value=second.alias, label="Right: model", elem_id="explain-model", min_width=140
        )
        right = _method_choice("Right: method", second, methods[1], "explain-right")
    with gradio.Row():
        target = gradio.Dropdown(
            [PREDICTED],
            value=PREDICTED,
            allow_custom_value=True,
            label="Class: one of the ten most probable, or type any",
            elem_id="explain-class",
        )
        opacity = open_slider(
            0, 1, value=OPACITY, step=0.05, label="Opacity of the maps", elem_id="explain-opacity", min_width=160
        )
    return left, other, right, target, opacity


def _method_choice(label: str, model: Model, method: str, name: str) -> Any:
    return gradio.Dropdown(_listed(model), value=method, label=label, elem_id=name, min_width=140)


def _listed(model: Model) -> list[tuple[str, str]]:
    """Titles of the methods, and the names that they stand for."""
    return [(ATTRIBUTIONS[name].title, name) for name in offered_methods(model)]
