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
from vitlens.demo.site import Job, Result, Tab, TabPlace, TabRequest, Updates, open_slider, pieces
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model

# passes of the model that one map or one attack takes; slower ones are for the command line
PASSES: Final = 100
MOST: Final = 16.0  # of an epsilon, in steps of an 8-bit pixel
PREDICTED: Final = "the predicted class"
_EPSILON: Final = 4.0
_CHOICES: Final = 10  # classes to choose from; others are typed


def write_look(job: Job) -> Path:
    """Write the report of `vitlens look`; return its path."""
    file = job.picture.name
    name = job.name
    options = LookOptions(images=(file,), model=name, run=job.typed("look", file, "--model", name))
    return measured(options, job.model, job.picture.split(job.model))


def look_tab(place: TabPlace) -> Tab:
    """Return the tab of the prediction, its maps and important heads, with the explorer."""
    result = Result.placed("look")

    def refresh(request: TabRequest) -> Updates:
        return place.report(request, result, write_look)

    return Tab(place.tab, (), result.components, refresh)


def offered_methods(model: Model) -> tuple[str, ...]:
    """Return the methods that the page offers: the model's, of at most PASSES passes."""
    offered = []
    for name in methods_for(model):
        method = ATTRIBUTIONS[name]
        if method.forwards + method.backwards <= PASSES:
            offered.append(name)
    return tuple(offered)


def class_choices(model: Model, picture: Picture) -> list[str]:
    """Return the predicted class, and the ten most probable ones."""
    with torch.inference_mode():
        logits = model(picture.images(model))[0]
        most_probable = logits.topk(min(_CHOICES, len(model.classes))).indices
    return [PREDICTED, *(model.classes[index] for index in most_probable.tolist())]


def lacks_class(target: str, left: Model, right: Model) -> bool:
    """Return True if the right model has no class of this name.

    Raises UnknownNameError if the left model has none.
    """
    if target in ("", PREDICTED):
        return False
    class_index(target, left.classes)
    try:
        class_index(target, right.classes)
    except InputError:
        return True
    # a name of the left model that is a digit may be the index of another class on the right
    return target in left.classes and target not in right.classes


def write_explain(job: Job, *, method: str, target: str) -> Path | None:
    """Write the report of `vitlens explain` with one method; return its path."""
    line = ["explain", job.name, "--images", job.picture.name, "--method", method]
    if target in ("", PREDICTED):
        target = "predicted"
    else:
        line += ["--target", target]
    options = ExplainOptions(
        models=(job.name,),
        images=(job.picture.name,),
        method=(method,),
        target=target,
        run=job.typed(*line),
    )
    return measure_explain(options, (job.model,), [job.picture.split(job.model)])


