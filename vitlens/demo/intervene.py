"""Intervene: a picture's prediction and map with some heads and some patches switched off, by
replay.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray
from torch import Tensor

import vitlens
from vitlens.analysis.ablation.bench import require_heads, units_of
from vitlens.analysis.attention.tokens import require_token_attention
from vitlens.analysis.attention.weights import attention_maps, require_maps
from vitlens.attribution.explain import preferred_method, preferred_methods
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts.overlay import enlarged
from vitlens.charts.style import MAGNITUDE
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.publish import publish
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.demo import record as kept
from vitlens.demo.options import DemoOptions
from vitlens.demo.pictures import Picture, embedded
from vitlens.demo.pool import OutdatedError
from vitlens.demo.site import Asked, Here, Job, Result, Tab, Updates, pieces
from vitlens.errors import InputError, LensError, UnsupportedError
from vitlens.lens.intervene import Change, Changes
from vitlens.models.model import Model
from vitlens.models.numbering import is_sparse, numbers_text

Head = tuple[int, int]  # layer, head
_LIVE: Final = 4  # passes of a map that answers a click
_LEADING: Final = 5  # classes in the table
_NAMED: Final = 64  # scenes of digits by which heads are named
_RANKED: Final = 3  # methods by preference, of which the first quick one is taken
_SCRIPT: Final = (Path(__file__).parent / "board.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Switches:
    """What of a model can be switched off: its heads; and patches, on a grid (rows, columns), or
    why none can be.
    """

    heads: tuple[Head, ...]
    grid: tuple[int, int] | None
    reason: str = ""


@dataclass(frozen=True)
class Off:
    """What is switched off. heads: whose output is zero; patches: to which no token attends in any
    layer, numbered row by row.
    """

    heads: tuple[Head, ...] = ()
    patches: tuple[int, ...] = ()


def switches_of(model: Model) -> Switches:
    """Return what can be switched off. Raises UnsupportedError for a model without heads that
    can."""
    require_heads(model)
    heads = tuple((unit.layer, unit.head or 0) for unit in units_of(model, kinds=("head",)))
    try:
        require_token_attention(model)
    except (LensError, UnsupportedError) as error:
        return Switches(heads, None, str(error))
    if model.layout.prefix or model.anatomy.readout != "pool":
        return Switches(heads, model.layout.grid)
    return Switches(heads, None, "its last layer pools the patches by an attention of its own")


def read_off(data: object, switches: Switches) -> Off:
    """Return what a browser says is off, checked.

    Raises InputError for anything else than heads and patches of the model.
    """
    try:
        sent = msgspec.convert(data, Off)
    except msgspec.ValidationError as error:
        raise InputError(
            f"expected heads and patches to switch off, found {error}; load the page again"
        ) from error
    heads = tuple(sorted(set(sent.heads)))
    patches = tuple(sorted(set(sent.patches)))
    rows, columns = switches.grid or (0, 0)
    unknown = [f"head {head}" for head in heads if head not in switches.heads]
    unknown += [f"patch {patch}" for patch in patches if not 0 <= patch < rows * columns]
    if unknown:
        numbers = sorted({layer for layer, _ in switches.heads})
        most = 1 + max(head for _, head in switches.heads)
        layers = (
            f"layers {numbers_text(numbers)}" if is_sparse(numbers) else f"{len(numbers)} layers"
        )
        raise InputError(
            f"expected heads and patches of this model ({layers} of at most {most} heads, "
            f"{rows}x{columns} patches), found {unknown[0]}; choose the model again"
        )
    return Off(heads, patches)


def changes_of(model: Model, off: Off) -> Changes:
    """Return the changes by place, as `vitlens.intervene` and `vitlens.replay` take them."""
    changes: dict[str, Change] = {
        f"blocks.{layer}.head.{head}": "zero" for layer, head in off.heads
    }
    if off.patches:
        first = len(model.layout.prefix)
        changes["blocks.*.attention.weights"] = vitlens.KnockOut(
            keys=tuple(first + patch for patch in off.patches)
        )
    return changes


def live_method(model: Model) -> str:
    """Return the first method by preference of at most _LIVE passes, as its map answers every
    click.
    """
    quick = (
        name
        for name in preferred_methods(model, _RANKED)
        if ATTRIBUTIONS[name].forwards + ATTRIBUTIONS[name].backwards <= _LIVE
    )
    return next(quick, preferred_method(model))


def answered(
    model: Model,
    picture: Picture,
    off: Off,
    switches: Switches,
    *,
    whole: kept.DemoRecord | None = None,
) -> kept.DemoRecord:
    """Return the prediction and the map of the class predicted at first, before and after.

    whole: the answer of this model and picture with nothing off, whose map is then not computed
    again.
    """
    images = picture.images(model)
    changes = changes_of(model, off)
    with vitlens.replay(model, images) as replay:
        before = replay.logits[0].float()
        after = replay.run([changes])[0, 0].float() if changes else before
        exact = replay.exact
        note = replay.note
    target = before.argmax().reshape(1)
    method = live_method(model)

    def explained() -> NDArray[np.float32]:
        values = vitlens.explain(model, images, targets=target, method=method)[0]
        return np.asarray(values.detach().float().cpu().numpy())

    first = then = whole.maps.before if whole and whole.maps else explained()
    if changes:
        with vitlens.intervene(model, changes):
            then = explained()
    prefix, (_, columns) = len(model.layout.prefix) if off.patches else 0, switches.grid or (1, 1)
    row = kept.IntervenedRow(
        model.alias,
        picture.name,
        model.classes[int(target)],
        model.classes[int(after.argmax())],
        float(before[target]),
        float(after[target]),
        method,
        ATTRIBUTIONS[method].title,
        ATTRIBUTIONS[method].signed,
        switches.grid,
        exact,
        note,
    )
    return kept.DemoRecord(
        intervened=(row,),
        heads_off=tuple(kept.HeadOffRow(*head) for head in off.heads),
        patches_off=tuple(
            kept.PatchOffRow(*divmod(patch, columns), prefix + patch) for patch in off.patches
        ),
        classes=_changed_classes(model, before, after),
        maps=kept.IntervenedArrays(picture.pixels[model.alias].numpy(), first, then),
    )


def _changed_classes(
    model: Model, before: Tensor, after: Tensor
) -> tuple[kept.ChangedClassRow, ...]:
    """Return the most probable classes before a change, and that after it, from the logits
    (classes,) of both.
    """
    leading = dict.fromkeys(
        (*before.topk(min(_LEADING, len(before))).indices.tolist(), int(after.argmax()))
    )
    values = (before, after, before.softmax(-1), after.softmax(-1))
    return tuple(
        kept.ChangedClassRow(model.classes[at], *(float(each[at]) for each in values))
        for at in leading
    )


def words_of(model: Model, examples: Sequence[Picture]) -> dict[Head, str]:
    """Return what each head attends by, looks at and writes: by scenes of digits where the model
    knows these, else by the examples without the third word, and of fewer than eight without the
    first; nothing where heads have no words.
    """
    with suppress(InputError, UnsupportedError):
        if model.classes == DIGITS:
            split = vitlens.load_data(
                "digits", part="test", preprocessing=model.preprocessing, limit=_NAMED
            )
            found = vitlens.name_heads(model, split)
        else:
            found = vitlens.name_heads(model, torch.cat([each.images(model) for each in examples]))
        return {(one.layer, one.head): one.words for one in found.heads}
    return {}


def board_html(
    model: Model, picture: Picture, switches: Switches, words: Mapping[Head, str]
) -> str:
    """Everything on: a button a head, with its attention on the picture and its words, and a button
    a patch over the picture, which board.js makes lively.
    """
    maps = attention_maps(model, picture.images(model)) if require_maps.is_met(model) else ()
    attention = {
        (layer.site.layer, head): values.double().cpu().numpy()
        for layer in maps
        for head, values in enumerate(layer.maps[0])
    }
    drawn = {
        head: embedded(colormaps[MAGNITUDE](values / (float(values.max()) or 1.0))[..., :3]).uri
        for head, values in attention.items()
    }
    layers = [
        (
            layer,
            [
                (head, drawn.get((layer, head), ""), words.get((layer, head), ""))
                for _, head in heads
            ],
        )
        for layer, heads in groupby(sorted(switches.heads), key=lambda each: each[0])
    ]
    shown = embedded(enlarged(picture.array(model)))
    return str(
        pieces.board(board_key(model, picture), switches.grid, switches.reason, shown, layers)
    )


def board_key(model: Model, picture: Picture) -> str:
    """Return what tells the board of a model and a picture from all others."""
    return f"{picture.key} {model.alias}"


def write_intervened(job: Job, *, off: object, whole: kept.DemoRecord | None = None) -> Path:
    """Return the report of a picture with heads and patches off, as a browser says; whole: as for
    `answered`.
    """
    switches = switches_of(job.model)
    return write_record(
        answered(job.model, job.picture, read_off(off, switches), switches, whole=whole), job
    )


def write_record(record: kept.DemoRecord, job: Job) -> Path:
    """Return a report folder of the page's own; returns the report's path."""
    model = job.model
    file = job.picture.name
    options = DemoOptions(models=(job.name,), images=(file,), device=str(model.device))
    run = job.typed("demo", job.name, "--images", file)
    config = settings(options, run, models=(model,), split=job.picture.split(model))
    with RunFolder.opened("demo", run, config) as folder:
        folder.keep(record)
        return publish(folder)


def intervene_tab(here: Here) -> Tab:
    """Return a board of heads and a picture of patches to switch off; the prediction and its map
    answer.
    """
    import gradio

    with gradio.Row():
        with gradio.Column(scale=2, min_width=300):
            board = gradio.HTML(
                elem_id="intervene-board", apply_default_css=False, js_on_load=_SCRIPT
            )
        with gradio.Column(scale=3, min_width=280):
            result = Result.placed("intervene")
    whole = gradio.State(
        {}
    )  # by the board's key: what the model says of the picture with nothing off
    outputs = (board, *result.components, whole)

    def refresh(now: Asked) -> Updates:
        """Another picture or model: everything on."""
        with here.site.pool.turn(now.alias, now.wanted) as model:
            try:
                switches = switches_of(model)
            except UnsupportedError as error:
                return {board: str(pieces.sentence(f"{error}.")), whole: {}, **result.nothing()}
            answer = answered(model, now.picture, Off(), switches)
            html = board_html(model, now.picture, switches, here.site.words.get(now.alias, {}))
        known = {board: html, whole: {board_key(model, now.picture): answer}}
        return {**known, **here.report(now, result, partial(write_record, answer))}

    def switched(now: Asked, known: dict[str, kept.DemoRecord]) -> Updates:
        key = board_key(here.site.pool.model(now.alias), now.picture)
        if isinstance(now.data, dict) and now.data.get("board", key) != key:
            raise OutdatedError(
                "expected a click on the board of this picture and model, found one on another's"
            )
        return here.report(
            now, result, partial(write_intervened, off=now.data, whole=known.get(key))
        )

    here.on(board.switched, switched, (whole,), result.components)
    return Tab(here.tab, (), outputs, refresh)
