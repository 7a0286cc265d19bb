"""Look: what a model predicts for a picture, and the attention explorer of it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import vitlens
from vitlens.attribution.explain import preferred_method
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.look.measure import measured
from vitlens.commands.look.options import LookOptions
from vitlens.commands.look.report import digits_words
from vitlens.commands.run.options import RunOptions
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.demo.markup import badge, beside, cards, classes_table, frame, joined, map_card, said, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.record import ChangedClassRow
from vitlens.demo.site import Asked, Export, Here, TabParts, Updates, typed
from vitlens.errors import LensError, UnsupportedError
from vitlens.models.model import Model
from vitlens.report.html import explorer_fragment

TOP: Final = 5  # classes
LACKING: Final = "Look, Explain, Break and Report work for this model."  # where another tab does not


@dataclass(frozen=True)
class Looked:
    """classes: the most probable ones with their probabilities; method: of the map, which is raw (rows, columns);
    explorer: the standalone document of the attention explorer, "" where there is none, for the `reason`."""

    classes: tuple[tuple[str, float], ...]
    method: str
    values: NDArray[np.float64]
    explorer: str
    reason: str


def map_array(maps: Tensor) -> NDArray[np.float64]:
    """The first of a batch of maps, (rows, columns)."""
    return np.asarray(maps[0].detach().double().cpu().numpy())


def top_classes(model: Model, picture: Picture, most: int = TOP) -> tuple[tuple[str, float], ...]:
    """The most probable classes of a picture, with their probabilities."""
    with torch.inference_mode():
        shares = model(picture.images(model)).float().softmax(-1)[0]
    best = shares.topk(min(most, len(shares)))
    return tuple((model.classes[index], value) for index, value in zip(best.indices.tolist(), best.values.tolist()))


def changed_classes(model: Model, before: Tensor, after: Tensor) -> tuple[ChangedClassRow, ...]:
    """The most probable classes before a change, and that after it, from the logits (classes,) of both."""
    leading = dict.fromkeys((*before.topk(min(TOP, len(before))).indices.tolist(), int(after.argmax())))
    values = (before, after, before.softmax(-1), after.softmax(-1))
    return tuple(ChangedClassRow(model.classes[at], *(float(each[at]) for each in values)) for at in leading)


def changed_table(rows: tuple[ChangedClassRow, ...]) -> Any:
    """The probabilities of classes before and after."""
    return classes_table([(row.name, row.probability_before, row.probability_after) for row in rows], "Probabilities")


def look_at(model: Model, picture: Picture) -> Looked:
    """The prediction, the map of the predicted class, and the explorer."""
    images, method = picture.images(model), preferred_method(model)
    values = vitlens.explain(model, images, method=method)
    document, reason = "", ""
    try:
        view = vitlens.explorer(model, images, maps={ATTRIBUTIONS[method].title: values})
        document = explorer_fragment(view.explorer)
    except (LensError, UnsupportedError) as error:
        reason = str(error)
    return Looked(top_classes(model, picture), method, map_array(values), document, reason)


def look_html(looked: Looked, model: Model, picture: Picture) -> tuple[str, str]:
    """The prediction beside its map; and the explorer, or why there is none."""
    method = ATTRIBUTIONS[looked.method]
    of = f"for {looked.classes[0][0]}, unchecked"
    card = map_card(picture.array(model), looked.values, method.title, of, signed=method.signed)
    top = joined(
        beside(classes_table(looked.classes, f"{model.alias}: the most probable classes"), cards([card])),
        *([said(digits_words(model.alias), "warning", live=False)] if model.classes == DIGITS else []),
    )
    if looked.explorer:
        return top, joined(frame(looked.explorer, f"Attention explorer of {model.alias}"))
    why = badge("no attention explorer", "not tested"), sentence(f"{looked.reason}.")
    return top, joined(*why, sentence("The map above, Explain, Break and Report work for this model, too.", "quiet"))


def write_look(models: tuple[Model, ...], picture: Picture, run: RunOptions) -> Path:
    """The report of `vitlens look`."""
    (model,) = models
    options = LookOptions(images=(picture.name,), model=model.provenance.name)
    line = typed("look", picture.name, "--model", model.provenance.name)
    return measured(replace(options, run=replace(run, command=line)), model, picture.split(model))


def look_tab(here: Here) -> TabParts:
    """The prediction and its map, above the attention explorer."""
    import gradio

    outputs = gradio.HTML(elem_id="look-top"), gradio.HTML(elem_id="look-explorer")

    def refresh(now: Asked) -> Updates:
        with here.turn(now) as (model,):
            return dict(zip(outputs, look_html(look_at(model, now.picture), model, now.picture), strict=True))

    return TabParts(here.tab, (), outputs, refresh, "look", lambda alias, _: Export((alias,), write_look))
