"""The tab Break."""

from typing import Any

import gradio

from vitlens.attacks.defaults import ATTACK
from vitlens.demo.pictures import Picture
from vitlens.demo.site import Asked, DemoSite, Newest, NowShown, TabParts, Updates, asked
from vitlens.demo.tabs.slider import open_slider
from vitlens.demo.telling import told
from vitlens.demo.views.attack import MOST, broken, broken_html, offered_attacks

_NAME = "Break"
_EPSILON = 4.0


def attack_tab(site: DemoSite, shown: NowShown) -> TabParts:
    """An attack on the prediction: the picture, the perturbation and the maps before and after."""
    with gradio.Row():
        method = gradio.Dropdown(
            [(f"{attack.title}: {attack.description}", attack.name) for attack in offered_attacks()],
            value=ATTACK,
            label="Attack",
            elem_id="break-attack",
            scale=2,
        )
        epsilon = open_slider(
            0,
            MOST,
            value=_EPSILON,
            step=0.5,
            label="Epsilon: the most that a pixel may change, in 1/255",
            elem_id="break-epsilon",
            scale=2,
        )
    result = gradio.HTML(elem_id="break-result")
    done = gradio.State(())  # the attack and epsilon of the result that is shown

    def refresh(now: Asked, name: str, most: float) -> Updates:
        with site.pool.turn(now.alias, wanted=now.wanted) as (model,):
            found = broken(model, now.picture, name, float(most))
        return {result: broken_html(found), done: (name, float(most))}

    @told
    def again(picture: Picture | None, alias: str, newest: Newest, *chosen: Any) -> Updates:
        return refresh(asked(_NAME, picture, alias, newest), *chosen)

    inputs = (method, epsilon)
    given = [*shown.inputs, *inputs]
    method.input(again, given, [result, done], **site.event)
    epsilon.release(again, given, [result, done], **site.event)
    return TabParts(_NAME, inputs, (result, done), refresh, {"done": done})
