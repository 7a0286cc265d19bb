"""The report of `vitlens walkthrough`: a section a step, what happens without a part, and the check of every step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts import Picture, bars, images, scatter, walkthrough
from vitlens.charts.pictures import cut
from vitlens.commands.walkthrough.record import StepRow, WalkthroughRecord
from vitlens.report.claims import Claim, judge, unjudged
from vitlens.report.numbers import percent
from vitlens.report.prose import listed, say
from vitlens.report.sections import Chart, Overview, Report, Section
from vitlens.uncertainty import Estimate

_READ: Final = {"cls": "CLS", "cls+distillation": "CLS and the distillation token", "mean": "the mean of the patches"}


def claims(record: WalkthroughRecord) -> Iterator[Claim]:
    """Yield whether every step equals the model's own, what the head attends to, and which changes change the
    prediction."""
    yield _equal(record)
    row = record.row
    yield Claim(
        "weights",
        row.name,
        say(
            "On **{{ image }}** head **{{ row.name }}**{% if not row.named %}, the one of its layer with the least "
            "entropy,{% endif %} of {{ row.layers }} layers gives {{ row.weight|percent(1) }} of the weight of "
            "{{ row.query_name }} to {{ row.key_name }}, {{ row.times_uniform|number }} times that of uniform "
            "attention.",
            row=row,
            image=PurePath(row.image).name,
        ),
        kind="answer",
        place="row",
    )
    own, *others = record.answers
    if own.prediction is not None and others:
        changed = [each for each in others if each.prediction != own.prediction]
        yield Claim(
            "changes",
            record.aliases[0],
            say(
                "The prediction is **{{ own.prediction }}** ({{ own.probability|percent(1) }}); {{ changed|length }} "
                "of {{ others|length }} changes of the model change it{% if changed %}: {{ said }}{% endif %}.",
                own=own,
                others=others,
                changed=changed,
                said=listed([say("{{ c.change }} ({{ c.prediction }})", c=each) for each in changed]),
            ),
            kind="answer",
            evidence="intervened",
            place="answers",
        )


def _equal(record: WalkthroughRecord) -> Claim:
    """Return the verdict on the steps, by the one that differs most."""
    alias = record.aliases[0]
    name = record.row.name
    known = _by_difference([row for row in record.steps if row.relative is not None])
    if not known:
        because = "no step could be computed again"
        claim = unjudged("steps", alias, because, limit="steps")
    else:
        effect = Estimate(known[0].relative or 0.0, unit="of the largest value")
        because = f"the largest of {len(known)} steps computed again by hand"
        claim = judge("steps", alias, effect, "steps", because=because)
    given = {
        "name": name,
        "c": claim,
        "equal": claim.state == "pass",
        "known": known,
        "step": known[0].step if known else "",
        "left": len(record.steps) - len(known),
    }
    return replace(
        claim,
        kind="answer",
        title=say(
            "Head {{ name }} of {{ c.subject }}{% if equal %}: all steps equal the model's own numbers"
            "{% elif known %}: a step is not the model's own{% else %}, step by step{% endif %}",
            **given,
        ),
        says=say(
            "{{ known|length }} steps of head {{ name }} were computed again by hand{% if known %}, and "
            "{{ 'each' if equal else 'not each' }} equals the model's own numbers: the largest difference is "
            "{{ c.effect }} ({{ step }}){% endif %}{% if left %}; {{ left }} could not be computed{% endif %}.",
            **given,
        ),
    )


def _by_difference(rows: Sequence[StepRow]) -> list[StepRow]:
    return sorted(rows, key=lambda row: -1.0 if row.relative is None else -row.relative)


def unknown(_: WalkthroughRecord) -> Iterator[str]:
    """Yield what one head on one image does not show."""
    yield "What this head does on other images: `vitlens stats` measures all heads on many."
    yield "Whether the prediction depends on what the head attends to: `vitlens ablate` tests it."
    yield "How a model trained without positions, scaling or CLS would do: here a trained model loses them."


def _positions(record: WalkthroughRecord) -> str:
    return say(
        "{% if check.difference is none or check.note %}Before the first block no fixed vector of its place is added "
        "to a patch ({{ check.note|whole }}).{% else %}To the vector of each patch a vector of its place is added, the "
        "same for every image.{% endif %} {{ row.tokens }} tokens of {{ row.dim }} numbers enter each block: "
        "{% for name in row.prefix %}{{ name }}, {% endfor %}{{ row.patches }} patches.",
        row=record.row,
        check=next(each for each in record.steps if each.step == "positions"),
    )


def _without_scaling(record: WalkthroughRecord) -> str:
    rows = record.entropies
    return say(
        "With scores that are not scaled, {{ lower|length }} of {{ rows|length }} heads have less entropy on this "
        "image: {{ unscaled|number }} nats in the place of {{ scaled|number }}, mean of the heads. A softmax near "
        "its ends hardly has a gradient (Vaswani et al. 2017).",
        rows=rows,
        lower=[each for each in rows if each.unscaled < each.scaled],
        scaled=float(np.mean([each.scaled for each in rows])),
        unscaled=float(np.mean([each.unscaled for each in rows])),
    )


def _pixels(record: Any) -> NDArray[np.floating]:
    """Return the image (3, height, width) in [0, 1]."""
    return np.asarray(record.head.pixels[0] / np.float32(255))


def _embedding(record: Any, title: str) -> Figure:
    """Return the patch that the query attends to most, filters, and the embedding both ways."""
    arrays = record.embedding
    row = record.row
    (tall, wide), (down, across) = row.patch_size, divmod(row.key - len(row.prefix), row.grid[1])
    patch = _pixels(record)[:, down * tall : (down + 1) * tall, across * wide : (across + 1) * wide]
    return walkthrough.patch_embedding(
        patch=patch,
        filters=arrays.filters,
        responses=arrays.responses.tolist(),
        numbers=arrays.numbers.tolist(),
        embedded=arrays.embedded,
        convolved=arrays.convolved,
        title=title,
    )


def _vectors(record: Any, title: str) -> Figure:
    panels = [(name, getattr(record.head, name)) for name in ("queries", "keys", "values")]
    return walkthrough.token_vectors(panels, [record.row.query, record.row.key, None], record.row.prefix, title)


def _row(record: Any, title: str) -> Figure:
    """Weights of all pairs, and the row of the query over the image."""
    row = record.row
    return walkthrough.weights_with_row(record.head.weights, row.query, _pixels(record), row.grid, row.prefix, title)


def _weights(record: Any, title: str) -> Figure:
    return walkthrough.head_matrices(record.head.scores, record.head.weights, record.row.prefix, title)


def _values(record: Any, title: str) -> Figure:
    weights = record.head.weights[record.row.query]
    values = record.head.values
    return walkthrough.weighted_values(weights, values, weights @ values, title)


def in_order(picture: NDArray[np.floating], order: Sequence[int], grid: tuple[int, int]) -> NDArray[np.floating]:
    """Return an image (3, height, width) with its patches in another order; pixels that the patches do not cover are
    cut."""
    height = picture.shape[1] // grid[0]
    width = picture.shape[2] // grid[1]
    covered = picture[:, : grid[0] * height, : grid[1] * width]
    patches = covered.reshape(3, grid[0], height, grid[1], width).transpose(1, 3, 0, 2, 4).reshape(-1, 3, height, width)
    moved = patches[np.asarray(order)].reshape(*grid, 3, height, width)
    return np.asarray(moved.transpose(2, 0, 3, 1, 4).reshape(covered.shape))


def _permuted(record: Any) -> list[Picture]:
    """Return the image and its patches in another order, with the predictions."""
    own = _pixels(record)
    moved = record.head.order.tolist()
    pictures = (
        ("the image", own, record.answers[0]),
        ("in another order", in_order(own, moved, record.row.grid), record.permutations[0]),
    )
    return [
        Picture(
            pixels,
            below=name if row.prediction is None else f"{name}\n{row.prediction} ({percent(row.probability, 1)})",
        )
        for name, pixels, row in pictures
    ]


REPORT: Final = Report(
    WalkthroughRecord,
    claims=claims,
    unknown=unknown,
    picture=Chart(
        "row",
        _row,
        "Weights of all pairs of tokens; the outlined row, of {{ record.row.query_name }}, is shown over the image at "
        "the right (patches only).",
        "{{ record.row.name }}: the weights of {{ record.row.query_name }}",
        whole=True,
    ),
    glance=Overview(lambda record: _by_difference(record.steps), ("step", "formula", "relative", "note")),
    sections=(
        Section(
            "How is the image cut into patches?",
            "walk",
            step=True,
            says="The image of {{ image_size[0] }}×{{ image_size[1] }} px is cut into {{ grid[0] }}×{{ grid[1] }} "
            "patches of {{ patch_size[0] }}×{{ patch_size[1] }} px, row by row. Each is {{ patch_values }} numbers, "
            "normalised as in the training.",
            charts=(
                Chart(
                    "patches",
                    images(largest=3.4),
                    "The image, and the patches into which it is cut.",
                    "Patches",
                    rows=lambda record: (
                        [
                            Picture(_pixels(record), below="image"),
                            Picture(cut(_pixels(record), record.row.patch_size), below="patches"),
                        ]
                        if np.array_equal(np.multiply(record.row.grid, record.row.patch_size), record.row.image_size)
                        else []
                    ),
                ),
            ),
        ),
        Section(
            "How does a patch become a vector?",
            lambda record: record.walk if record.embedding is not None else (),
            step=True,
            says="Each patch is multiplied by {{ dim }} filters of {{ patch_values }} weights, which makes it a vector "
            "of {{ dim }} numbers. The model computes this as a convolution.",
            charts=(
                Chart(
                    "embedding",
                    _embedding,
                    "One patch, the filters that respond to it most (grey is zero) with their responses, and the "
                    "numbers of all patches both ways.",
                    "Patch embedding of {{ record.row.key_name }}",
                    whole=True,
                ),
            ),
        ),
        Section("How does the model know where a patch is?", "walk", step=True, opening=_positions),
        Section(
            "What are queries, keys and values?",
            "walk",
            step=True,
            says="Every token is normalised (layer norm) and multiplied by three matrices of this head: a query (what "
            "it looks for), a key (what it is found by) and a value (what it hands on), {{ head_dim }} numbers each.",
            charts=(
                Chart(
                    "queries_keys",
                    _vectors,
                    "Queries, keys and values of all tokens; outlined: the query of {{ record.row.query_name }}, and "
                    "the key to which it attends most.",
                    "{{ record.row.name }}: queries, keys and values",
                    whole=True,
                ),
            ),
        ),
        Section(
            "When is a score large?",
            "walk",
            step=True,
            says="A query and a key are multiplied number by number and added up: {{ head_dim }} products make one "
            "score, large where both point the same way. For {{ query_name }} and {{ key_name }} it is "
            "{{ product|number }}.",
        ),
        Section(
            "Why are scores scaled?",
            "walk",
            step=True,
            says="A sum of {{ head_dim }} products grows with their number, so it is multiplied by {{ scale|number }} "
            "(one over the square root of {{ head_dim }} is {{ expected_scale|number }}): {{ product|number }} becomes "
            "{{ score|number }}. Without this the largest weight of {{ query_name }} would be "
            "{{ unscaled_largest|percent(1) }} in the place of {{ largest|percent(1) }}.",
        ),
        Section(
            "How do scores become weights?",
            "walk",
            step=True,
            says="The scores of a query are exponentiated and divided by their sum: each row of weights is positive "
            "and sums to one. The score {{ score|number }} becomes a weight of {{ weight|percent(1) }}"
            "{% if prefix %}; {{ prefix_mass|percent(1) }} of the row is on the tokens before the patches{% endif %}.",
            charts=(
                Chart(
                    "weights",
                    _weights,
                    "All scores and weights of the head: one row a query, one column a key.",
                    "{{ record.row.name }}: scores and weights of all pairs of tokens",
                    whole=True,
                ),
            ),
        ),
        Section(
            "What does the head move?",
            "walk",
            step=True,
            says="The output of the head for a token is the sum of the values of all {{ tokens }} tokens, each times "
            "its weight. For {{ query_name }} it is a vector of {{ head_dim }} numbers with norm "
            "{{ output_norm|number }}.",
            charts=(
                Chart(
                    "values",
                    _values,
                    "Weights of the followed query (left), the values of all tokens, and below their weighted sum.",
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
            opening="The outputs of all {{ rows|length }} heads are multiplied by one matrix, back to the "
            "{{ record.row.dim }} numbers of the residual stream: a sum of one part a head. For "
            "{{ record.row.query_name }} the largest is that of head {{ first.head }}, of norm "
            "{{ first.norm|number }}; that of {{ record.row.name }} has "
            "{{ record.added[record.row.head].norm|number }}.",
            charts=(
                Chart(
                    "projection",
                    bars("head", "norm"),
                    "Norm of each head's part for the followed token, largest first.",
                    "Layer {{ record.row.layer }}: what the heads add to {{ record.row.query_name }}",
                ),
            ),
        ),
        Section(
            "What leaves the block?",
            "block",
            step=True,
            opening="What attention and then the MLP compute is added to what entered the block, the residual stream. "
            "At {{ record.row.query_name }} a vector of norm {{ rows[0].norm|number }} enters, and one of "
            "{{ rows[-1].norm|number }} leaves.",
        ),
        Section(
            "What happens without scaling?",
            "entropies",
            step=True,
            opening=_without_scaling,
            charts=(
                Chart(
                    "without_scaling",
                    scatter("scaled", "unscaled"),
                    "Entropy of every head on this image, mean over its queries. Below the dashed line it is less "
                    "without scaling.",
                    "Entropy of every head, with and without scaling",
                ),
            ),
        ),
        Section(
            "What happens without positions?",
            "permutations",
            step=True,
            opening="In another order the same {{ record.row.patches }} patches give the same outputs in that order "
            "up to a difference of {{ first.difference|number }} with positions, of {{ rows[1].difference|number }} "
            "without, where the largest value is {{ first.largest|number }}: {% if first.equivariant %}this model "
            "hardly knows where a patch is{% elif rows[1].equivariant %}without them it does not know where a patch is"
            "{% else %}it has positions in its attention, too (rotary positions or a bias){% endif %}.",
            charts=(
                Chart(
                    "without_positions",
                    images(),
                    "The image and its patches in another order, with the predictions of the model with its positions.",
                    "The same patches in another order",
                    rows=_permuted,
                ),
            ),
        ),
        Section(
            "Which token is read?",
            "answers",
            step=True,
            opening=lambda record: say(
                "The classifier reads {{ read }} after the last block.",
                read=_READ.get(record.row.readout, "the tokens through attention pooling"),
            ),
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
