"""The report of `vitlens walkthrough`: a section for each step, the check of all steps, and the
changed models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Final, TypeAlias

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts import Picture, bars, images, scatter, walkthrough
from vitlens.charts.pictures import cut
from vitlens.commands.walkthrough.record import (
    AnswerRow,
    PermutationRow,
    StepRow,
    WalkthroughRecord,
)
from vitlens.report.claims import Claim, judge, unjudged
from vitlens.report.numbers import percent
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Overview, Report, Section
from vitlens.uncertainty import Estimate

Image: TypeAlias = NDArray[np.floating]  # (3, height, width)
# what a classifier reads, by `WalkRow.readout`
_READOUTS: Final = {
    "cls": "CLS",
    "cls+distillation": "CLS and the distillation token",
    "mean": "the mean of the patches",
}


def claims(record: WalkthroughRecord) -> Iterator[Claim]:
    """Yield whether all steps equal the model's, where the head attends, and which changes alter
    the prediction.
    """
    yield _steps_claim(record)
    row = record.row
    yield Claim(
        "weights",
        row.name,
        say(
            "On **{{ image }}**, head **{{ row.name }}** gives {{ row.weight|percent(1) }} of "
            "the weight of {{ row.query_name }} to {{ row.key_name }}. That is "
            "{{ row.times_uniform|number }} times the weight of uniform "
            "attention.{% if not row.named %} The head has the lowest entropy of its "
            "layer.{% endif %}",
            row=row,
            image=PurePath(row.image).name,
        ),
        kind="answer",
        place="row",
    )
    unchanged, *changed = record.answers  # the first row is the unchanged model
    if unchanged.prediction is not None and changed:
        yield _changes_claim(record.aliases[0], unchanged, changed)


def _changes_claim(alias: str, unchanged: AnswerRow, changed: Sequence[AnswerRow]) -> Claim:
    """Return how many changes of the model alter its prediction, and to which class."""
    altered = [row for row in changed if row.prediction != unchanged.prediction]
    predictions = [say("{{ row.change }} ({{ row.prediction }})", row=row) for row in altered]
    return Claim(
        "changes",
        alias,
        say(
            "The prediction is **{{ row.prediction }}** ({{ row.probability|percent(1) }}). "
            "{{ altered|length }} of {{ changed|length }} changes to the model alter "
            "it{% if altered %}: {{ predictions }}{% endif %}.",
            row=unchanged,
            changed=changed,
            altered=altered,
            predictions=listed(predictions),
        ),
        kind="answer",
        evidence="intervened",
        place="answers",
    )


def _steps_claim(record: WalkthroughRecord) -> Claim:
    """Return the verdict on the steps, by the largest difference."""
    alias = record.aliases[0]
    # the largest difference first
    computed = [row for row in _by_difference(record.steps) if row.relative is not None]
    if not computed:
        claim = unjudged("steps", alias, "no step could be computed again", limit="steps")
    else:
        largest = computed[0].relative
        assert largest is not None  # of a step that was computed
        effect = Estimate(largest, unit="of the largest value")
        because = f"the largest of {len(computed)} steps computed again by hand"
        claim = judge("steps", alias, effect, "steps", because=because)
    values = {
        "name": record.row.name,
        "claim": claim,
        "equal": claim.state == "pass",
        "n": len(computed),
        "step": computed[0].step if computed else "",
        "missing": len(record.steps) - len(computed),
    }
    title = say(
        "Head {{ name }} of {{ claim.subject }}{% if equal %}: all steps match the model's "
        "computation{% elif n %}: a step differs from the model's computation{% else %}, step by "
        "step{% endif %}",
        **values,
    )
    says = say(
        "{{ n }} steps of head {{ name }} were computed again by hand{% if n %}, and "
        "{% if equal %}all match{% else %}not all match{% endif %} the model's computation: the "
        "largest difference is {{ claim.effect }} ({{ step }}){% endif %}.{% if missing %} "
        "{{ missing }} step{{ missing|s }} could not be computed.{% endif %}",
        **values,
    )
    return replace(claim, kind="answer", title=title, says=says)


def _by_difference(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the steps: those that were not computed, then the largest difference first."""

    def rank(row: StepRow) -> float:
        # a share of the largest value: 1 is far above that of any step that was computed correctly
        return 1.0 if row.relative is None else row.relative

    return sorted(rows, key=rank, reverse=True)


