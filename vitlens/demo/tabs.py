"""Look, Explain and Break: each runs a command on the picture and shows its report."""

from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from vitlens.attacks.registry import ATTACK, ATTACKS, Attack
from vitlens.attribution.explain import methods_for, preferred_methods
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.classes import class_index
from vitlens.commands.attack.measure import measure as measure_attack
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.explain.measure import measure as measure_explain
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.look.measure import measured
from vitlens.commands.look.options import LookOptions
from vitlens.demo.pictures import Picture
from vitlens.demo.site import Asked, Here, Job, Result, Tab, Updates, open_slider, pieces
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model

# passes of the model that one map or one attack takes; slower ones are for the command line
PASSES: Final = 100
MOST: Final = 16.0  # of an epsilon, in steps of an 8-bit pixel
PREDICTED: Final = "the predicted class"
_EPSILON: Final = 4.0
_CHOICES: Final = 10  # classes to choose from; others are typed


def write_look(job: Job) -> Path:
    """Return the report of `vitlens look`."""
    file = job.picture.name
    name = job.name
    options = LookOptions(images=(file,), model=name, run=job.typed("look", file, "--model", name))
    return measured(options, job.model, job.picture.split(job.model))


def look_tab(here: Here) -> Tab:
    """Return the prediction, its maps and the heads that matter, with the attention explorer."""
    result = Result.placed("look")

    def refresh(now: Asked) -> Updates:
        return here.report(now, result, write_look)

    return Tab(here.tab, (), result.components, refresh)


def offered_methods(model: Model) -> tuple[str, ...]:
    """Return the methods that a page can run: those that the model supports in at most PASSES
    passes.
    """
    return tuple(
        name
        for name in methods_for(model)
        if ATTRIBUTIONS[name].forwards + ATTRIBUTIONS[name].backwards <= PASSES
    )


def class_choices(model: Model, picture: Picture) -> list[str]:
    """Return the predicted class, and the ten most probable ones."""
    with torch.inference_mode():
        best = model(picture.images(model))[0].topk(min(_CHOICES, len(model.classes))).indices
    return [PREDICTED, *(model.classes[index] for index in best.tolist())]


def lacks_class(target: str, left: Model, right: Model) -> bool:
    """Return True if the right model has no class of this name. Raises UnknownNameError where the
    left one has none.
    """
    if target in ("", PREDICTED):
        return False
    class_index(target, left.classes)
    try:
        class_index(target, right.classes)
    except InputError:
        return True
    return (
        target in left.classes and target not in right.classes
    )  # the index of another, where names are digits


def write_explain(job: Job, *, method: str, target: str) -> Path | None:
    """Return the report of `vitlens explain` with one method."""
    wanted = "predicted" if target in ("", PREDICTED) else target
    more = () if wanted == "predicted" else ("--target", wanted)
    run = job.typed("explain", job.name, "--images", job.picture.name, "--method", method, *more)
    options = ExplainOptions(
        models=(job.name,), images=(job.picture.name,), method=(method,), target=wanted, run=run
    )
    return measure_explain(options, (job.model,), [job.picture.split(job.model)])


