"""Walks through one head of a model on one image."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.walkthrough.public import CHANGES, Walkthrough, walkthrough
from vitlens.analysis.walkthrough.steps import STEPS
from vitlens.commands.run.progress import phase
from vitlens.commands.run.run import Run
from vitlens.commands.shared.sheets import left_out_words, print_left_out
from vitlens.commands.walkthrough import record as rows
from vitlens.commands.walkthrough.options import WalkthroughOptions
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Logits, TokenLayout

_FILTERS: Final = 6  # filters that are drawn


def measure(options: WalkthroughOptions) -> Path | None:
    """Walk through one head and write the report; returns the report's path, None in all processes but the first.

    Raises UnsupportedError for a model in which not all tokens attend to all tokens, InputError for no image and for a
    layer or head that is not there.
    """
    run = Run("walkthrough", replace(options, run=replace(options.run, limit=None)))
    model = run.model
    split = run.split.limit(1, seed=run.run.seed)
    if options.images:  # the first of them
        count = len(run.split)
        print_left_out(1, count, quiet=run.run.quiet, more="name the one to walk through")
        split = run.split.pick(torch.tensor([0]))
        split = replace(split, notes=(*split.notes, *left_out_words(1, count)))
    run.splits = (split,)
    (batch,) = split.batches(1, device=model.device)
    with phase("Computing the head step by step, and checking each step"):
        walk = walkthrough(model, batch.images, layer=options.layer, head=options.head, seed=run.run.seed)
    with run.folder(f"Head L{walk.layer}.H{walk.head} of") as folder:
        return folder.publish(lambda: _record(model, split, walk, named=options.head is not None))


def _record(model: Model, split: Split, walk: Walkthrough, *, named: bool) -> rows.WalkthroughRecord:
    """Return the steps, what the layer adds, and what happens without a part."""
    parts = {
        "input": walk.input,
        f"part of head {walk.head}": walk.projected,
        "attention": walk.attention,
        "MLP": walk.mlp,
        "output": walk.after,
    }
    entropies = torch.stack([walk.entropies.scaled, walk.entropies.unscaled], -1)
    own = int(walk.logits.argmax())
    return rows.WalkthroughRecord(
        walk=(_walk_row(model, split, walk, named=named),),
        steps=tuple(
            rows.StepRow(
                each.step,
                each.largest,
                each.difference,
                None if each.difference is None else each.difference / max(each.largest, 1e-12),
                STEPS[each.step].formula,
                STEPS[each.step].compared,
                each.note or None,
            )
            for each in walk.checks
        ),
        block=tuple(rows.PartRow(name, float(each[walk.query].norm())) for name, each in parts.items()),
        added=tuple(rows.HeadRow(head, norm) for head, norm in enumerate(walk.head_norms[:, walk.query].tolist())),
        entropies=tuple(
            rows.HeadEntropyRow(layer, head, *entropies[layer, head].tolist())
            for layer, head in entropies[..., 0].isfinite().nonzero().tolist()
        ),
        permutations=tuple(
            rows.PermutationRow(
                each.positions, each.difference, each.logits, each.largest, *_answer(model, each.permuted)
            )
            for each in walk.permutations
        ),
        answers=tuple(
            rows.AnswerRow(
                CHANGES[each.change],
                each.difference,
                *_answer(model, each.logits),
                float(each.logits.softmax(-1)[0, own]) if model.has_classifier else None,
            )
            for each in walk.changed
        ),
        head=rows.HeadArrays(
            split.source.read(torch.arange(1)).numpy(),
            walk.order.numpy(),
            *map(_as_array, (walk.queries, walk.keys, walk.values, walk.scores, walk.weights)),
        ),
        embedding=_embedding_arrays(walk, model.layout),
    )


def _walk_row(model: Model, split: Split, walk: Walkthrough, *, named: bool) -> rows.WalkRow:
    layout = model.layout
    row = walk.weights[walk.query]
    head_dim = walk.queries.shape[-1]
    return rows.WalkRow(
        image=split.files[0] if split.files else f"an image of {split.name}",
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
        head_dim=head_dim,
        query=walk.query,
        key=walk.key,
        query_name=_token(layout, walk.query),
        key_name=_token(layout, walk.key),
        scale=walk.scale,
        expected_scale=head_dim**-0.5,
        product=float(walk.products[walk.query, walk.key]),
        score=float(walk.scores[walk.query, walk.key]),
        weight=float(row[walk.key]),
        times_uniform=float(row[walk.key]) * len(row),
        largest=float(row.max()),
        unscaled_largest=float(walk.unscaled[walk.query].max()),
        prefix_mass=float(row[: len(layout.prefix)].sum()),
        output_norm=float(walk.outputs[walk.query].norm()),
    )


def _token(layout: TokenLayout, position: int) -> str:
    """Return a token in words."""
    if position < len(layout.prefix):
        kind = layout.prefix[position]
        return "CLS" if kind == "cls" else f"the {kind} token"
    row, column = divmod(position - len(layout.prefix), layout.grid[1])
    return f"the patch in row {row}, column {column}"


def _answer(model: Model, logits: Logits) -> tuple[str | None, float | None]:
    """Return the predicted class and its probability; None without a classifier."""
    if not model.has_classifier:
        return None, None
    probability, index = logits.softmax(-1)[0].max(-1)
    return model.classes[int(index)], float(probability)


def _embedding_arrays(walk: Walkthrough, layout: TokenLayout) -> rows.EmbeddingArrays | None:
    if walk.embedding is None:
        return None
    response = walk.embedding.convolved[0, walk.key - len(layout.prefix)]
    strongest = response.abs().topk(min(_FILTERS, len(response))).indices
    return rows.EmbeddingArrays(
        _as_array(walk.embedding.embedded[0]),
        _as_array(walk.embedding.convolved[0]),
        _as_array(walk.embedding.filters[strongest].unflatten(-1, (3, *layout.patch_size))),
        _as_array(response[strongest]),
        strongest.cpu().numpy(),
    )


def _as_array(values: Tensor) -> NDArray[np.float32]:
    """Return a tensor on any device as the float32 array that is stored."""
    return np.asarray(values.detach().float().cpu().numpy())