def unknown(_: WalkthroughRecord) -> Iterator[str]:
    """Yield what one head on one image does not show."""
    yield "This is one image. `vitlens stats` measures all heads on many images."
    yield (
        "It does not show whether the prediction depends on the patches attended to; `vitlens "
        "ablate` tests that."
    )
    yield (
        "A trained model loses positions, scaling or CLS here; a model trained without them may "
        "behave differently."
    )


def _on_positions(record: WalkthroughRecord) -> str:
    (check,) = [row for row in record.steps if row.step == "positions"]
    return say(
        "{% if check.difference is none or check.note %}No fixed position embedding is added to "
        "the patches before the first block ({{ check.note|whole }}).{% else %}A position "
        "embedding is added to each patch; it depends on the place of the patch and is the same "
        "for every image.{% endif %} {{ row.tokens }} tokens of {{ row.dim }} numbers enter each "
        "block: {% for name in row.prefix %}{{ name }}, {% endfor %}{{ row.patches }} patches.",
        row=record.row,
        check=check,
    )


def _on_scaling(record: WalkthroughRecord) -> str:
    rows = record.entropies
    return say(
        "Without scaling, {{ lower }} of {{ n }} heads have a lower entropy on this image; the "
        "mean over heads is {{ unscaled|number }} nats instead of {{ scaled|number }}. A "
        "saturated softmax has almost no gradient (Vaswani et al. 2017).",
        n=len(rows),
        lower=sum(row.unscaled < row.scaled for row in rows),
        scaled=float(np.mean([row.scaled for row in rows])),
        unscaled=float(np.mean([row.unscaled for row in rows])),
    )


def _on_readout(record: WalkthroughRecord) -> str:
    tokens = _READOUTS.get(record.row.readout, "the tokens through attention pooling")
    return say("The classifier reads {{ tokens }} after the last block.", tokens=tokens)


def _pixels(record: Any) -> Image:
    """Return the image (3, height, width) in [0, 1]."""
    return np.asarray(record.head.pixels[0] / np.float32(255))


# Charts call the functions below with the record, which then has all arrays.
def _patch_pictures(record: Any) -> list[Picture]:
    """Return the image and its patches; none if the patches do not cover the image."""
    row = record.row
    covered = np.multiply(row.grid, row.patch_size)  # (height, width)
    if not np.array_equal(covered, row.image_size):
        return []
    pixels = _pixels(record)
    return [Picture(pixels, below="image"), Picture(cut(pixels, row.patch_size), below="patches")]


def _embedding_figure(record: Any, title: str) -> Figure:
    """Draw the patch to which the query attends most, filters, and the embedding computed both
    ways.
    """
    arrays = record.embedding
    row = record.row
    height, width = row.patch_size
    patch_row, patch_column = divmod(row.key - len(row.prefix), row.grid[1])
    top = patch_row * height
    left = patch_column * width
    return walkthrough.patch_embedding(
        patch=_pixels(record)[:, top : top + height, left : left + width],
        filters=arrays.filters,
        responses=arrays.responses.tolist(),
        numbers=arrays.numbers.tolist(),
        embedded=arrays.embedded,
        convolved=arrays.convolved,
        title=title,
    )


def _vectors_figure(record: Any, title: str) -> Figure:
    """Draw queries, keys and values of all tokens."""
    head = record.head
    row = record.row
    panels = [("queries", head.queries), ("keys", head.keys), ("values", head.values)]
    outlined = [row.query, row.key, None]  # the token in each panel
    return walkthrough.token_vectors(panels, outlined, row.prefix, title)


def _row_figure(record: Any, title: str) -> Figure:
    """Draw the weights of all pairs, and the query's row over the image."""
    row = record.row
    return walkthrough.weights_with_row(
        record.head.weights,
        query=row.query,
        image=_pixels(record),
        grid=row.grid,
        prefix=row.prefix,
        title=title,
    )


def _weights_figure(record: Any, title: str) -> Figure:
    return walkthrough.head_matrices(
        record.head.scores, record.head.weights, record.row.prefix, title
    )


def _values_figure(record: Any, title: str) -> Figure:
    weights = record.head.weights[record.row.query]  # (keys,)
    values = record.head.values  # (keys, head_dim)
    output = weights @ values
    return walkthrough.weighted_values(weights, values, output, title)


