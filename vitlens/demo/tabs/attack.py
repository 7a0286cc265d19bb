"""Break: a picture before and after an attack on its prediction."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import vitlens
from vitlens.analysis.attention.weights import attention_maps, head_mean
from vitlens.attacks.defaults import ATTACK
from vitlens.attacks.registry import ATTACKS, Attack
from vitlens.attribution.explain import preferred_method
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts.overlay import enlarged
from vitlens.charts.pictures import amplification
from vitlens.commands.attack.measure import measure
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.run.options import RunOptions
from vitlens.demo.limits import PASSES
from vitlens.demo.markup import Card, beside, cards, joined, map_card, said, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.record import ChangedClassRow
from vitlens.demo.site import Asked, Export, Here, TabParts, Updates, open_slider, typed
from vitlens.demo.tabs.look import changed_classes, changed_table, map_array
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model
from vitlens.models.support import meets
from vitlens.report.prose import say

LEVELS: Final = 255  # epsilon is given in steps of an 8-bit pixel
MOST: Final = 16.0  # of these
_EPSILON: Final = 4.0
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Broken:
    """A picture before and after. clean, adversarial: (3, height, width) in [0, 1], equal where nothing was found;
    largest: the largest change of a pixel, in 1/255; classes: the leading ones of both; maps: (title, signed, before,
    after), each map (rows, columns)."""

    alias: str
    attack: str
    epsilon: float
    success: bool
    largest: float
    clean: Floats
    adversarial: Floats
    classes: tuple[ChangedClassRow, ...]
    maps: tuple[tuple[str, bool, Floats, Floats], ...]


def offered_attacks() -> tuple[Attack, ...]:
    """The attacks that a page can run: bounded by L∞, in at most PASSES passes."""
    return tuple(
        attack
        for attack in ATTACKS.values()
        if attack.norm == "linf" and attack.kind == "budget" and not attack.members and attack.passes() <= PASSES
    )


def require_offered(method: str) -> None:
    """Raise UnknownNameError for an attack that the page does not run."""
    offered = [attack.name for attack in offered_attacks()]
    if method not in offered:
        raise UnknownNameError("attack on this page", method, offered, hint="vitlens attack, which runs all of them")


def broken(model: Model, picture: Picture, method: str, epsilon: float) -> Broken:
    """The attack on the prediction of a picture; epsilon: in 1/255.

    Raises UnknownNameError for an attack that is not offered, InputError for an epsilon outside 0 to MOST.
    """
    if not 0 <= epsilon <= MOST:
        raise InputError(f"expected an epsilon from 0 to {MOST:g} (in 1/255), found {epsilon:g}")
    require_offered(method)
    images = picture.images(model)
    result = vitlens.attack(model, images, "predicted", method=method, epsilon=epsilon / LEVELS)
    adversarial = result.images.to(images.device)
    with torch.inference_mode():
        before, after = model(torch.cat([images, adversarial])).float()
    return Broken(
        model.alias,
        method,
        epsilon,
        bool(result.success[0]),
        float((adversarial - images).abs().max()) * LEVELS,
        images[0].cpu().double().numpy(),
        adversarial[0].cpu().double().numpy(),
        changed_classes(model, before, after),
        tuple(_maps(model, images, adversarial, before.argmax().reshape(1))),
    )


def _maps(
    model: Model, clean: Tensor, adversarial: Tensor, target: Tensor
) -> Iterator[tuple[str, bool, Floats, Floats]]:
    """The map of the class predicted at first, and the last layer's attention, of both pictures."""
    method = preferred_method(model)
    maps = [map_array(vitlens.explain(model, each, targets=target, method=method)) for each in (clean, adversarial)]
    yield ATTRIBUTIONS[method].title, ATTRIBUTIONS[method].signed, maps[0], maps[1]
    if meets(model, "maps"):
        last = [map_array(head_mean(attention_maps(model, each))[-1]) for each in (clean, adversarial)]
        yield "attention of the last layer", False, last[0], last[1]


