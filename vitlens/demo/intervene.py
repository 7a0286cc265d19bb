"""Intervene: a picture's prediction and map with some heads and patches off, by replay.

`intervene_tab` is the tab. Its board (`board_html`) has a switch for each head and patch; board.js
sends those that are off, which `read_off` checks and `measure_intervention` measures.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray
from torch import Tensor

import vitlens
from vitlens.analysis.ablation.units import require_heads, units_of
from vitlens.analysis.attention.tokens import require_token_attention
from vitlens.analysis.attention.weights import attention_maps, require_maps
from vitlens.attribution.explain import preferred_method, preferred_methods
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.charts.overlay import enlarged
from vitlens.charts.style import MAGNITUDE
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.publish import publish
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.demo.options import DemoOptions
from vitlens.demo.pictures import Picture, embedded
from vitlens.demo.pool import OutdatedError
from vitlens.demo.record import (
    ChangedClassRow,
    DemoRecord,
    HeadOffRow,
    IntervenedArrays,
    IntervenedRow,
    PatchOffRow,
)
from vitlens.demo.site import Job, Result, Tab, TabPlace, TabRequest, Updates, pieces
from vitlens.errors import InputError, LensError, UnsupportedError
from vitlens.lens.intervene import Change, Changes
from vitlens.models.model import Model
from vitlens.models.numbering import is_sparse, numbers_text

Head = tuple[int, int]  # layer, head
_QUICK_PASSES: Final = 4  # the most passes of the model for a map that answers a click
_LEADING: Final = 5  # most probable classes in the table
_NAMING_SCENES: Final = 64  # scenes of digits by which heads are named
_RANKED: Final = 3  # most preferred methods, among which a quick one is looked for
_SCRIPT: Final = (Path(__file__).parent / "board.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Switches:
    """The heads and patches of a model that can be switched off.

    grid: rows and columns of the patches; None if none can be switched off.
    reason: why none can.
    """

    heads: tuple[Head, ...]
    grid: tuple[int, int] | None
    reason: str = ""


@dataclass(frozen=True)
class Off:
    """The heads and patches that are switched off.

    The output of these heads is zero. No token attends to these patches in any layer; they are
    numbered row by row.
    """

    heads: tuple[Head, ...] = ()
    patches: tuple[int, ...] = ()


def switches_of(model: Model) -> Switches:
    """Return the heads and patches that can be off. Raises UnsupportedError without such heads."""
    require_heads(model)
    places = []
    for unit in units_of(model, kinds=("head",)):
        assert unit.head is not None  # the units are heads
        places.append((unit.layer, unit.head))
    heads = tuple(places)
    try:
        require_token_attention(model)
    except (LensError, UnsupportedError) as error:
        return Switches(heads, None, str(error))
    if not model.layout.prefix and model.anatomy.readout == "pool":
        return Switches(heads, None, "its last layer pools the patches with separate attention")
    return Switches(heads, model.layout.grid)


def read_off(data: object, switches: Switches) -> Off:
    """Return the heads and patches that a browser's message switches off.

    Raises InputError for anything else than heads and patches of the model.
    """
    try:
        message = msgspec.convert(data, Off)  # further fields of the message are ignored
    except msgspec.ValidationError as error:
        raise InputError(
            f"expected heads and patches to switch off, found {error}; load the page again"
        ) from error
    heads = tuple(sorted(set(message.heads)))
    patches = tuple(sorted(set(message.patches)))
    rows, columns = switches.grid or (0, 0)
    unknown = [f"head {head}" for head in heads if head not in switches.heads]
    unknown += [f"patch {patch}" for patch in patches if not 0 <= patch < rows * columns]
    if unknown:
        layer_numbers = sorted({layer for layer, _head in switches.heads})
        head_count = 1 + max(head for _layer, head in switches.heads)
        layers = f"{len(layer_numbers)} layers"
        if is_sparse(layer_numbers):
            layers = f"layers {numbers_text(layer_numbers)}"
        raise InputError(
            f"expected heads and patches of this model ({layers} of at most {head_count} heads, "
            f"{rows}x{columns} patches), found {unknown[0]}; choose the model again"
        )
    return Off(heads, patches)


def changes_of(model: Model, off: Off) -> Changes:
    """Return the changes by place, as `vitlens.intervene` and `vitlens.replay` take them."""
    changes: dict[str, Change] = {}
    for layer, head in off.heads:
        changes[f"blocks.{layer}.head.{head}"] = "zero"
    if off.patches:
        first_patch = len(model.layout.prefix)  # its number among the tokens
        keys = tuple(first_patch + patch for patch in off.patches)
        changes["blocks.*.attention.weights"] = vitlens.KnockOut(keys=keys)
    return changes


def live_method(model: Model) -> str:
    """Return the preferred method that is quick enough to answer clicks; if none is, the first."""
    for name in preferred_methods(model, _RANKED):
        method = ATTRIBUTIONS[name]
        if method.forwards + method.backwards <= _QUICK_PASSES:
            return name
    return preferred_method(model)


def measure_intervention(
    model: Model,
    picture: Picture,
    off: Off,
    switches: Switches,
    *,
    baseline: DemoRecord | None = None,
) -> DemoRecord:
    """Return the prediction and the map of the class predicted at first, before and after.

    baseline: the record of this model and picture with nothing off, whose map is then not computed
    again.
    """
    images = picture.images(model)
    changes = changes_of(model, off)
    with vitlens.replay(model, images) as replay:
        before = replay.logits[0].float()  # (classes,)
        after = before
        if changes:
            variants = replay.run([changes])  # (variants, images, classes)
            after = variants[0, 0].float()
        exact = replay.exact
        note = replay.note
    target = before.argmax().reshape(1)  # (images,)
    method = live_method(model)

    def explain_target() -> NDArray[np.float32]:
        values = vitlens.explain(model, images, targets=target, method=method)[0]
        return np.asarray(values.detach().float().cpu().numpy())

    if baseline is not None and baseline.maps is not None:
        map_before = baseline.maps.before
    else:
        map_before = explain_target()
    map_after = map_before
    if changes:
        with vitlens.intervene(model, changes):
            map_after = explain_target()
    row = IntervenedRow(
        model=model.alias,
        image=picture.name,
        target=model.classes[int(target)],
        predicted=model.classes[int(after.argmax())],
        logit_before=float(before[target]),
        logit_after=float(after[target]),
        method=method,
        title=ATTRIBUTIONS[method].title,
        signed=ATTRIBUTIONS[method].signed,
        grid=switches.grid,
        exact=exact,
        note=note,
    )
    return DemoRecord(
        intervened=(row,),
        heads_off=tuple(HeadOffRow(layer, head) for layer, head in off.heads),
        patches_off=tuple(_patch_rows(model, off, switches)),
        classes=tuple(_changed_classes(model, before, after)),
        maps=IntervenedArrays(
            picture.pixels[model.alias].numpy(), before=map_before, after=map_after
        ),
    )


def _patch_rows(model: Model, off: Off, switches: Switches) -> Iterator[PatchOffRow]:
    """Yield the places of the patches that are off."""
    for patch in off.patches:
        assert switches.grid is not None  # as a patch is off
        _rows, columns = switches.grid
        row, column = divmod(patch, columns)
        yield PatchOffRow(row, column, key=len(model.layout.prefix) + patch)


def _changed_classes(model: Model, before: Tensor, after: Tensor) -> Iterator[ChangedClassRow]:
    """Yield the most probable classes before a change, and the one after it.

    before, after: logits (classes,).
    """
    leading = before.topk(min(_LEADING, len(before))).indices.tolist()
    probabilities_before = before.softmax(-1)
    probabilities_after = after.softmax(-1)
    classes = dict.fromkeys((*leading, int(after.argmax())))  # each once, in order
    for index in classes:
        yield ChangedClassRow(
            name=model.classes[index],
            logit_before=float(before[index]),
            logit_after=float(after[index]),
            probability_before=float(probabilities_before[index]),
            probability_after=float(probabilities_after[index]),
        )


def words_of(model: Model, examples: Sequence[Picture]) -> dict[Head, str]:
    """Return the words on each head: what determines its attention, its target, its output.

    They are found on scenes of digits if the model has these classes. Otherwise they are found on
    the examples, which have no classes, so that the third label is missing; on fewer than eight
    examples the first one is missing, too. {} for a model whose heads have no labels.
    """
    with suppress(InputError, UnsupportedError):
        if model.classes == DIGITS:
            split = vitlens.load_data(
                "digits", part="test", preprocessing=model.preprocessing, limit=_NAMING_SCENES
            )
            names = vitlens.name_heads(model, split)
        else:
            images = torch.cat([example.images(model) for example in examples])
            names = vitlens.name_heads(model, images)
        return {(head.layer, head.head): head.words for head in names.heads}
    return {}


def board_html(
    model: Model, picture: Picture, switches: Switches, words: Mapping[Head, str]
) -> str:
    """Return the board with everything on, which board.js makes interactive.

    It has a button per head, with its attention on the picture and its words, and a button per
    patch over the picture.
    """
    maps_by_head = _head_maps(model, picture)
    # the template takes for each head its number, the picture of its attention and its words
    buttons_by_layer: dict[int, list[tuple[int, str, str]]] = {}
    for layer, head in sorted(switches.heads):
        head_map = maps_by_head.get((layer, head), "")
        button = (head, head_map, words.get((layer, head), ""))
        buttons_by_layer.setdefault(layer, []).append(button)
    board = pieces.board(
        key=board_key(model, picture),
        grid=switches.grid,
        reason=switches.reason,
        picture=embedded(enlarged(picture.array(model))),
        layers=list(buttons_by_layer.items()),
    )
    return str(board)


def _head_maps(model: Model, picture: Picture) -> dict[Head, str]:
    """Return the attention map of each head as the URI of a picture; {} without attention maps."""
    if not require_maps.is_met(model):
        return {}
    colormap = colormaps[MAGNITUDE]
    uris = {}
    for layer in attention_maps(model, picture.images(model)):
        for head, values in enumerate(layer.maps[0]):  # of the only image
            weights = values.double().cpu().numpy()
            largest = float(weights.max()) or 1.0  # 0: a head that attends to no patch
            colours = colormap(weights / largest)[..., :3]  # without alpha
            uris[layer.site.layer, head] = embedded(colours).uri
    return uris


def board_key(model: Model, picture: Picture) -> str:
    """Return the key that identifies the board of a model and a picture."""
    return f"{picture.key} {model.alias}"


def write_intervened(job: Job, *, off: object, baseline: DemoRecord | None = None) -> Path:
    """Write the report of a picture with heads and patches off; return its path.

    off: the browser's message.
    baseline: as for `measure_intervention`.
    """
    switches = switches_of(job.model)
    switched_off = read_off(off, switches)
    record = measure_intervention(job.model, job.picture, switched_off, switches, baseline=baseline)
    return write_record(record, job)


def write_record(record: DemoRecord, job: Job) -> Path:
    """Write a report folder of a record of the page; return the report's path."""
    model = job.model
    file = job.picture.name
    options = DemoOptions(models=(job.name,), images=(file,), device=str(model.device))
    run = job.typed("demo", job.name, "--images", file)
    config = settings(options, run, models=(model,), split=job.picture.split(model))
    with RunFolder.opened("demo", run, config) as folder:
        folder.keep(record)
        return publish(folder)