def in_order(picture: Image, order: Sequence[int], grid: tuple[int, int]) -> Image:
    """Return an image (3, height, width) with its patches in another order, without pixels outside
    the patches.

    order: for each place, row by row, the patch that is moved there.
    """
    rows, columns = grid
    height = picture.shape[1] // rows
    width = picture.shape[2] // columns
    covered = picture[:, : rows * height, : columns * width]
    by_axis = covered.reshape(3, rows, height, columns, width)
    patches = by_axis.transpose(1, 3, 0, 2, 4).reshape(-1, 3, height, width)
    moved = patches[np.asarray(order)].reshape(rows, columns, 3, height, width)
    # back to (3, rows, height, columns, width)
    return np.asarray(moved.transpose(2, 0, 3, 1, 4).reshape(covered.shape))


def _permuted_pictures(record: Any) -> list[Picture]:
    """Return the image and its patches in another order, with the predictions."""
    pixels = _pixels(record)
    permuted = in_order(pixels, record.head.order.tolist(), record.row.grid)
    unchanged = record.answers[0]
    with_positions = record.permutations[0]
    return [
        Picture(pixels, below=_with_prediction("the image", unchanged)),
        Picture(permuted, below=_with_prediction("in another order", with_positions)),
    ]


def _with_prediction(name: str, row: AnswerRow | PermutationRow) -> str:
    if row.prediction is None or row.probability is None:
        return name
    return f"{name}\n{row.prediction} ({percent(row.probability, 1)})"