def broken_html(found: Broken) -> str:
    """What the attack did, in words, numbers and pictures."""
    before = max(found.classes, key=lambda row: row.probability_before).name
    after = max(found.classes, key=lambda row: row.probability_after).name
    words = say(
        "{{ title }} with epsilon {{ epsilon|number }}/255 {% if found.success %}changes the prediction of "
        "{{ found.alias }} from {{ before }} to {{ after }}; no pixel moves by more than "
        "{{ largest|number }}/255.{% else %}finds no picture of which {{ found.alias }} predicts another class than "
        "{{ before }}. Another attack, or a larger epsilon, may.{% endif %}",
        title=ATTACKS[found.attack].title, epsilon=found.epsilon, largest=round(found.largest, 1), found=found,
        before=before, after=after,
    )  # fmt: skip
    shown = [Card(enlarged(found.clean), "before", f"the picture, predicted {before}", before)]
    if found.success:
        times = amplification(found.adversarial - found.clean)
        change = np.clip(0.5 + times * (found.adversarial - found.clean), 0, 1)
        shown += [
            Card(enlarged(change), f"perturbation × {times}", f"what was added, times {times}, around grey"),
            Card(enlarged(found.adversarial), "after", f"the picture after the attack, predicted {after}", after),
        ]
        for name, signed, *pair in found.maps:
            of = "" if name.startswith("attention") else f"for {before}"
            for when, pixels, values in zip(("before", "after"), (found.clean, found.adversarial), pair):
                shown.append(map_card(pixels, values, f"{name} {when}", of, signed=signed))
    note = "An attack that fails proves nothing: vitlens attack runs stronger ones, on many images, with self-checks."
    table = changed_table(found.classes)
    return joined(said(words), beside(table, cards(shown[:3])), cards(shown[3:]), sentence(note, "quiet"))


def write_attack(
    models: tuple[Model, ...], picture: Picture, run: RunOptions, *, attack: str, epsilon: float
) -> Path | None:
    """The report of `vitlens attack`."""
    require_offered(attack)
    (model,) = models
    name = model.provenance.name
    line = typed("attack", name, "--images", picture.name, "--predicted", "--attack", attack, "--epsilon",
                 f"{epsilon:g}")  # fmt: skip
    options = AttackOptions(
        models=(name,), images=(picture.name,), attacks=(attack,), epsilons=(0.0, epsilon), predicted=True,
        transfer=False, corruptions=False, run=replace(run, command=line),
    )  # fmt: skip
    return measure(options, models, picture.split(model))


def attack_tab(here: Here) -> TabParts:
    """An attack on the prediction: the picture, the perturbation and the maps before and after."""
    import gradio

    with gradio.Row():
        method = gradio.Dropdown(
            [(f"{attack.title}: {attack.description}", attack.name) for attack in offered_attacks()], value=ATTACK,
            label="Attack", elem_id="break-attack", scale=2,
        )  # fmt: skip
        epsilon = open_slider(
            0, MOST, value=_EPSILON, step=0.5, label="Epsilon: the most that a pixel may change, in 1/255",
            elem_id="break-epsilon", scale=2,
        )  # fmt: skip
    result = gradio.HTML(elem_id="break-result")
    done = gradio.State(())  # the attack and epsilon of the result that is shown
    inputs = (method, epsilon)

    def refresh(now: Asked, name: str, most: float) -> Updates:
        with here.turn(now) as (model,):
            found = broken(model, now.picture, name, float(most))
        return {result: broken_html(found), done: (name, float(most))}

    def export(alias: str, of: tuple[str, float]) -> Export:
        return Export((alias,), partial(write_attack, attack=of[0], epsilon=of[1]))

    for listen in (method.input, epsilon.release):
        here.on(listen, refresh, inputs, (result, done))
    return TabParts(here.tab, inputs, (result, done), refresh, "attack", export, done)
