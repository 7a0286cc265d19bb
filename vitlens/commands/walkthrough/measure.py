"""Walk through one head of a model on one image."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.walkthrough.public import CHANGES, Walkthrough, walkthrough
from vitlens.analysis.walkthrough.steps import STEPS, StepCheck
from vitlens.commands.run.progress import phase
from vitlens.commands.run.run import Run
from vitlens.commands.shared.sheets import print_left_out, unmeasured_words
from vitlens.commands.walkthrough import record as rows
from vitlens.commands.walkthrough.options import WalkthroughOptions
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Logits, TokenLayout

_FILTERS: Final = 6  # filters that are drawn
_SMALLEST: Final = 1e-12  # the smallest divisor of a difference: a step may be all zeros


def measure(options: WalkthroughOptions) -> Path | None:
    """Walk through one head and write the report.

    Returns the report's path, None in all processes but the first. Raises UnsupportedError for
    a model in which not all tokens attend to all tokens, InputError without an image and for a
    layer or head that the model does not have.
    """
    # one image is chosen below, so --limit has nothing to limit
    run = Run("walkthrough", replace(options, run=replace(options.run, limit=None)))
    split = _one_image(run)
    run = run.with_images([split])
    (batch,) = split.batches(1, device=run.model.device)
    with phase("Computing the head step by step, and checking each step"):
        walk = walkthrough(
            run.model,
            batch.images,
            layer=options.layer,
            head=options.head,
            seed=run.run_options.seed,
        )
    with run.folder(f"Head L{walk.layer}.H{walk.head} of") as folder:
        return folder.publish(
            lambda: _record(run.model, split, walk, is_chosen=options.head is not None)
        )


def _one_image(run: Run[WalkthroughOptions]) -> Split:
    """Return the first of the user's images, or one of the data set.

    A note counts the images left out.
    """
    if not run.options.images:
        return run.split.limit(1, seed=run.run_options.seed)
    count = len(run.split)
    left_out = tuple(unmeasured_words(1, count))
    print_left_out(left_out, quiet=run.run_options.quiet, more="name the one to walk through")
    first = run.split.pick(torch.tensor([0]))
    return replace(first, notes=(*first.notes, *left_out))


def _record(
    model: Model, split: Split, walk: Walkthrough, *, is_chosen: bool
) -> rows.WalkthroughRecord:
    """Return the steps, what the layer adds, and the changed models.

    is_chosen: True if the user chose the head.
    """
    head_norms = walk.head_norms[:, walk.query].tolist()
    permutations = []
    for permutation in walk.permutations:
        prediction, probability = _answer(model, permutation.permuted)
        row = rows.PermutationRow(
            positions=permutation.positions,
            difference=permutation.difference,
            logits=permutation.logits,
            largest=permutation.largest,
            prediction=prediction,
            probability=probability,
        )
        permutations.append(row)
    return rows.WalkthroughRecord(
        walk=(_walk_row(model, split, walk, is_chosen=is_chosen),),
        steps=tuple(map(_step_row, walk.checks)),
        block=tuple(_part_rows(walk)),
        added=tuple(rows.HeadRow(head, norm) for head, norm in enumerate(head_norms)),
        entropies=tuple(_entropy_rows(walk)),
        permutations=tuple(permutations),
        answers=tuple(_answer_rows(model, walk)),
        head=_head_arrays(split, walk),
        embedding=_embedding_arrays(walk, model.layout),
    )


def _step_row(check: StepCheck) -> rows.StepRow:
    relative = None
    if check.difference is not None:
        relative = check.difference / max(check.largest, _SMALLEST)
    step = STEPS[check.step]
    return rows.StepRow(
        step=check.step,
        largest=check.largest,
        difference=check.difference,
        relative=relative,
        formula=step.formula,
        compared=step.compared,
        note=check.note or None,
    )


def _part_rows(walk: Walkthrough) -> Iterator[rows.PartRow]:
    """Yield the norms of the vectors of the block at the followed query."""
    vectors = {
        "input": walk.input,
        f"part of head {walk.head}": walk.projected,
        "attention": walk.attention,
        "MLP": walk.mlp,
        "output": walk.after,
    }
    for name, vector in vectors.items():
        yield rows.PartRow(name, float(vector[walk.query].norm()))


def _entropy_rows(walk: Walkthrough) -> Iterator[rows.HeadEntropyRow]:
    scaled = walk.entropies.scaled  # (layers, heads)
    unscaled = walk.entropies.unscaled
    # NaN: a layer without attention, or with fewer heads than others
    for layer, head in scaled.isfinite().nonzero().tolist():
        yield rows.HeadEntropyRow(
            layer, head, float(scaled[layer, head]), float(unscaled[layer, head])
        )


def _answer_rows(model: Model, walk: Walkthrough) -> Iterator[rows.AnswerRow]:
    """Yield the prediction with each change of the model, and the probability of the unchanged
    model's class.
    """
    unchanged_class = int(walk.logits.argmax())
    for changed in walk.changed:
        prediction, probability = _answer(model, changed.logits)
        of_unchanged_class = None
        if model.has_classifier:
            of_unchanged_class = float(changed.logits.softmax(-1)[0, unchanged_class])
        yield rows.AnswerRow(
            CHANGES[changed.change],
            difference=changed.difference,
            prediction=prediction,
            probability=probability,
            of_own=of_unchanged_class,
        )


def _head_arrays(split: Split, walk: Walkthrough) -> rows.HeadArrays:
    return rows.HeadArrays(
        pixels=split.source.read(torch.arange(1)).numpy(),
        order=walk.order.numpy(),
        queries=_as_array(walk.queries),
        keys=_as_array(walk.keys),
        values=_as_array(walk.values),
        scores=_as_array(walk.scores),
        weights=_as_array(walk.weights),
    )


def _walk_row(model: Model, split: Split, walk: Walkthrough, *, is_chosen: bool) -> rows.WalkRow:
    layout = model.layout
    query = walk.query
    key = walk.key
    weights = walk.weights[query]  # (keys,)
    weight = float(weights[key])
    head_dim = walk.queries.shape[-1]
    return rows.WalkRow(
        image=split.files[0] if split.files else f"an image of {split.name}",
        layer=walk.layer,
        head=walk.head,
        layers=walk.layers,
        heads=walk.heads,
        named=is_chosen,
        grid=layout.grid,
        patch_size=layout.patch_size,
        image_size=split.size,
        patches=layout.patches,
        patch_values=3 * layout.patch_size[0] * layout.patch_size[1],  # three colours
        tokens=layout.tokens,
        prefix=layout.prefix,
        readout=model.anatomy.readout or "",
        dim=walk.input.shape[-1],
        head_dim=head_dim,
        query=query,
        key=key,
        query_name=_token_name(layout, query),
        key_name=_token_name(layout, key),
        scale=walk.scale,
        expected_scale=head_dim**-0.5,
        product=float(walk.products[query, key]),
        score=float(walk.scores[query, key]),
        weight=weight,
        times_uniform=weight * len(weights),  # uniform: 1 / keys
        largest=float(weights.max()),
        unscaled_largest=float(walk.unscaled[query].max()),
        prefix_mass=float(weights[: len(layout.prefix)].sum()),
        output_norm=float(walk.outputs[query].norm()),
    )


def _token_name(layout: TokenLayout, token: int) -> str:
    if token < len(layout.prefix):
        name = layout.prefix[token]
        return "CLS" if name == "cls" else f"the {name} token"
    row, column = divmod(token - len(layout.prefix), layout.grid[1])
    return f"the patch in row {row}, column {column}"


def _answer(model: Model, logits: Logits) -> tuple[str | None, float | None]:
    """Return the predicted class and its probability; None without a classifier.

    logits: (1, classes).
    """
    if not model.has_classifier:
        return None, None
    probability, index = logits.softmax(-1)[0].max(-1)
    return model.classes[int(index)], float(probability)


def _embedding_arrays(walk: Walkthrough, layout: TokenLayout) -> rows.EmbeddingArrays | None:
    """Return the patch embedding; None if it was not computed by hand."""
    if walk.embedding is None:
        return None
    # the responses of all filters to the key's patch (dim,), of the only image; the key is never a
    # token of the prefix
    responses = walk.embedding.convolved[0, walk.key - len(layout.prefix)]
    strongest = responses.abs().topk(min(_FILTERS, len(responses))).indices
    # a filter is a row of a matrix (dim, 3 * height * width)
    filters = walk.embedding.filters[strongest].unflatten(-1, (3, *layout.patch_size))
    return rows.EmbeddingArrays(
        embedded=_as_array(walk.embedding.embedded[0]),
        convolved=_as_array(walk.embedding.convolved[0]),
        filters=_as_array(filters),
        responses=_as_array(responses[strongest]),
        numbers=strongest.cpu().numpy(),
    )


def _as_array(values: Tensor) -> NDArray[np.float32]:
    """Return a tensor on any device as a float32 array."""
    return np.asarray(values.detach().float().cpu().numpy())