def explain_tab(here: Here) -> Tab:
    """Return the map of a class by two methods side by side; the left one of the page's model, the
    right one of any.
    """
    import gradio

    pool = here.site.pool
    first = pool.models[0]
    second = pool.models[min(1, len(pool.models) - 1)]

    def choice(model: Model, name: str = "", *, best: int = 0) -> dict[str, Any]:
        """Return the methods of a model to choose from, and the one of this name, or else its best
        or second best.
        """
        offered = offered_methods(model)
        preferred = list(dict.fromkeys((*preferred_methods(model, 2), *offered)))
        value = name if name in offered else preferred[min(best, len(preferred) - 1)]
        return {"choices": [(ATTRIBUTIONS[each].title, each) for each in offered], "value": value}

    target = gradio.Dropdown(
        [PREDICTED],
        value=PREDICTED,
        allow_custom_value=True,
        elem_id="explain-class",
        label="Class: one of the ten most probable, or type any",
    )
    with gradio.Row():
        with gradio.Column(min_width=280):
            left = gradio.Dropdown(**choice(first), label="Left: method", elem_id="explain-left")
            one = Result.placed("left")
        with gradio.Column(min_width=280):
            with gradio.Row():
                other = gradio.Dropdown(
                    list(pool.aliases),
                    value=second.alias,
                    label="Right: model",
                    elem_id="explain-model",
                    min_width=120,
                )
                right = gradio.Dropdown(
                    **choice(second, best=int(first is second)),
                    label="Right: method",
                    elem_id="explain-right",
                    min_width=140,
                )
            two = Result.placed("right")
    inputs = (left, other, right, target)
    results = (*one.components, *two.components)

    def shown(now: Asked, method: str, alias: str, second_method: str, wanted: str) -> Updates:
        """Return both reports; of a right model without this class, of the one that it predicts."""
        lacks = lacks_class(wanted, pool.model(now.alias), pool.model(alias))
        note = (
            f"{alias} has no class {wanted!r}: the class that it predicts is explained."
            if lacks
            else ""
        )
        beside = partial(write_explain, method=second_method, target=PREDICTED if lacks else wanted)
        return {
            **here.report(now, one, partial(write_explain, method=method, target=wanted)),
            **here.report(now, two, beside, alias=alias, note=note),
        }

    def refresh(now: Asked, method: str, alias: str, second_method: str, _: str) -> Updates:
        """Another picture or model: other classes to choose from, and methods that the model
        has."""
        with pool.turn(now.alias, now.wanted) as model:
            classes = class_choices(model, now.picture)
            methods = choice(model, method)
        reports = shown(now, methods["value"], alias, second_method, PREDICTED)
        return {
            **reports,
            target: gradio.Dropdown(classes, value=PREDICTED),
            left: gradio.Dropdown(**methods),
        }

    def another(now: Asked, method: str, alias: str, second_method: str, wanted: str) -> Updates:
        """Another model on the right: its methods."""
        with pool.turn(alias, now.wanted) as model:
            methods = choice(model, second_method)
        return {
            **shown(now, method, alias, methods["value"], wanted),
            right: gradio.Dropdown(**methods),
        }

    for control in (left, right, target):
        here.on(control.input, shown, inputs, results)
    here.on(other.input, another, inputs, (*results, right))
    return Tab(here.tab, inputs, (*results, target, left), refresh)


def offered_attacks() -> tuple[Attack, ...]:
    """Return the attacks that a page can run: bounded by L∞, in at most PASSES passes."""
    return tuple(
        attack
        for attack in ATTACKS.values()
        if attack.norm == "linf"
        and attack.kind == "budget"
        and not attack.members
        and attack.passes() <= PASSES
    )


def write_attack(job: Job, *, attack: str, epsilon: float) -> Path | None:
    """Return the report of `vitlens attack`; epsilon: in 1/255.

    Raises UnknownNameError for an attack that is not offered, InputError for an epsilon outside 0
    to MOST.
    """
    if not 0 <= epsilon <= MOST:
        raise InputError(f"expected an epsilon from 0 to {MOST:g} (in 1/255), found {epsilon:g}")
    offered = [each.name for each in offered_attacks()]
    if attack not in offered:
        raise UnknownNameError(
            "attack on this page", attack, offered, hint="vitlens attack, which runs all of them"
        )
    name = job.name
    file = job.picture.name
    line = (
        "attack",
        name,
        "--images",
        file,
        "--predicted",
        "--attack",
        attack,
        "--epsilon",
        f"{epsilon:g}",
    )
    options = AttackOptions(
        models=(name,),
        images=(file,),
        attacks=(attack,),
        epsilons=(0.0, epsilon),
        predicted=True,
        transfer=False,
        corruptions=False,
        run=job.typed(*line),
    )
    return measure_attack(options, (job.model,), job.picture.split(job.model))


def attack_tab(here: Here) -> Tab:
    """Return an attack on the prediction: the picture, the perturbation and the maps before and
    after.
    """
    import gradio

    with gradio.Row():
        method = gradio.Dropdown(
            [
                (f"{attack.title}: {attack.description}", attack.name)
                for attack in offered_attacks()
            ],
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
    how = (
        "An attack that fails proves nothing: vitlens attack runs stronger ones, on many images, "
        "with self-checks."
    )
    gradio.HTML(str(pieces.sentence(how, "quiet")))
    result = Result.placed("break")
    inputs = (method, epsilon)

    def refresh(now: Asked, name: str, most: float) -> Updates:
        return here.report(now, result, partial(write_attack, attack=name, epsilon=most))

    for listen in (method.input, epsilon.release):
        here.on(listen, refresh, inputs, result.components)
    return Tab(here.tab, inputs, result.components, refresh)