def explain_tab(place: TabPlace) -> Tab:
    """Return the tab of a class's map by two methods side by side.

    The left map is of the page's model, the right one of any model.
    """
    import gradio

    pool = place.site.pool
    first = pool.models[0]
    second = pool.models[min(1, len(pool.models) - 1)]

    def method_choice(model: Model, name: str = "", *, rank: int = 0) -> dict[str, Any]:
        """Return a model's methods as choices, with the named one or that of a rank as value."""
        offered = offered_methods(model)
        value = name
        if name not in offered:
            preferred = list(dict.fromkeys((*preferred_methods(model, 2), *offered)))
            value = preferred[min(rank, len(preferred) - 1)]
        choices = [(ATTRIBUTIONS[method].title, method) for method in offered]
        return {"choices": choices, "value": value}

    target = gradio.Dropdown(
        [PREDICTED],
        value=PREDICTED,
        allow_custom_value=True,
        elem_id="explain-class",
        label="Class: one of the ten most probable, or type any",
    )
    with gradio.Row():
        with gradio.Column(min_width=280):
            left_method = gradio.Dropdown(
                **method_choice(first), label="Left: method", elem_id="explain-left"
            )
            left_result = Result.placed("left")
        with gradio.Column(min_width=280):
            with gradio.Row():
                right_model = gradio.Dropdown(
                    list(pool.aliases),
                    value=second.alias,
                    label="Right: model",
                    elem_id="explain-model",
                    min_width=120,
                )
                right_method = gradio.Dropdown(
                    **method_choice(second, rank=1 if first is second else 0),
                    label="Right: method",
                    elem_id="explain-right",
                    min_width=140,
                )
            right_result = Result.placed("right")
    inputs = (left_method, right_model, right_method, target)
    results = (*left_result.components, *right_result.components)

    def explain_both(
        request: TabRequest, method: str, alias: str, second_method: str, class_name: str
    ) -> Updates:
        """Return both reports.

        If the right model lacks the class, its report is on the class that it predicts.
        """
        second_class = class_name
        note = ""
        if lacks_class(class_name, pool.model(request.alias), pool.model(alias)):
            second_class = PREDICTED
            note = f"{alias} has no class {class_name!r}: the class that it predicts is explained."
        write_left = partial(write_explain, method=method, target=class_name)
        write_right = partial(write_explain, method=second_method, target=second_class)
        return {
            **place.report(request, left_result, write_left),
            **place.report(request, right_result, write_right, alias=alias, note=note),
        }

    def refresh(
        request: TabRequest, method: str, alias: str, second_method: str, _: str
    ) -> Updates:
        """Show another picture or model: its classes and methods, and both reports."""
        with pool.turn(request.alias, request.is_current) as model:
            classes = class_choices(model, request.picture)
            methods = method_choice(model, method)
        reports = explain_both(request, methods["value"], alias, second_method, PREDICTED)
        return {
            **reports,
            target: gradio.Dropdown(classes, value=PREDICTED),
            left_method: gradio.Dropdown(**methods),
        }

    def change_right_model(
        request: TabRequest, method: str, alias: str, second_method: str, class_name: str
    ) -> Updates:
        """Show another model on the right, with its methods."""
        with pool.turn(alias, request.is_current) as model:
            methods = method_choice(model, second_method)
        reports = explain_both(request, method, alias, methods["value"], class_name)
        return {**reports, right_method: gradio.Dropdown(**methods)}

    for control in (left_method, right_method, target):
        place.on(control.input, explain_both, inputs, results)
    place.on(right_model.input, change_right_model, inputs, (*results, right_method))
    return Tab(place.tab, inputs, (*results, target, left_method), refresh)


def offered_attacks() -> tuple[Attack, ...]:
    """Return the attacks that the page offers: bounded by L∞, in at most PASSES passes."""
    offered = []
    for attack in ATTACKS.values():
        is_bounded = attack.norm == "linf" and attack.kind == "budget"
        if is_bounded and not attack.members and attack.passes() <= PASSES:
            offered.append(attack)
    return tuple(offered)


def write_attack(job: Job, *, attack: str, epsilon: float) -> Path | None:
    """Write the report of `vitlens attack`; return its path. epsilon: in 1/255.

    Raises UnknownNameError for an attack that is not offered, InputError for an epsilon outside 0
    to MOST.
    """
    if not 0 <= epsilon <= MOST:
        raise InputError(f"expected an epsilon from 0 to {MOST:g} (in 1/255), found {epsilon:g}")
    offered = [offer.name for offer in offered_attacks()]
    if attack not in offered:
        raise UnknownNameError(
            "attack on this page", attack, offered, hint="vitlens attack, which runs all of them"
        )
    name = job.name
    file = job.picture.name
    line = ["attack", name, "--images", file, "--predicted"]
    line += ["--attack", attack, "--epsilon", f"{epsilon:g}"]
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


def attack_tab(place: TabPlace) -> Tab:
    """Return the tab of an attack: the picture, the perturbation, the maps before and after."""
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
    caution = (
        "An attack that fails proves nothing: vitlens attack runs stronger ones, on many images, "
        "with self-checks."
    )
    gradio.HTML(str(pieces.sentence(caution, "quiet")))
    result = Result.placed("break")
    inputs = (method, epsilon)

    def refresh(request: TabRequest, name: str, size: float) -> Updates:
        return place.report(request, result, partial(write_attack, attack=name, epsilon=size))

    for listen in (method.input, epsilon.release):
        place.on(listen, refresh, inputs, result.components)
    return Tab(place.tab, inputs, result.components, refresh)