def intervene_tab(place: TabPlace) -> Tab:
    """Return a tab with heads and patches to switch off; the prediction and its map follow."""
    import gradio

    with gradio.Row():
        with gradio.Column(scale=2, min_width=300):
            board = gradio.HTML(
                elem_id="intervene-board", apply_default_css=False, js_on_load=_SCRIPT
            )
        with gradio.Column(scale=3, min_width=280):
            result = Result.placed("intervene")
    # By the board's key, the record with nothing off. `refresh` stores it and `switch` passes it
    # on, so that a click computes one map and not two.
    baselines = gradio.State({})
    outputs = (board, *result.components, baselines)

    def refresh(request: TabRequest) -> Updates:
        """Show another picture or model, with everything on."""
        picture = request.picture
        with place.site.pool.turn(request.alias, request.is_current) as model:
            try:
                switches = switches_of(model)
            except UnsupportedError as error:
                return {board: str(pieces.sentence(f"{error}.")), baselines: {}, **result.nothing()}
            record = measure_intervention(model, picture, Off(), switches)
            words = place.site.words.get(request.alias, {})
            html = board_html(model, picture, switches, words)
        return {
            board: html,
            baselines: {board_key(model, picture): record},
            **place.report(request, result, partial(write_record, record)),
        }

    def switch(request: TabRequest, stored_baselines: dict[str, DemoRecord]) -> Updates:
        """Show the picture with the heads and patches off that the browser's message names."""
        key = board_key(place.site.pool.model(request.alias), request.picture)
        if isinstance(request.data, dict) and request.data.get("board", key) != key:
            raise OutdatedError(
                "expected a click on the board of this picture and model, found one on "
                "another board"
            )
        write = partial(write_intervened, off=request.data, baseline=stored_baselines.get(key))
        return place.report(request, result, write)

    place.on(board.switched, switch, (baselines,), result.components)
    return Tab(place.tab, (), outputs, refresh)