REPORT: Final = Report(
    WalkthroughRecord,
    claims=claims,
    unknown=unknown,
    picture=Chart(
        "row",
        _row_figure,
        "Weights of all pairs of tokens. The outlined row, of {{ record.row.query_name }}, is "
        "shown over the image on the right (patches only).",
        "{{ record.row.name }}: the weights of {{ record.row.query_name }}",
        whole=True,
    ),
    glance=Overview(
        lambda record: _by_difference(record.steps), ("step", "formula", "relative", "note")
    ),
    sections=(
        Section(
            "How is the image cut into patches?",
            "walk",
            step=True,
            says="The image of {{ image_size[0] }}×{{ image_size[1] }} px is cut into "
            "{{ grid[0] }}×{{ grid[1] }} patches of {{ patch_size[0] }}×{{ patch_size[1] }} px, "
            "row by row. Each patch has {{ patch_values }} numbers, normalised as in training.",
            charts=(
                Chart(
                    "patches",
                    images(largest=3.4),
                    "The image, and the patches into which it is cut.",
                    "Patches",
                    rows=_patch_pictures,
                ),
            ),
        ),
        Section(
            "How does a patch become a vector?",
            lambda record: record.walk if record.embedding is not None else (),
            step=True,
            says="Each patch is multiplied by {{ dim }} filters of {{ patch_values }} weights, "
            "which gives a vector of {{ dim }} numbers. The model computes this as a convolution.",
            charts=(
                Chart(
                    "embedding",
                    _embedding_figure,
                    "One patch, the filters that respond to it most (grey is zero) with their "
                    "responses, and the embedding of all patches, computed both ways.",
                    "Patch embedding of {{ record.row.key_name }}",
                    whole=True,
                ),
            ),
        ),
        Section(
            "How does the model know where a patch is?", "walk", step=True, opening=_on_positions
        ),
        Section(
            "What are queries, keys and values?",
            "walk",
            step=True,
            says="Every token is normalised (layer norm) and multiplied by three matrices of this "
            "head. They give a query (what the token looks for), a key (what it offers) and a "
            "value (what it passes on), with {{ head_dim }} numbers each.",
            charts=(
                Chart(
                    "queries_keys",
                    _vectors_figure,
                    "Queries, keys and values of all tokens. The query of "
                    "{{ record.row.query_name }} and the key to which it attends most are "
                    "outlined.",
                    "{{ record.row.name }}: queries, keys and values",
                    whole=True,
                ),
            ),
        ),
        Section(
            "When is a score large?",
            "walk",
            step=True,
            says="A score is the dot product of a query and a key, a sum of {{ head_dim }} "
            "products. It is large if both point in the same direction. For {{ query_name }} and "
            "{{ key_name }} it is {{ product|number }}.",
        ),
        Section(
            "Why are scores scaled?",
            "walk",
            step=True,
            says="A dot product grows with the number of its terms, so it is multiplied by "
            "{{ scale|number }}; one over the square root of {{ head_dim }} is "
            "{{ expected_scale|number }}. Here {{ product|number }} becomes {{ score|number }}. "
            "Without scaling, the largest weight of {{ query_name }} would be "
            "{{ unscaled_largest|percent(1) }} instead of {{ largest|percent(1) }}.",
        ),
        Section(
            "How do scores become weights?",
            "walk",
            step=True,
            says="The softmax exponentiates the scores of a query and divides them by their sum, "
            "so that each row of weights is positive and sums to one. The score {{ score|number }} "
            "becomes a weight of {{ weight|percent(1) }}{% if prefix %}; "
            "{{ prefix_mass|percent(1) }} of the row is on the tokens before the "
            "patches{% endif %}.",
            charts=(
                Chart(
                    "weights",
                    _weights_figure,
                    "All scores and weights of the head, with a row for each query and a column "
                    "for each key.",
                    "{{ record.row.name }}: scores and weights of all pairs of tokens",
                    whole=True,
                ),
            ),
        ),
        Section(
            "What does the head move?",
            "walk",
            step=True,
            says="The output of the head for a token is the weighted sum of the values of all "
            "{{ tokens }} tokens. For {{ query_name }} it is a vector of {{ head_dim }} numbers "
            "with norm {{ output_norm|number }}.",
            charts=(
                Chart(
                    "values",
                    _values_figure,
                    "Weights of the followed query (left), the values of all tokens, and their "
                    "weighted sum (below).",
                    "{{ record.row.name }}: the output for {{ record.row.query_name }}",
                    whole=True,
                ),
            ),
        ),
        Section(
            "How much does each head add?",
            "added",
            step=True,
            order=lambda row: -row.norm,
            opening="One matrix projects the outputs of all {{ rows|length }} heads back to the "
            "{{ record.row.dim }} numbers of the residual stream, where they are summed. For "
            "{{ record.row.query_name }} the largest part is that of head {{ first.head }}, with "
            "norm {{ first.norm|number }}; the norm of {{ record.row.name }} is "
            "{{ record.added[record.row.head].norm|number }}.",
            charts=(
                Chart(
                    "projection",
                    bars("head", "norm"),
                    "Norm of each head's part for the followed token, largest first.",
                    "Layer {{ record.row.layer }}: what the heads add to "
                    "{{ record.row.query_name }}",
                ),
            ),
        ),
        Section(
            "What leaves the block?",
            "block",
            step=True,
            opening="The outputs of attention and then of the MLP are added to the input of the "
            "block, the residual stream. At {{ record.row.query_name }} a vector of norm "
            "{{ rows[0].norm|number }} enters, and one of norm {{ rows[-1].norm|number }} leaves.",
        ),
        Section(
            "What happens without scaling?",
            "entropies",
            step=True,
            opening=_on_scaling,
            charts=(
                Chart(
                    "without_scaling",
                    scatter("scaled", "unscaled"),
                    "Entropy of every head on this image, mean over queries. Below the dashed "
                    "line, it is lower without scaling.",
                    "Entropy of every head, with and without scaling",
                ),
            ),
        ),
        Section(
            "What happens without positions?",
            "permutations",
            step=True,
            opening="Without positions, permuting the {{ record.row.patches }} patches would only "
            "permute the outputs. The outputs, with a largest value of {{ first.largest|number }}, "
            "differ from that by up to {{ first.difference|number }} with positions and "
            "{{ rows[1].difference|number }} without. {% if first.equivariant %}This model hardly "
            "uses the positions of patches.{% elif rows[1].equivariant %}Without positions, the "
            "model cannot tell where a patch is.{% else %}It also has positions in its attention "
            "(rotary positions or a bias).{% endif %}",
            charts=(
                Chart(
                    "without_positions",
                    images(),
                    "The image, and its patches in another order, with predictions; the model has "
                    "its positions.",
                    "The same patches in another order",
                    rows=_permuted_pictures,
                ),
            ),
        ),
        Section(
            "Which token is read?",
            "answers",
            step=True,
            opening=_on_readout,
            columns=("change", "difference", "prediction", "of_own"),
            charts=(
                Chart(
                    "answers",
                    bars("change", "of_own", words=lambda row: f"predicts {row.prediction}"),
                    "Probability of the unchanged model's class with each change of the model.",
                    "What each change does to the prediction",
                    only=lambda row: row.prediction is not None,
                ),
            ),
        ),
    ),
)
