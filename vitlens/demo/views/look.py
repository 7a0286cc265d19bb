"""Look: what a model predicts for a picture, and the attention explorer of it."""

from dataclasses import dataclass

import torch

import vitlens
from vitlens.attribution.explain import preferred_method
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.look.report import digits_words
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.demo.markup import Card, Share, badge, beside, cards, classes_table, frame, joined, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.views.maps import Floats, drawn_over, map_array
from vitlens.errors import LensError, UnsupportedError
from vitlens.models.model import Model
from vitlens.report.html import explorer_fragment

TOP = 5


@dataclass(frozen=True)
class Looked:
    """shares: the most probable classes; method: of the map, which is raw (rows, columns); explorer: the standalone
    HTML document of the attention explorer, "" where there is none, for the `reason`."""

    alias: str
    digits: bool
    shares: tuple[Share, ...]
    method: str
    values: Floats
    explorer: str
    reason: str


def top_classes(model: Model, picture: Picture, most: int = TOP) -> tuple[Share, ...]:
    """The most probable classes of a picture."""
    with torch.inference_mode():
        shares = model(picture.images(model)).float().softmax(-1)[0]
    best = shares.topk(min(most, len(shares)))
    return tuple(
        Share(model.classes[index], value) for index, value in zip(best.indices.tolist(), best.values.tolist())
    )


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
    return Looked(
        model.alias, model.classes == DIGITS, top_classes(model, picture), method, map_array(values), document, reason
    )


def look_html(looked: Looked, model: Model, picture: Picture) -> tuple[str, str]:
    """The prediction beside its map; and the explorer, or why there is none."""
    pixels, flaw = drawn_over(picture, model, looked.values, signed=ATTRIBUTIONS[looked.method].signed)
    title = ATTRIBUTIONS[looked.method].title
    best = looked.shares[0].name
    card = Card(
        pixels, title, f"{title} for {best} over {picture.name}", f"for {best}{f': {flaw}' if flaw else ''}, unchecked"
    )
    top = joined(
        beside(classes_table(looked.shares, f"{looked.alias}: the most probable classes"), cards([card])),
        *([sentence(digits_words(looked.alias).replace("**", ""), "warning")] if looked.digits else []),
    )
    if looked.explorer:
        return top, joined(frame(looked.explorer, f"Attention explorer of {looked.alias}"))
    return top, joined(
        badge("no attention explorer", "not tested"), sentence(f"{looked.reason}."),
        sentence("The map above, Explain, Break and Report work for this model, too.", "quiet"),
    )  # fmt: skip
