"""Look at photographs: predictions, maps of the first two classes, and the heads that matter."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.heads.registry import LABELS, MIXED, UNLABELLED, head_words
from vitlens.analysis.heads.specialisation import HeadLabel
from vitlens.attribution.look import Look, look
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.look.choice import (
    choose_model,
    find_images,
    print_line,
    readable_images,
    require_model,
)
from vitlens.commands.look.options import LookOptions
from vitlens.commands.look.record import (
    LookArrays,
    LookHeadRow,
    LookRecord,
    LookRow,
    PhraseRow,
    StageRow,
)
from vitlens.commands.look.stages import LabelledHead, stages
from vitlens.commands.look.terminal import print_look
from vitlens.commands.look.weights import look_at_weights
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.load import load_models
from vitlens.commands.run.progress import phase
from vitlens.commands.run.publish import publish, read
from vitlens.commands.shared.explorer_measure import explored
from vitlens.commands.shared.predictions import PredictionRow
from vitlens.commands.shared.sheets import DRAWN, file_names, left_out_words
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.split import Split
from vitlens.devices import autocast, one_thread, resolve_device
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.sources.hub import offline

# labels that one image cannot tell apart: places that are fixed, and that the image chooses
PLACED: Final = frozenset(("position", "sink"))
FEW_PLACES: Final = "few places"  # what heads with one of these labels get instead
_SMALL: Final = 30_000_000  # parameters, below which one thread is fastest on a few images


def measure(options: LookOptions) -> Path:
    """Look at each image, or at attention weights, and write the report; returns the report's path.

    Raises DataError if no image can be read, UnsupportedError for a model without a classifier,
    InputError for weights that cannot be shown.
    """
    run = options.run
    if options.attention is not None:
        return look_at_weights(options, options.attention)
    if options.image is not None or options.prefix is not None:
        raise InputError(
            "expected --attention with --image and --prefix, found none; add --attention FILE.npy"
        )
    if not options.images:
        raise InputError("expected a photograph to look at, found none; e.g. vitlens look cat.jpg")
    # whatever is wrong is refused before a model is downloaded or loaded
    require_model(options)
    resolve_device(run.device)
    image_files = find_images(options.images, run)
    with offline(options.offline):
        name, reason = choose_model(options)
    if reason:
        print_line(reason, quiet=run.quiet)
    # one thread: the passes that check a model are few and small
    with offline(options.offline), one_thread():
        (model,) = load_models(
            (name,), command="look", model_options=options.model_options, options=run
        )
    split = readable_images(image_files, model, run)
    return measured(options, model, split, reason)


def measured(options: LookOptions, model: Model, split: Split, reason: str = "") -> Path:
    """Look at images that are loaded already, and write the report; returns the report's path.

    reason: why the model was chosen, "" if the user named it.
    """
    run = options.run
    split = replace(split, notes=(*split.notes, *left_out_words(DRAWN, len(split))))
    (batch,) = split.batches(len(split), device=model.device)
    with _folder(options, model, split) as folder:
        with _threads(model), autocast(model.device, run.precision):
            with phase("Which heads matter, and where the evidence lies"):
                result = look(model, batch.images, batch_size=run.batch_size, seed=run.seed)
            explorer = explored(model, batch.images[:DRAWN])
        record = _record(model, split, result, reason)
        folder.keep(replace(record, **explorer))
        path = publish(folder)
        if not run.quiet:
            print_look(read(folder.record()))
        return path


def _folder(options: LookOptions, model: Model, split: Split) -> RunFolder:
    """Return the folder of the run, named by the image if there is only one."""
    folder_name = "images"
    subject = f"{len(split)} images"
    if len(split) == 1:
        folder_name = Path(options.images[0]).stem
        subject = Path(split.names[0]).name
    config = settings(options, options.run, models=(model,), split=split)
    return RunFolder.opened(
        "look",
        options.run,
        config,
        name_parts=(model.alias, folder_name),
        title=f"{model.alias} looks at {subject}",
    )


def _threads(model: Model) -> AbstractContextManager[None]:
    """Return a context in which passes use as many threads as are fastest for a few images."""
    return one_thread() if model.parameter_count() < _SMALL else nullcontext()


def _record(model: Model, split: Split, result: Look, reason: str) -> LookRecord:
    row = LookRow(
        chosen=reason,
        digits=model.classes == DIGITS,
        method=result.method,
        title=ATTRIBUTIONS[result.method].title,
        note=result.note,
        images=len(split),
        heads=len(result.places),
        replace=result.replace if result.places else None,
    )
    predictions: list[PredictionRow] = []
    phrases: list[PhraseRow] = []
    if result.similarities is None:
        for image, classes, probabilities in zip(
            split.names, result.names, result.probabilities.tolist()
        ):
            predictions.append(PredictionRow.of(image, classes, probabilities))
    else:
        phrases += _phrase_rows(model, split.names, result)
    return LookRecord(
        look=(row,),
        predictions=tuple(predictions),
        phrases=tuple(phrases),
        heads=tuple(_head_rows(result, file_names(split.names))),
        stages=tuple(_stage_rows(model.alias, result)),
        maps=_arrays(split, result),
    )


def _arrays(split: Split, result: Look) -> LookArrays:
    """Return the images with their maps: of phrases in their order, of classes by probability."""
    pixels = split.source.read(torch.arange(len(split))).numpy()
    maps = result.maps.float()  # (images, classes, rows, columns), by probability
    if result.similarities is not None:
        index = _rank_of_phrase(result)[:, :, None, None].expand_as(maps)
        return LookArrays(pixels, phrases=maps.gather(1, index).numpy())
    runner_up = maps[:, 1].numpy() if maps.shape[1] > 1 else None
    return LookArrays(pixels, prediction=maps[:, 0].numpy(), runner_up=runner_up)


def _rank_of_phrase(result: Look) -> torch.Tensor:
    """Return the rank of each phrase by similarity, (images, phrases).

    It is the inverse of `result.classes`, which holds the index of the phrase of each rank.
    """
    return result.classes.argsort(1)


def _phrase_rows(model: Model, names: Sequence[str], result: Look) -> Iterator[PhraseRow]:
    """Yield the similarity of each image to each phrase, in the order of the phrases."""
    assert result.similarities is not None
    has_probabilities = len(model.classes) > 1
    rank_of_phrase = _rank_of_phrase(result)
    for number, name in enumerate(names):
        for phrase, rank in zip(model.classes, rank_of_phrase[number].tolist()):
            probability = float(result.probabilities[number, rank])
            yield PhraseRow(
                number=number,
                image=name,
                phrase=phrase,
                similarity=float(result.similarities[number, rank]),
                probability=probability if has_probabilities else None,
            )


def _head_rows(result: Look, names: Sequence[str]) -> Iterator[LookHeadRow]:
    """Yield every head for every image, the head that matters most first."""
    for number, name in enumerate(names):
        for effect in result.heads(number, most=len(result.places)):
            label = effect.given
            yield LookHeadRow(
                number=number,
                layer=effect.layer,
                head=effect.head,
                delta_loss=effect.delta_loss,
                probability=effect.probability,
                label=None if label is None else label.label,
                image=name,
                attends=_attends_words(label, image_count=len(names)),
            )


def _stage_rows(alias: str, result: Look) -> Iterator[StageRow]:
    """Yield how the model works on these images, by stage; nothing if its heads have no labels."""
    statistics = result.statistics
    if statistics is None or not any(result.labels):
        return
    heads = []
    for layer, uniform_distance in enumerate(statistics.uniform_distance().tolist()):
        has_distance = uniform_distance > 0  # False for NaN, too
        for head, label in enumerate(result.labels[layer]):  # of each layer, a label for each head
            attends_few_places = _attends_few_places(label, len(result.names))
            follows_one_pattern = label.label in LABELS and label.label not in (MIXED, UNLABELLED)
            labelled = LabelledHead(
                layer=layer,
                label=FEW_PLACES if attends_few_places else label.label,
                is_clear=attends_few_places or follows_one_pattern,
                distance=float(statistics.distance[layer, head]),
                uniform_distance=uniform_distance if has_distance else None,
            )
            heads.append(labelled)
    # result.delta_loss (images, places) has a column for each (layer, head) of result.places
    loss_without = dict(zip(result.places, result.delta_loss.mean(0).tolist()))
    yield from stages(alias, heads, loss_without)


def _attends_few_places(label: HeadLabel, image_count: int) -> bool:
    """Return True if a head attends to the same places of the only image from every patch.

    Such places are fixed, or chosen by the image; one image cannot show which.
    """
    labels = {label.label}
    if label.label == MIXED:
        labels = {label.best, label.other}
    return image_count == 1 and labels <= PLACED


def _attends_words(label: HeadLabel | None, *, image_count: int) -> str:
    """Return in a few words where a head attends.

    image_count: the number of images from which the label was made.
    """
    if label is None:
        return "not labelled"
    if _attends_few_places(label, image_count):
        return "the same few places for all patches (fixed, or chosen by this image)"
    return head_words(label.label, label.best, label.other or None, label.score)
