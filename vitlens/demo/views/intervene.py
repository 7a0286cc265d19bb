"""Intervene: a picture's prediction and map with some heads and some patches switched off, by replay."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import vitlens
from vitlens.analysis.ablation.ablate import units_of
from vitlens.analysis.attention.tokens import require_token_attention
from vitlens.attribution.explain import preferred_method, preferred_methods
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.demo.markup import Card, Share, cards, classes_table, joined, said, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.views.look import TOP
from vitlens.demo.views.maps import Floats, drawn_over, map_array
from vitlens.errors import InputError, LensError, UnsupportedError
from vitlens.lens.places.changes import Change, Changes
from vitlens.models.model import Model
from vitlens.models.support import require

Head = tuple[int, int]  # layer, head
_LIVE: Final = 4  # passes of a map that answers a click
_RANKED: Final = 3  # methods by preference, of which the first quick one is taken


@dataclass(frozen=True)
class Switches:
    """What of a model can be switched off: its heads; and patches, on a grid (rows, columns), or why none can be."""

    heads: tuple[Head, ...]
    grid: tuple[int, int] | None
    reason: str = ""


@dataclass(frozen=True)
class Off:
    """What is switched off. heads: whose output is zero; patches: to which no token attends in any layer, numbered row
    by row."""

    heads: tuple[Head, ...] = ()
    patches: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.heads or self.patches)


@dataclass(frozen=True)
class Answer:
    """A prediction before and after. target: the class predicted at first, of which logits are its logits before and
    after, and maps (rows, columns) of it by `method`; shares: the leading classes, of which class_logits are the logits
    before and after; exact: whether replay was exact, else `note` says why not."""

    alias: str
    off: Off
    target: str
    logits: tuple[float, float]
    shares: tuple[Share, ...]
    class_logits: tuple[tuple[float, float], ...]
    method: str
    maps: tuple[Floats, Floats]
    exact: bool
    note: str


def switches_of(model: Model) -> Switches:
    """What can be switched off. Raises UnsupportedError for a model without heads that can."""
    require(model, "heads")
    heads = tuple((unit.layer, unit.head or 0) for unit in units_of(model, kinds=("head",)))
    try:
        require_token_attention(model)
    except (LensError, UnsupportedError) as error:
        return Switches(heads, None, str(error))
    if model.layout.prefix or model.anatomy.readout != "pool":
        return Switches(heads, model.layout.grid)
    return Switches(heads, None, "its last layer pools the patches by an attention of its own")


def read_off(data: object, switches: Switches) -> Off:
    """What a browser says is off, checked. Raises InputError for anything else than heads and patches of the model."""
    if not isinstance(data, Mapping):
        raise InputError(f"expected heads and patches to switch off, found {type(data).__name__}; load the page again")
    heads = tuple(sorted({_pair(each) for each in _listed(data, "heads")}))
    patches = tuple(sorted({_number(each) for each in _listed(data, "patches")}))
    count = 0 if switches.grid is None else switches.grid[0] * switches.grid[1]
    unknown = [head for head in heads if head not in switches.heads]
    outside = [patch for patch in patches if not 0 <= patch < count]
    if unknown or outside:
        what = f"head {unknown[0]}" if unknown else f"patch {outside[0]}"
        raise InputError(f"expected heads and patches of this model, found {what}; choose the model again")
    return Off(heads, patches)


def _listed(data: Mapping[Any, Any], name: str) -> Sequence[object]:
    found = data.get(name, ())
    if not isinstance(found, list | tuple) or len(found) > 100_000:
        raise InputError(f"expected a list of {name} to switch off, found {type(found).__name__}; load the page again")
    return found


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"expected whole numbers of heads and patches, found {value!r:.40}; load the page again")
    return value


def _pair(value: object) -> Head:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise InputError(f"expected heads as [layer, head], found {value!r:.40}; load the page again")
    return _number(value[0]), _number(value[1])


def changes_of(model: Model, off: Off) -> Changes:
    """The changes by place, as `vitlens.intervene` and `vitlens.replay` take them."""
    changes: dict[str, Change] = {f"blocks.{layer}.head.{head}": "zero" for layer, head in off.heads}
    if off.patches:
        first = len(model.layout.prefix)
        keys = tuple(first + patch for patch in off.patches)
        changes["blocks.*.attention.weights"] = vitlens.KnockOut(keys=keys)
    return changes


def live_method(model: Model) -> str:
    """The first method by preference of at most _LIVE passes, as its map answers every click."""
    methods = preferred_methods(model, _RANKED)
    quick = (name for name in methods if ATTRIBUTIONS[name].forwards + ATTRIBUTIONS[name].backwards <= _LIVE)
    return next(quick, preferred_method(model))


def answered(model: Model, picture: Picture, off: Off, *, whole: Answer | None = None) -> Answer:
    """The prediction and the map of the class predicted at first, before and after.

    whole: the answer of this model and picture with nothing off, whose map is then not computed again.
    """
    images, changes = picture.images(model), changes_of(model, off)
    with vitlens.replay(model, images) as replay:
        before = replay.logits[0].float()
        after = replay.run([changes])[0, 0].float() if off else before
        exact, note = replay.exact, replay.note
    target, method, leading = before.argmax().reshape(1), live_method(model), _leading(before, after)
    first = whole.maps[0] if whole else map_array(vitlens.explain(model, images, targets=target, method=method))
    then = first
    if off:
        with vitlens.intervene(model, changes):
            then = map_array(vitlens.explain(model, images, targets=target, method=method))
    return Answer(
        model.alias,
        off,
        model.classes[int(target)],
        (float(before[target]), float(after[target])),
        tuple(_shares(model, before, after, leading)),
        tuple((float(before[index]), float(after[index])) for index in leading),
        method,
        (first, then),
        exact,
        note,
    )


def _leading(before: Tensor, after: Tensor) -> tuple[int, ...]:
    """The most probable classes before, and that after."""
    return tuple(dict.fromkeys((*before.topk(min(TOP, len(before))).indices.tolist(), int(torch.argmax(after)))))


def _shares(model: Model, before: Tensor, after: Tensor, leading: Sequence[int]) -> Iterator[Share]:
    first, then = before.softmax(-1), after.softmax(-1)
    for index in leading:
        yield Share(model.classes[index], float(first[index]), float(then[index]))


def answer_html(answer: Answer, model: Model, picture: Picture) -> str:
    """What changed, in words, numbers and pictures."""
    method = ATTRIBUTIONS[answer.method]
    shown = []
    for when, values in zip(("before", "after"), answer.maps):
        pixels, flaw = drawn_over(picture, model, values, signed=method.signed)
        what = f"{method.title} {when}"
        note = f"for {answer.target}{f'; the map is {flaw}' if flaw else ''}"
        shown.append(Card(pixels, what, f"{what}, for {answer.target}", note))
    table = classes_table(answer.shares, "Probabilities")
    how = (
        "A head that is off puts out zero, which is far from any output that later layers have seen; no token attends "
        "to a patch that is off, in any layer. Single effects do not add up: vitlens ablate measures them on many "
        "images, with intervals."
    )
    caveats = [sentence(f"{answer.note}.", "quiet")] if answer.note else []
    return joined(said(answer_words(answer)), table, cards(shown), sentence(how, "quiet"), *caveats)


def answer_words(answer: Answer) -> str:
    """The change in one sentence."""
    before, after = answer.logits
    leading = max(answer.shares, key=lambda share: share.after or 0.0).name
    if not answer.off:
        return f"Nothing is off: {answer.alias} predicts {answer.target} (logit {before:.2f})."
    heads, patches = len(answer.off.heads), len(answer.off.patches)
    named = ", ".join(f"L{layer}.H{head}" for layer, head in answer.off.heads[:6])
    parts = [f"{named}{f' and {heads - 6} more' if heads > 6 else ''}"] if heads else []
    parts += [f"{patches} patch{'es' if patches > 1 else ''}"] if patches else []
    kept = "the prediction stays" if leading == answer.target else f"the prediction becomes {leading}, was"
    return (
        f"Without {' and '.join(parts)} {kept} {answer.target}: its logit goes from {before:.2f} to {after:.2f} "
        f"({after - before:+.2f})."
    )
