"""Looks at photographs: predictions, maps of the prediction and the runner-up, and the heads that matter."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Row
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitlens.analysis.attention.map_checks import map_bits
from vitlens.analysis.heads.registry import LABELS, MIXED, UNLABELLED, head_words
from vitlens.analysis.heads.specialisation import HeadLabel
from vitlens.attribution.look import Look, look
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.look import record as rows
from vitlens.commands.look.options import LookOptions
from vitlens.commands.look.stages import stages
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.load import load_models, load_split
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.progress import phase, progress
from vitlens.commands.run.publish import publish, read
from vitlens.commands.shared.explorer import sink_rows
from vitlens.commands.shared.explorer_measure import (
    GivenAttention,
    explored,
    given_attention,
    picture_of,
    read_attention,
)
from vitlens.commands.shared.predictions import PredictionRow
from vitlens.commands.shared.sheets import DRAWN, file_names, left_out_words
from vitlens.data.decode import Header, probe
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.folder import list_images
from vitlens.data.split import Split
from vitlens.devices import autocast, one_thread
from vitlens.display import for_terminal
from vitlens.errors import DataError, InputError, ModelError
from vitlens.models.model import Model
from vitlens.models.naming import ModelName, parse_model
from vitlens.models.sources.hub import SMALL_VIT_SIZE, download_small_vit, offline, vits_on_disk
from vitlens.names import BUNDLED
from vitlens.uncertainty import Estimate

SHOWN: Final = 4  # images
PLACED: Final = frozenset(("position", "sink"))  # labels that one image cannot tell apart
FEW_PLACES: Final = "few places"  # what heads of these attend to
GIVEN: Final = "attention"  # the name of weights that were given
_BAR: Final = 20  # characters of a probability of 1
MOST: Final = 8  # images of a run, unless --limit says otherwise
_SMALL: Final = 30_000_000  # parameters, below which one thread is fastest on a few images
ANOTHER: Final = "--model timm:NAME (see vitlens models) takes another"


def measure(options: LookOptions) -> Path:
    """Look at each image, or at given attention weights, and write the report; returns the report's path.

    Raises DataError where none of the images can be read, UnsupportedError for a model without a classifier, InputError
    for weights that cannot be shown.
    """
    run = options.run
    if options.attention is not None:
        return given(options, options.attention)
    if options.image is not None or options.prefix is not None:
        raise InputError("expected --image and --prefix with weights, found them alone; add --attention FILE.npy")
    if not options.images:
        raise InputError("expected a photograph to look at, found none; e.g. vitlens look cat.jpg")
    with offline(options.offline):
        name, chosen = chosen_model(options)
    _tell(chosen, quiet=run.quiet or not chosen)
    # the passes that check a model are few and small
    with offline(options.offline), one_thread():
        (model,) = load_models((name,), command="look", model_options=options.model_options, options=run)
    split = given_images(options.images, model, run)
    return measured(options, model, split, chosen)


def measured(options: LookOptions, model: Model, split: Split, chosen: str = "") -> Path:
    """Look at images that are loaded already, and write the report; returns the report's path.

    chosen: how the model came to be taken, "" where it was named.
    """
    run = options.run
    split = replace(split, notes=(*split.notes, *left_out_words(DRAWN, len(split))))
    (batch,) = split.batches(len(split), device=model.device)
    with RunFolder.opened(
        "look",
        run,
        settings(options, run, models=(model,), split=split),
        name_parts=(model.alias, Path(options.images[0]).stem if len(split) == 1 else "images"),
        title=f"{model.alias} looks at {Path(split.names[0]).name if len(split) == 1 else f'{len(split)} images'}",
    ) as folder:
        with one_thread() if model.parameter_count() < _SMALL else nullcontext(), autocast(model.device, run.precision):
            with phase("Which heads matter, and where the evidence lies"):
                seen = look(model, batch.images, batch_size=run.batch_size, seed=run.seed)
            explorer = explored(model, batch.images[:DRAWN])
        maps = seen.maps.float().numpy()
        method = ATTRIBUTIONS[seen.method]
        pixels = split.source.read(torch.arange(len(split))).numpy()
        row = rows.LookRow(
            chosen,
            model.classes == DIGITS,
            seen.method,
            method.title,
            seen.note,
            len(split),
            len(seen.places),
            seen.replace if seen.places else None,
        )
        folder.keep(
            rows.LookRecord(
                look=(row,),
                predictions=tuple(map(PredictionRow.of, split.names, seen.names, seen.probabilities.tolist())),
                heads=tuple(_head_rows(seen, file_names(split.names))),
                stages=tuple(_stage_rows(model.alias, seen)),
                maps=rows.LookArrays(pixels, maps[:, 0], maps[:, 1] if maps.shape[1] > 1 else None),
                **explorer,
            )
        )
        path = publish(folder)
        if not run.quiet:
            print_look(read(folder.record()))
        return path


def chosen_model(options: LookOptions) -> tuple[ModelName, str]:
    """Return the model's name, and how it came to be taken ("" where it was named): the smallest ViT in the hubs'
    caches, else DeiT-tiny, which is downloaded, else the bundled ViT of digits.

    Raises InputError for weights of no model.
    """
    if options.model is not None:
        return parse_model(options.model), ""
    plain = replace(ModelOptions(), classes=options.model_options.classes)
    if options.model_options != plain:
        raise InputError("expected --model with options of your own weights, found them alone; add --model NAME")
    small = sorted(vits_on_disk(), key=lambda name: Path(name.weights or "").stat().st_size)
    if small:
        return small[0], f"takes {small[0].name}, the smallest of timm's ViTs whose weights are on this disk; {ANOTHER}"

    def begins(address: str) -> None:
        words = f"downloads DeiT-tiny, a ViT of ImageNet's 1000 classes ({SMALL_VIT_SIZE} MB from {address}), once"
        _tell(f"{words}; --offline never does", quiet=options.run.quiet)

    try:
        bar = partial(progress, "Downloading DeiT-tiny", unit="MB", quiet=options.run.quiet)
        name = download_small_vit(begins=begins, progress=bar)
    except ModelError as error:
        return parse_model(BUNDLED[0]), (
            f"takes {BUNDLED[0]}, which comes with vitlens and knows only the digits 0 to 9, as no weights of timm's "
            f"ViTs are on this disk and {error}; {ANOTHER}"
        )
    return name, f"takes {name.name}, which it downloaded; {ANOTHER}"


def _tell(line: str, *, quiet: bool) -> None:
    """Print a line on standard error."""
    if not quiet:
        print(for_terminal(line), file=sys.stderr)  # noqa: T201


def given(options: LookOptions, file: Path) -> Path:
    """Show given attention weights on their image, and write the report; returns the report's path.

    Raises InputError unless there is one image and no model, and for weights that cannot be shown.
    """
    run = options.run
    named = (*options.images, *(() if options.image is None else (options.image,)))
    if options.model is not None or options.model_options != ModelOptions():
        raise InputError("expected --attention without a model, whose weights they are; leave out --model")
    if len(named) != 1:
        raise InputError(
            f"expected --attention with the one image of its weights, found {len(named)}; add --image FILE"
        )
    weights = read_attention(file)
    seen = given_attention(weights, prefix=options.prefix, name=GIVEN, option="--prefix")
    pixels = picture_of(named[0])
    title = f"Attention weights in {file.name}"
    with RunFolder.opened("look", run, settings(options, run), name_parts=(GIVEN,), title=title) as folder:
        layers, heads, tokens = weights.shape[:3]
        row = rows.GivenRow(
            file.name,
            Path(named[0]).name,
            layers,
            heads,
            tokens,
            seen.prefix,
            options.prefix is None,
            seen.rows,
            seen.off,
            seen.least,
            seen.most,
        )
        first = seen.means[:, 0] if seen.prefix else seen.means.mean(1)
        folder.keep(
            rows.LookRecord(
                given=(row,),
                given_layers=tuple(_given_layers(seen)),
                explorer=(seen.row,),
                given_maps=rows.GivenArrays(pixels[None], first[:, seen.prefix :].reshape(layers, *seen.row.keys)),
                explorer_arrays={GIVEN: seen.arrays},
            )
        )
        return publish(folder)


def _given_layers(seen: GivenAttention) -> Iterator[rows.GivenLayerRow]:
    """Yield every layer of given weights."""
    side = seen.row.keys[0]
    special = seen.prefix
    places = np.stack(np.divmod(np.arange(side * side), side), 1)
    apart = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1))
    for own, sinks in zip(seen.means, sink_rows(seen.row, seen.arrays)):
        patches = own[special:, special:]
        received = patches.mean(0).reshape(1, side, side)
        yield rows.GivenLayerRow(
            sinks.layer,
            float(map_bits(torch.from_numpy(received))[0]),
            float((patches * apart).sum() / max(float(patches.sum()), 1e-30)),
            sinks.mass,
            float(own[special:, :special].sum(-1).mean()) if special else None,
        )


def given_images(given: Sequence[str], model: Model, run: RunOptions) -> Split:
    """Return the images that can be read, at most --limit or MOST of them, the first ones given.

    What is no image is one line on stderr each. Raises DataError where none is left.
    """
    most = run.limit or MOST
    files: list[Path] = []
    readable: list[str] = []
    faults: list[str] = []
    for path in given:
        try:
            files += list_images([Path(path).expanduser()])
        except DataError as error:
            faults.append(str(error))
    tried = 0
    while len(readable) < most and tried < len(files):
        part = files[tried : tried + most]
        tried += len(part)
        headers = list(zip(part, probe(part)))
        readable += [str(file) for file, header in headers if isinstance(header, Header)]
        faults += [f"{file}: {header}" for file, header in headers if not isinstance(header, Header)]
    if not readable:
        raise DataError(f"expected at least one image, found none: {'; '.join(faults[:3])}")
    split = load_split(model, options=replace(run, limit=None, quiet=True), images=readable[:most])
    faults += [f"{skipped.file}: {skipped.reason}" for skipped in split.skipped]
    more = (f"the first {len(split)} of {len(files)} files",) if tried < len(files) else ()
    lines = [*(f"left out {fault}" for fault in faults), *(f"looks at {each}; --limit N takes more" for each in more)]
    for line in lines:
        _tell(line, quiet=run.quiet)
    return replace(split, notes=(*split.notes, *more))


def _head_rows(seen: Look, names: Sequence[str]) -> Iterator[rows.LookHeadRow]:
    """Yield every head for every image, the head that matters most first."""
    for number, name in enumerate(names):
        for each in seen.heads(number, most=len(seen.places)):
            yield rows.LookHeadRow(
                number,
                each.layer,
                each.head,
                each.delta_loss,
                each.probability,
                None if each.given is None else each.given.label,
                name,
                attends_to(each.given, len(names)),
            )


def _stage_rows(alias: str, seen: Look) -> Iterator[rows.StageRow]:
    """Yield how the model works on these images, by stage; nothing where its heads have no labels."""
    if seen.statistics is None or not any(seen.labels):
        return
    known = seen.statistics.distance
    images = len(seen.names)
    heads = []
    for layer, of_layer in enumerate(seen.labels):
        for head, given in enumerate(of_layer):
            few = _few_places(given, images)
            clear = few or (given.label in LABELS and given.label not in (MIXED, UNLABELLED))
            distance = {"distance": Estimate(float(known[layer, head]))}
            label = FEW_PLACES if few else given.label
            heads.append(Row(layer=layer, label=label, is_clear=clear, statistics=distance))
    far = [value if value > 0 else None for value in seen.statistics.uniform_distance().tolist()]  # NaN is none
    units = [
        Row(kind="head", unit=f"L{layer}.H{head}", layer=layer, loss=Estimate(loss, unit="nats"))
        for (layer, head), loss in zip(seen.places, seen.delta_loss.mean(0).tolist())
    ]
    layers = [Row(layer=layer, uniform_distance=value) for layer, value in enumerate(far)]
    yield from stages(alias, heads, layers, units)


def _few_places(given: HeadLabel, images: int) -> bool:
    """Return True if all that is known of a head is that it attends to a few places."""
    return images == 1 and ({given.best, given.other} if given.label == MIXED else {given.label}) <= PLACED


def attends_to(given: HeadLabel | None, images: int) -> str:
    """Return what a head attends to, in a few words; images: that its label rests on."""
    if given is None:
        return "not labelled"
    if _few_places(given, images):
        return "the same few places for all patches (fixed, or chosen by this image)"
    return head_words(given.label, given.best, given.other or None, given.score)


def print_look(record: rows.LookRecord, console: Console | None = None) -> None:
    """Print what was seen in the first images on standard error, so that stdout stays for the report's path."""
    console = console or Console(stderr=True)
    (row,) = record.look
    for index, name in enumerate(record.names[:SHOWN]):
        console.print(Text(for_terminal(name), style="bold"))
        classes, heads = (Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim") for _ in range(2))
        classes.show_header = False
        predicted = record.predictions[index]
        for label, share in predicted.top_classes:
            bar = Text("█" * round(_BAR * share), style="cyan")
            classes.add_row(Text(f"{100 * share:5.1f} %"), Text(for_terminal(label)), bar)
        console.print(classes)
        for title in ("head", f"without it (with: {100 * predicted.probability_1:.1f} %)", "attends to"):
            heads.add_column(title)
        for each in record.heads_of(index):
            heads.add_row(each.name, f"{100 * each.probability:.1f} %", Text(each.attends or ""))
        console.print(heads if row.heads else Text("no heads to ablate"))
    if len(record.names) > SHOWN:
        console.print(f"the report shows all {len(record.names)} images", markup=False, highlight=False)
    if row.note:
        console.print(Text(row.note), soft_wrap=True)
