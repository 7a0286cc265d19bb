"""Break: a picture before and after an attack on its prediction."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

import vitlens
from vitlens.analysis.attention.weights import attention_maps, head_mean
from vitlens.attacks.registry import ATTACKS, Attack
from vitlens.attribution.explain import preferred_method
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts.overlay import enlarged, overlaid
from vitlens.charts.pictures import amplification
from vitlens.demo.limits import PASSES
from vitlens.demo.markup import Card, Share, beside, cards, classes_table, joined, said, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.views.look import TOP
from vitlens.demo.views.maps import Floats, map_array
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.support import meets

LEVELS: Final = 255  # epsilon is given in steps of an 8-bit pixel
MOST: Final = 16.0  # of these


@dataclass(frozen=True)
class Broken:
    """A picture before and after. clean, adversarial: (3, height, width) in [0, 1], equal where nothing was found;
    largest: the largest change of a pixel, in 1/255; shares: the leading classes of both, before and after; maps:
    (title, signed, before, after), each map (rows, columns)."""

    alias: str
    attack: str
    epsilon: float
    success: bool
    largest: float
    clean: Floats
    adversarial: Floats
    shares: tuple[Share, ...]
    maps: tuple[tuple[str, bool, Floats, Floats], ...]


def offered_attacks() -> tuple[Attack, ...]:
    """The attacks that a page can run: bounded by L∞, in at most PASSES passes."""
    return tuple(
        attack
        for attack in ATTACKS.values()
        if attack.norm == "linf" and attack.kind == "budget" and not attack.members and attack.passes() <= PASSES
    )


def broken(model: Model, picture: Picture, method: str, epsilon: float) -> Broken:
    """The attack on the prediction of a picture; epsilon: in 1/255.

    Raises UnknownNameError for an unknown attack, InputError for an epsilon outside 0 to MOST.
    """
    if not 0 <= epsilon <= MOST:
        raise InputError(f"expected an epsilon from 0 to {MOST:g} (in 1/255), found {epsilon:g}")
    if method in ATTACKS and ATTACKS[method] not in offered_attacks():
        raise InputError(f"expected an attack of at most {PASSES} passes, found {method}; vitlens attack runs it")
    images = picture.images(model)
    result = vitlens.attack(model, images, "predicted", method=method, epsilon=epsilon / LEVELS)
    adversarial = result.images.to(images.device)
    return Broken(
        model.alias,
        method,
        epsilon,
        bool(result.success[0]),
        float((adversarial - images).abs().max()) * LEVELS,
        images[0].cpu().double().numpy(),
        adversarial[0].cpu().double().numpy(),
        _shares(model, images, adversarial),
        tuple(_maps(model, images, adversarial)),
    )


def _shares(model: Model, clean: Tensor, adversarial: Tensor) -> tuple[Share, ...]:
    """The leading classes of either picture with their probabilities before and after."""
    with torch.inference_mode():
        before, after = model(torch.cat([clean, adversarial])).float().softmax(-1)
    leading = dict.fromkeys((*before.topk(min(TOP, len(before))).indices.tolist(), int(after.argmax())))
    return tuple(Share(model.classes[index], float(before[index]), float(after[index])) for index in leading)


def _maps(model: Model, clean: Tensor, adversarial: Tensor) -> Iterator[tuple[str, bool, Floats, Floats]]:
    """The map of the class predicted at first, and the last layer's attention, of both pictures."""
    with torch.inference_mode():
        target = model(clean).argmax(-1)
    method = preferred_method(model)
    maps = [vitlens.explain(model, each, targets=target, method=method) for each in (clean, adversarial)]
    yield ATTRIBUTIONS[method].title, ATTRIBUTIONS[method].signed, map_array(maps[0]), map_array(maps[1])
    if meets(model, "maps"):
        last = [head_mean(attention_maps(model, each))[-1] for each in (clean, adversarial)]
        yield "attention of the last layer", False, map_array(last[0]), map_array(last[1])


def broken_html(found: Broken) -> str:
    """What the attack did, in words, numbers and pictures."""
    before, after = (
        max(found.shares, key=key).name for key in (lambda each: each.probability, lambda each: each.after)
    )
    title = ATTACKS[found.attack].title
    words = (
        f"{title} with epsilon {found.epsilon:g}/255 changes the prediction of {found.alias} from {before} to {after}; "
        f"no pixel moves by more than {found.largest:.2g}/255."
        if found.success
        else f"{title} finds no picture within epsilon {found.epsilon:g}/255 of which {found.alias} predicts another "
        f"class than {before}. Another attack, or a larger epsilon, may."
    )
    shown = [Card(enlarged(found.clean), "before", f"the picture, predicted {before}", before)]
    if found.success:
        times = amplification(found.adversarial - found.clean)
        change = np.clip(0.5 + times * (found.adversarial - found.clean), 0, 1)
        shown += [
            Card(enlarged(change), f"perturbation × {times}", f"what was added, times {times}, around grey"),
            Card(enlarged(found.adversarial), "after", f"the picture after the attack, predicted {after}", after),
        ]
        for name, signed, *pair in found.maps:
            for when, pixels, values in zip(("before", "after"), (found.clean, found.adversarial), pair):
                drawn, flaw = overlaid(pixels, values, signed=signed)
                of = "" if name.startswith("attention") else f"for {before}"
                shown.append(Card(drawn, f"{name} {when}", f"{name} {when} the attack {of}", flaw or of))
    note = "An attack that fails proves nothing: vitlens attack runs stronger ones, on many images, with self-checks."
    table = classes_table(found.shares, "Probabilities")
    return joined(said(words), beside(table, cards(shown[:3])), cards(shown[3:]), sentence(note, "quiet"))
