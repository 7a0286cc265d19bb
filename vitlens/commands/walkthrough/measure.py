"""Walks through one head of a model on one image, and trains the two layers of the sequence-reversal check."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.walkthrough.public import Walkthrough, walkthrough
from vitlens.analysis.walkthrough.reversal import FLOOR, LENGTH, reversal
from vitlens.analysis.walkthrough.reversal import STEPS as REVERSAL_STEPS
from vitlens.analysis.walkthrough.without import entropy
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.publish import publish
from vitlens.commands.scaffold.sheets import left_out_words, print_left_out
from vitlens.commands.walkthrough.options import WalkthroughOptions
from vitlens.commands.walkthrough.record import (
    ANSWERS,
    EMBEDDING,
    ENTROPIES,
    ENTROPY,
    HEAD,
    NUMBERS,
    PERMUTATIONS,
    REVERSAL,
    REVERSED,
    STEPS,
    WALK,
    AnswerRow,
    EmbeddingArrays,
    EntropyRow,
    HeadArrays,
    HeadEntropyRow,
    NumbersRow,
    PermutationRow,
    ReversalArrays,
    ReversalRow,
    StepRow,
    WalkRow,
)
from vitlens.data.split import Split
from vitlens.devices import one_thread
from vitlens.layout import TokenLayout
from vitlens.models.model import Model
from vitlens.shapes import Logits

_FILTERS: Final = 6  # filters that are drawn


def measure(options: WalkthroughOptions) -> Path:
    """Walk through one head and write the report; returns the report's path.

    Raises UnsupportedError for a model in which not all tokens attend to all tokens, InputError for no image and for a
    layer or head that is not there.
    """
    run = options.run
    (model,) = load_models((options.model,), command="walkthrough", model_options=options.model_options, options=run)
    split = _one_image(model, options)
    (batch,) = split.batches(1, device=model.device)
    walk = walkthrough(model, batch.images, layer=options.layer, head=options.head, seed=run.seed)
    image = split.files[0] if split.files else f"{split.name} {int(batch.indices[0])}"
    with RunFolder.create(
        "walkthrough",
        name_parts=(model.alias, Path(image).stem),
        title=f"{model.alias} step by step: head L{walk.layer}.H{walk.head}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=(model,), split=split),
        formats=run.formats,
    ) as folder:
        _write_walk(folder, model, split, walk, image, named=options.head is not None)
        _write_arrays(folder, split, walk, model.layout.patch_size)
        _write_without(folder, model, walk)
        _write_reversal(folder, run.seed)
        return publish(folder)


def _one_image(model: Model, options: WalkthroughOptions) -> Split:
    """The first of --images, or one of --data."""
    run: RunOptions = options.run
    found = load_split(model, options=replace(run, limit=None), data=options.data, images=options.images)
    split = found.pick(torch.tensor([0])) if options.images else found.limit(1, seed=run.seed)
    print_left_out(1, len(found) if options.images else 1, quiet=run.quiet, more="name the one to walk through")
    return replace(split, notes=(*split.notes, *(left_out_words(1, len(found)) if options.images else ())))


def _write_walk(folder: RunFolder, model: Model, split: Split, walk: Walkthrough, image: str, *, named: bool) -> None:
    layout, (height, width) = model.layout, split.size
    pixels = layout.patch_size[0] * layout.patch_size[1]
    row = WalkRow(
        image=image,
        layer=walk.layer,
        head=walk.head,
        layers=walk.layers,
        heads=walk.heads,
        named=named,
        grid=layout.grid,
        patch_size=layout.patch_size,
        image_size=(height, width),
        patches=layout.patches,
        patch_pixels=pixels,
        patch_values=3 * pixels,
        tokens=layout.tokens,
        prefix=layout.prefix,
        readout=model.anatomy.readout or "",
        dim=walk.input.shape[-1],
        head_dim=walk.queries.shape[-1],
        query=walk.query,
        key=walk.key,
        query_name=_token(layout, walk.query),
        key_name=_token(layout, walk.key),
    )
    folder.write(WALK, [row])
    folder.write(NUMBERS, [_numbers(walk, len(layout.prefix))])
    folder.write(STEPS, [StepRow(each.step, each.difference, each.largest, each.note) for each in walk.checks])


def _token(layout: TokenLayout, position: int) -> str:
    """A token in words."""
    if position < len(layout.prefix):
        kind = layout.prefix[position]
        return "CLS" if kind == "cls" else f"the {kind} token"
    row, column = divmod(position - len(layout.prefix), layout.grid[1])
    return f"the patch in row {row}, column {column}"


def _numbers(walk: Walkthrough, prefix: int) -> NumbersRow:
    query, key = walk.query, walk.key
    row, unscaled, tokens = walk.weights[query], walk.unscaled[query], len(walk.weights)
    norms = walk.head_norms[:, query]
    return NumbersRow(
        scale=walk.scale,
        expected_scale=walk.queries.shape[-1] ** -0.5,
        product=float(walk.products[query, key]),
        score=float(walk.scores[query, key]),
        weight=float(row[key]),
        times_uniform=float(row[key]) * tokens,
        products_deviation=float(walk.products.std()),
        scores_deviation=float(walk.scores[walk.scores.isfinite()].std()),
        largest=float(row.max()),
        unscaled_largest=float(unscaled.max()),
        entropy=float(entropy(row)),
        unscaled_entropy=float(entropy(unscaled)),
        uniform_entropy=math.log(tokens),
        prefix_mass=float(row[:prefix].sum()),
        output_norm=float(walk.outputs[query].norm()),
        part_norm=float(walk.projected[query].norm()),
        input_norm=float(walk.input[query].norm()),
        attention_norm=float(walk.attention[query].norm()),
        mlp_norm=float(walk.mlp[query].norm()),
        after_norm=float(walk.after[query].norm()),
        widest=int(norms.argmax()),
        widest_norm=float(norms.max()),
    )


def _write_arrays(folder: RunFolder, split: Split, walk: Walkthrough, patch_size: tuple[int, int]) -> None:
    pixels = split.source.read(torch.arange(1)).numpy()
    names = ("input", "queries", "keys", "values", "products", "scores", "weights", "unscaled", "outputs", "projected")
    steps = {name: _as_array(getattr(walk, name)) for name in (*names, "head_norms")}
    folder.save(HEAD, HeadArrays(pixels, walk.order.numpy(), **steps))
    if walk.embedding is None:
        return
    patch = walk.key - (len(walk.weights) - len(walk.order))
    response = walk.embedding.convolved[0, patch]
    strongest = response.abs().topk(min(_FILTERS, len(response))).indices
    filters = walk.embedding.filters[strongest].unflatten(-1, (3, *patch_size))
    folder.save(
        EMBEDDING,
        EmbeddingArrays(
            _as_array(walk.embedding.embedded[0]),
            _as_array(walk.embedding.convolved[0]),
            _as_array(filters),
            _as_array(response[strongest]),
            strongest.cpu().numpy(),
            None if walk.positions is None else _as_array(walk.positions[patch]),
        ),
    )


def _write_without(folder: RunFolder, model: Model, walk: Walkthrough) -> None:
    """Write what happens without scaling, positions and CLS."""
    found = walk.entropies
    heads = [
        HeadEntropyRow(layer, head, float(found.scaled[layer, head]), float(found.unscaled[layer, head]))
        for layer, head in np.ndindex(*found.scaled.shape)
        if bool(found.scaled[layer, head].isfinite())
    ]
    folder.write(ENTROPIES, heads)
    folder.write(ENTROPY, [_entropy(heads)] if heads else [])
    rows = [
        PermutationRow(each.positions, each.difference, each.logits, each.largest, *_answer(model, each.permuted))
        for each in walk.permutations
    ]
    folder.write(PERMUTATIONS, rows)
    folder.write(ANSWERS, list(_answers(model, walk)))


def _entropy(heads: Sequence[HeadEntropyRow]) -> EntropyRow:
    scaled, unscaled = (float(np.mean([getattr(each, name) for each in heads])) for name in ("scaled", "unscaled"))
    lower = sum(each.unscaled < each.scaled for each in heads)
    return EntropyRow(len(heads), lower, scaled, unscaled, math.exp(scaled), math.exp(unscaled))


def _answers(model: Model, walk: Walkthrough) -> Iterator[AnswerRow]:
    own = int(walk.logits.argmax())
    for each in walk.changed:
        share = float(each.logits.softmax(-1)[0, own]) if model.has_classifier else None
        yield AnswerRow(each.change, each.difference, *_answer(model, each.logits), share)


def _answer(model: Model, logits: Logits) -> tuple[str | None, float | None]:
    """The predicted class and its probability; None without a classifier."""
    if not model.has_classifier:
        return None, None
    probability, index = logits.softmax(-1)[0].max(-1)
    return model.classes[int(index)], float(probability)


def _write_reversal(folder: RunFolder, seed: int) -> None:
    """Train the tiny layers with and without positions; on one thread, as they are small."""
    with one_thread():
        trained = [reversal(positions=positions, seed=seed) for positions in (True, False)]
    folder.write(
        REVERSAL,
        [
            ReversalRow(
                each.positions,
                REVERSAL_STEPS,
                each.loss,
                each.variance,
                FLOOR * each.variance,
                each.anti_diagonal,
                LENGTH,
            )
            for each in trained
        ],
    )
    losses = {index: np.asarray(each.losses, np.float32) for index, each in enumerate(trained)}
    weights = {index: _as_array(each.weights) for index, each in enumerate(trained)}
    folder.save(REVERSED, ReversalArrays(losses, weights))


def _as_array(values: Tensor) -> NDArray[np.float32]:
    """A tensor on any device as the float32 array that is stored."""
    return np.asarray(values.detach().float().cpu().numpy())
