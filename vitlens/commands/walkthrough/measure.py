"""Walks through one head of a model on one image, and trains the two layers of the sequence-reversal check."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.walkthrough.public import Walkthrough, walkthrough
from vitlens.analysis.walkthrough.reversal import FLOOR, LENGTH, Reversal, reversal
from vitlens.analysis.walkthrough.reversal import STEPS as REVERSAL_STEPS
from vitlens.analysis.walkthrough.without import entropy
from vitlens.commands.scaffold.run import Run
from vitlens.commands.scaffold.sheets import left_out_words, print_left_out
from vitlens.commands.walkthrough.options import WalkthroughOptions
from vitlens.commands.walkthrough.record import (
    AnswerRow,
    EmbeddingArrays,
    HeadArrays,
    HeadEntropyRow,
    HeadRow,
    PartRow,
    PermutationRow,
    ReversalArrays,
    ReversalRow,
    StepRow,
    WalkRow,
    WalkthroughRecord,
)
from vitlens.data.split import Split
from vitlens.devices import one_thread
from vitlens.layout import TokenLayout
from vitlens.models.model import Model
from vitlens.shapes import Logits

_FILTERS: Final = 6  # filters that are drawn


def measure(options: WalkthroughOptions) -> Path | None:
    """Walk through one head and write the report; returns the report's path, None in all processes but the first.

    Raises UnsupportedError for a model in which not all tokens attend to all tokens, InputError for no image and for a
    layer or head that is not there.
    """
    run = Run("walkthrough", replace(options, run=replace(options.run, limit=None)))
    model, split = run.model, _one_image(run, options)
    run.splits = (split,)
    (batch,) = split.batches(1, device=model.device)
    walk = walkthrough(model, batch.images, layer=options.layer, head=options.head, seed=run.run.seed)
    image = split.files[0] if split.files else f"{split.name} {int(batch.indices[0])}"
    with run.folder(f"Head L{walk.layer}.H{walk.head} of") as folder:
        with one_thread():  # the layers are small
            trained = [reversal(positions=positions, seed=run.run.seed) for positions in (True, False)]
        parts = {"input": walk.input, f"part of head {walk.head}": walk.projected, "attention": walk.attention,
                 "MLP": walk.mlp, "output": walk.after}  # fmt: skip
        return folder.publish(
            lambda: WalkthroughRecord(
                walk=(walk_row(model, split, walk, image, named=options.head is not None),),
                steps=tuple(StepRow(each.step, each.largest, each.note, each.difference) for each in walk.checks),
                block=tuple(PartRow(name, float(each[walk.query].norm())) for name, each in parts.items()),
                added=tuple(HeadRow(head, norm) for head, norm in enumerate(walk.head_norms[:, walk.query].tolist())),
                entropies=tuple(_entropies(walk)),
                permutations=tuple(
                    PermutationRow(each.positions, each.difference, each.logits, each.largest,
                                   *_answer(model, each.permuted))
                    for each in walk.permutations
                ),
                answers=tuple(_answers(model, walk)),
                reversal=tuple(
                    ReversalRow(each.positions, REVERSAL_STEPS, each.loss, FLOOR * each.variance, each.anti_diagonal,
                                LENGTH)
                    for each in trained
                ),
                head=_head_arrays(split, walk),
                embedding=_embedding_arrays(walk, model.layout.patch_size),
                reversed=_reversal_arrays(trained),
            )
        )  # fmt: skip


def _one_image(run: Run[WalkthroughOptions], options: WalkthroughOptions) -> Split:
    """The first of --images, or one of --data."""
    found = run.split
    split = found.pick(torch.tensor([0])) if options.images else found.limit(1, seed=run.run.seed)
    print_left_out(1, len(found) if options.images else 1, quiet=run.run.quiet, more="name the one to walk through")
    return replace(split, notes=(*split.notes, *(left_out_words(1, len(found)) if options.images else ())))


def walk_row(model: Model, split: Split, walk: Walkthrough, image: str, *, named: bool) -> WalkRow:
    """The head and its numbers."""
    layout, query, key = model.layout, walk.query, walk.key
    row, unscaled = walk.weights[query], walk.unscaled[query]
    return WalkRow(
        image=image,
        layer=walk.layer,
        head=walk.head,
        layers=walk.layers,
        heads=walk.heads,
        named=named,
        grid=layout.grid,
        patch_size=layout.patch_size,
        image_size=split.size,
        patches=layout.patches,
        patch_values=3 * layout.patch_size[0] * layout.patch_size[1],
        tokens=layout.tokens,
        prefix=layout.prefix,
        readout=model.anatomy.readout or "",
        dim=walk.input.shape[-1],
        head_dim=walk.queries.shape[-1],
        query=query,
        key=key,
        query_name=_token(layout, query),
        key_name=_token(layout, key),
        scale=walk.scale,
        expected_scale=walk.queries.shape[-1] ** -0.5,
        product=float(walk.products[query, key]),
        score=float(walk.scores[query, key]),
        weight=float(row[key]),
        times_uniform=float(row[key]) * len(row),
        products_deviation=float(walk.products.std()),
        scores_deviation=float(walk.scores[walk.scores.isfinite()].std()),
        largest=float(row.max()),
        unscaled_largest=float(unscaled.max()),
        entropy=float(entropy(row)),
        unscaled_entropy=float(entropy(unscaled)),
        prefix_mass=float(row[: len(layout.prefix)].sum()),
        output_norm=float(walk.outputs[query].norm()),
    )


def _token(layout: TokenLayout, position: int) -> str:
    """A token in words."""
    if position < len(layout.prefix):
        kind = layout.prefix[position]
        return "CLS" if kind == "cls" else f"the {kind} token"
    row, column = divmod(position - len(layout.prefix), layout.grid[1])
    return f"the patch in row {row}, column {column}"


def _entropies(walk: Walkthrough) -> Iterator[HeadEntropyRow]:
    found = walk.entropies
    for layer, head in np.ndindex(*found.scaled.shape):
        if bool(found.scaled[layer, head].isfinite()):
            yield HeadEntropyRow(layer, head, float(found.scaled[layer, head]), float(found.unscaled[layer, head]))


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


def _head_arrays(split: Split, walk: Walkthrough) -> HeadArrays:
    pixels = split.source.read(torch.arange(1)).numpy()
    names = ("queries", "keys", "values", "products", "scores", "weights")
    return HeadArrays(
        pixels,
        walk.order.numpy(),
        **{name: _as_array(getattr(walk, name)) for name in names},
        unscaled=_as_array(walk.unscaled[walk.query]),
        output=_as_array(walk.outputs[walk.query]),
    )


def _embedding_arrays(walk: Walkthrough, patch_size: tuple[int, int]) -> EmbeddingArrays | None:
    if walk.embedding is None:
        return None
    patch = walk.key - (len(walk.weights) - len(walk.order))
    response = walk.embedding.convolved[0, patch]
    strongest = response.abs().topk(min(_FILTERS, len(response))).indices
    return EmbeddingArrays(
        _as_array(walk.embedding.embedded[0]),
        _as_array(walk.embedding.convolved[0]),
        _as_array(walk.embedding.filters[strongest].unflatten(-1, (3, *patch_size))),
        _as_array(response[strongest]),
        strongest.cpu().numpy(),
        None if walk.positions is None else _as_array(walk.positions[patch]),
    )


def _reversal_arrays(trained: list[Reversal]) -> ReversalArrays:
    losses = {index: np.asarray(each.losses, np.float32) for index, each in enumerate(trained)}
    return ReversalArrays(losses, {index: _as_array(each.weights) for index, each in enumerate(trained)})


def _as_array(values: Tensor) -> NDArray[np.float32]:
    """A tensor on any device as the float32 array that is stored."""
    return np.asarray(values.detach().float().cpu().numpy())
