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

# the most passes of the model for one map or one attack; slower ones are for the command line
PASSES: Final = 100
# epsilons in steps of an 8-bit pixel: the largest, and the first of the slider
MOST: Final = 16.0
_EPSILON: Final = 4.0
PREDICTED: Final = "the predicted class"  # the first choice of a class
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
    second = pool.models[min(1, len(pool.models) - 1)]  # the first, if it is the only one

    def method_choice(model: Model, name: str = "", *, rank: int = 0) -> dict[str, Any]:
        """Return the choices and the value of a dropdown of a model's methods.

        name: the value, if the model has this method.
        rank: otherwise the value is the method at this place among the preferred ones.
        """
        offered = offered_methods(model)
        value = name
        if name not in offered:
            # each once, the preferred ones first
            by_preference = list(dict.fromkeys((*preferred_methods(model, 2), *offered)))
            value = by_preference[min(rank, len(by_preference) - 1)]
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
                # one model by two methods, two models by the method that each prefers
                right_rank = 1 if first is second else 0
                right_method = gradio.Dropdown(
                    **method_choice(second, rank=right_rank),
                    label="Right: method",
                    elem_id="explain-right",
                    min_width=140,
                )
            right_result = Result.placed("right")
    # the handlers below take their values in this order
    inputs = (left_method, right_model, right_method, target)
    results = (*left_result.components, *right_result.components)

    def explain_both(
        request: TabRequest, left_name: str, right_alias: str, right_name: str, class_name: str
    ) -> Updates:
        """Return both reports; left_name, right_name: of the methods.

        If the right model lacks the class, its report is on the class that it predicts.
        """
        right_class = class_name
        note = ""
        if lacks_class(class_name, pool.model(request.alias), pool.model(right_alias)):
            right_class = PREDICTED
            note = (
                f"{right_alias} has no class {class_name!r}: the class that it predicts is "
                "explained."
            )
        write_left = partial(write_explain, method=left_name, target=class_name)
        write_right = partial(write_explain, method=right_name, target=right_class)
        return {
            **place.report(request, left_result, write_left),
            **place.report(request, right_result, write_right, alias=right_alias, note=note),
        }

    def refresh(
        request: TabRequest, left_name: str, right_alias: str, right_name: str, _class_name: str
    ) -> Updates:
        """Show another picture or model: its classes and methods, and both reports."""
        with pool.turn(request.alias, request.is_current) as model:
            classes = class_choices(model, request.picture)
            methods = method_choice(model, left_name)
        reports = explain_both(request, methods["value"], right_alias, right_name, PREDICTED)
        return {
            **reports,
            target: gradio.Dropdown(classes, value=PREDICTED),
            left_method: gradio.Dropdown(**methods),
        }

    def change_right_model(
        request: TabRequest, left_name: str, right_alias: str, right_name: str, class_name: str
    ) -> Updates:
        """Show another model on the right, with its methods."""
        with pool.turn(right_alias, request.is_current) as model:
            methods = method_choice(model, right_name)
        reports = explain_both(request, left_name, right_alias, methods["value"], class_name)
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
        is_single = not attack.members  # others run several attacks
        if is_bounded and is_single and attack.passes() <= PASSES:
            offered.append(attack)
    return tuple(offered)


def write_attack(job: Job, *, attack: str, epsilon: float) -> Path | None:
    """Write the report of `vitlens attack`; return its path. epsilon: in 1/255.

    Raises UnknownNameError for an attack that is not offered, InputError for an epsilon outside 0
    to MOST.
    """
    if not 0 <= epsilon <= MOST:
        raise InputError(f"expected an epsilon from 0 to {MOST:g} (in 1/255), found {epsilon:g}")
    offered = [entry.name for entry in offered_attacks()]
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

    choices = []
    for attack in offered_attacks():
        choices.append((f"{attack.title}: {attack.description}", attack.name))
    with gradio.Row():
        name_choice = gradio.Dropdown(
            choices,
            value=ATTACK,
            label="Attack",
            elem_id="break-attack",
            scale=2,
        )
        epsilon_choice = open_slider(
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
    inputs = (name_choice, epsilon_choice)

    def refresh(request: TabRequest, name: str, epsilon: float) -> Updates:
        write = partial(write_attack, attack=name, epsilon=epsilon)
        return place.report(request, result, write)

    for listen in (name_choice.input, epsilon_choice.release):
        place.on(listen, refresh, inputs, result.components)
    return Tab(place.tab, inputs, result.components, refresh)
