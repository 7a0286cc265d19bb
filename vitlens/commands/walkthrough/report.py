"""The report of `vitlens walkthrough`: a section a step, what happens without a part, and the check of every step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp
from pathlib import PurePath
from typing import Final

import numpy as np
from matplotlib.figure import Figure

from vitlens.analysis.walkthrough.registry import STEPS
from vitlens.charts import bars, images, lines
from vitlens.commands.walkthrough.drawn import (
    by_positions,
    draw_embedding,
    draw_patches,
    draw_positions,
    draw_row,
    draw_scores,
    draw_values,
    draw_vectors,
    draw_weights,
    entropy_rows,
    loss_rows,
    permuted_patches,
    reversed_weights,
    sorted_weights,
    whole_patches,
    with_position,
)
from vitlens.commands.walkthrough.record import (
    AnswerRow,
    StepRow,
    WalkRow,
    WalkthroughRecord,
)
from vitlens.display import protected, visible
from vitlens.record import col
from vitlens.report.claims import Claim, judge
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Overview, Report, Section
from vitlens.uncertainty import Estimate

_WORDS: Final = {  # the changes, as a figure and a table name them
    "none": "as it is",
    "no-positions": "patches without positions",
    "unscaled": "scores not scaled",
    "patches-zero": "last block: patches zero",
    "prefix-zero": "last block: prefix tokens zero",
    "prefix-unread": "patches do not attend to CLS",
    "mean-read": "mean of patches read as CLS",
}
_READ: Final = {"cls": "CLS", "cls+distillation": "CLS and the distillation token", "mean": "the mean of the patches"}


@dataclass(frozen=True)
class CheckRow:
    """A step by hand against the model's own numbers."""

    step: str = col("step")
    formula: str = col("by hand")
    compared: str = col("compared with")
    relative: float | None = col(
        "largest difference", term="by hand minus the model's own, as a share of the largest value of the step"
    )
    note: str | None = col("note")


def worst(record: WalkthroughRecord) -> StepRow | None:
    """The step that differs most from the model's own numbers; None where none was computed again."""
    known = (row for row in record.steps if row.relative is not None)
    return max(known, key=lambda row: row.relative or 0.0, default=None)


def claims(record: WalkthroughRecord) -> Iterator[Claim]:
    """Whether every step equals the model's own, what the head attends to, and which changes change the prediction."""
    yield _equal(record)
    row = record.row
    chosen = "" if row.named else ", the one of its layer with the least entropy,"
    yield Claim(
        "weights", row.name,
        say("On image **{{ image }}** head **{{ row.name }}**{{ chosen }} of {{ row.layers }} layers gives "
            "{{ row.weight|percent(1) }} of the weight of {{ row.query_name }} to {{ row.key_name }}, "
            "{{ row.times_uniform|number }} times that of uniform attention.",
            row=row, chosen=chosen, image=PurePath(row.image).name),
        kind="answer", place="row",
    )  # fmt: skip
    own, *others = record.answers
    if own.prediction is not None and others:
        changed = [each for each in others if each.prediction != own.prediction]
        said = [say("{{ w }} ({{ c.prediction }})", c=each, w=_WORDS.get(each.change, each.change)) for each in changed]
        yield Claim(
            "changes", record.aliases[0],
            say("The prediction is **{{ own.prediction }}** ({{ own.probability|percent(1) }}); {{ changed|length }} "
                "of "
                "{{ others|length }} changes of the model change it{% if changed %}: {{ said }}{% endif %}.",
                own=own, others=others, changed=changed, said=listed(said)),
            kind="answer", evidence="intervened", place="answers",
        )  # fmt: skip


def _equal(record: WalkthroughRecord) -> Claim:
    """The verdict on the steps."""
    (alias,), most = record.aliases, worst(record)
    given = {"name": record.row.name, "alias": alias}
    if most is None or most.relative is None:
        return Claim("steps", alias, state="inconclusive", limit="steps", because="no step could be computed again",
                     title=say("Head {{ name }} of {{ alias }}, step by step", **given), kind="answer",
                     says="No step could be computed again by hand.")  # fmt: skip
    left = [row for row in record.steps if row.relative is None]
    effect = Estimate(most.relative, unit="of the largest value")
    steps = len(record.steps) - len(left)
    claim = judge("steps", alias, effect, "steps", because=f"the largest of {steps} steps computed again by hand")
    equal = claim.state == "pass"
    verb = "each of them equals" if equal else "they are not"
    says = say(
        "{{ n }} steps of head {{ name }} were computed again by hand, and {{ verb }} the model's own numbers: the "
        "largest difference is {{ effect }} ({{ step }}){% if left %}; {{ left|length }} could not be computed{% endif "
        "%}.",
        n=steps, left=left, effect=effect, step=STEPS[most.step].title, verb=verb, **given,
    )  # fmt: skip
    title = "all steps equal the model's own numbers" if equal else "a step is not the model's own"
    return Claim(
        claim.question, claim.subject, says, say("Head {{ name }} of {{ alias }}: {{ title }}", title=title, **given),
        claim.state, effect, limit="steps", kind="answer", because=claim.because,
    )  # fmt: skip


def unknown(_: WalkthroughRecord) -> Iterator[str]:
    """What one head on one image does not show."""
    yield "What this head does on other images: `vitlens stats` measures all heads on many images."
    yield (
        "Whether the prediction depends on what the head attends to: `vitlens ablate` and `vitlens explain --verify` "
        "test it."
    )
    yield (
        "How a model that was trained without positions, scaling or CLS would do: the changes show what the part does "
        "in this trained model."
    )


def _checks(record: WalkthroughRecord) -> list[CheckRow]:
    rows = sorted(record.steps, key=lambda row: -1.0 if row.relative is None else -row.relative)
    return [
        CheckRow(
            STEPS[row.step].title, STEPS[row.step].formula, STEPS[row.step].compared, row.relative, _noted(row) or None
        )
        for row in rows
    ]


def _noted(row: StepRow) -> Marked:
    """A step's note, a sentence of ours that was read from a file."""
    return Marked(protected(visible(row.note)))


def _positions(record: WalkthroughRecord) -> str:
    row, check = record.row, next(each for each in record.steps if each.step == "positions")
    names = dict.fromkeys("CLS" if name == "cls" else f"a {name} token" for name in row.prefix)
    return say(
        "{% if note %}Before the first block no fixed vector of its place is added to a patch ({{ note }}).{% else %}"
        "To the vector of each patch a vector of its place is added, the same for every image.{% endif %} {% if "
        "names %}"
        "With {{ names|join(', ') }} in front{% else %}Without further tokens{% endif %}, {{ row.tokens }} tokens of "
        "{{ row.dim }} numbers enter the first block, and each later one.",
        row=row, names=list(names), note=_noted(check) or ("" if check.difference is not None else "not computed"),
    )  # fmt: skip


def _scaled(row: WalkRow) -> str:
    words = "A sum of {{ head_dim }} products grows with their number, so it is multiplied by {{ scale|number }}"
    if abs(row.scale - row.expected_scale) > 1e-6 * row.expected_scale:
        words += ", this model's own (by the formula it would be {{ expected_scale|number }})"
    else:
        words += ", one over the square root of {{ head_dim }}"
    return words + (
        ": {{ product|number }} becomes {{ score|number }}. Without this the largest weight of {{ query_name }} would "
        "be {{ unscaled_largest|percent(1) }} in the place of {{ largest|percent(1) }}."
    )


def _widest(record: WalkthroughRecord) -> str:
    own, most = record.added[record.row.head], max(record.added, key=lambda each: each.norm)
    return say(
        "The outputs of all {{ row.heads }} heads are multiplied by one matrix, back to the {{ row.dim }} numbers of "
        "the residual stream: a sum of one part a head. For {{ row.query_name }} that of {{ row.name }} has norm "
        "{{ own.norm|number }}, {% if least %}the largest of the layer{% else %}the largest is that of head "
        "{{ most.head }}, {{ most.norm|number }}{% endif %}.",
        row=record.row, own=own, most=most, least=own is most,
    )  # fmt: skip


def _without_scaling(record: WalkthroughRecord) -> str:
    rows = record.entropies
    scaled, unscaled = (float(np.mean([getattr(each, name) for each in rows])) for name in ("scaled", "unscaled"))
    return say(
        "With scores that are not scaled, {{ lower|length }} of {{ rows|length }} heads have less entropy on this "
        "image: as much as uniform attention to {{ unscaled|number }} tokens in the place of {{ scaled|number }}, mean "
        "of the heads. A softmax near its ends hardly has a gradient, which is why scaling was introduced (Vaswani et "
        "al. 2017).",
        rows=rows, lower=[each for each in rows if each.unscaled < each.scaled], scaled=exp(scaled),
        unscaled=exp(unscaled),
    )  # fmt: skip


def _without_positions(record: WalkthroughRecord) -> str:
    placed, without = by_positions(record)
    words = (
        "Without positions the same {{ row.patches }} patches in another order give the same outputs in that order, up "
        "to {{ without.difference|number }} of {{ without.largest|number }}: the model does not know where a patch is. "
        "With positions they differ by up to {{ placed.difference|number }}."
    )
    if placed.equivariant:
        words = (
            "The same {{ row.patches }} patches in another order give the same outputs in that order, up to "
            "{{ placed.difference|number }} of {{ placed.largest|number }}: this model hardly knows where a patch is."
        )
    elif not without.equivariant:
        words = (
            "Without a vector of its place added to each patch, patches in another order still give other outputs (by "
            "up to {{ without.difference|number }} of {{ without.largest|number }}): this model has positions in its "
            "attention, too (rotary positions or a bias)."
        )
    return say(words, row=record.row, placed=placed, without=without)


def _read(record: WalkthroughRecord) -> str:
    known = {each.change: each for each in record.answers}
    patches, prefix = known.get("patches-zero"), known.get("prefix-zero")
    return say(
        "The classifier reads {{ read }} after the last block. {% if patches %}With all patches set to zero there, "
        "logits change by up to {{ patches.difference|number }}{% if prefix %}, with the tokens before the patches set "
        "to zero by up to {{ prefix.difference|number }}{% endif %}.{% endif %}",
        read=_READ.get(record.row.readout, "the tokens through attention pooling"), patches=patches, prefix=prefix,
    )  # fmt: skip


def _named(record: WalkthroughRecord) -> list[AnswerRow]:
    return [
        AnswerRow(_WORDS.get(each.change, each.change), each.difference, each.prediction, each.probability, each.of_own)
        for each in record.answers
    ]


def _reversal(record: WalkthroughRecord) -> str:
    placed, without = sorted(record.reversal, key=lambda each: not each.positions)
    return say(
        "One attention layer was trained here for {{ p.steps }} steps to reverse sequences of {{ p.length }} random "
        "vectors. With positions its mean squared error is {{ p.loss|number }}, and {{ p.anti_diagonal|percent(1) }} "
        "of "
        "the weight lies on the token wanted. Without them the error stays at {{ w.loss|number }}, near the least "
        "possible, {{ w.floor|number }}: attention alone sees a set.",
        p=placed, w=without,
    )  # fmt: skip


def _chart(
    name: str,
    draw: Callable[[WalkthroughRecord, str], Figure],
    caption: str,
    title: str,
    rows: Callable[[WalkthroughRecord], list[WalkthroughRecord]] = lambda record: [record],
) -> Chart:
    """A figure that is drawn from the whole record."""
    return Chart(name, lambda found, text: draw(found[0], text), caption, title, rows=rows)


_HEAD: Final = (
    Section(
        "How is the image cut into patches?", "walk", step=True,
        says="The image of {{ image_size[0] }}×{{ image_size[1] }} px is cut into {{ grid[0] }}×{{ grid[1] }} patches "
        "of {{ patch_size[0] }}×{{ patch_size[1] }} px, row by row. Each is {{ patch_values }} numbers, normalised by "
        "the mean and the deviation that the model was trained with.",
        charts=(_chart("patches", draw_patches, "The image and its patches, numbered row by row.", "Patches",
                       whole_patches),),
    ),
    Section(
        "How does a patch become a vector?", lambda record: record.walk if record.embedding is not None else (),
        step=True,
        says="Each patch is multiplied by {{ dim }} filters of {{ patch_values }} weights, which makes it a vector of "
        "{{ dim }} numbers. The model computes this as a convolution; patches that are cut out and multiplied as in a "
        "linear layer give the same numbers.",
        charts=(_chart(
            "embedding", draw_embedding,
            "One patch, the filters that respond to it most (grey is zero) with their responses, and the numbers of "
            "all patches both ways.",
            "Patch embedding of {{ record.row.key_name }}",
        ),),
    ),
    Section(
        "How does the model know where a patch is?", "walk", step=True, opening=_positions,
        charts=(_chart(
            "positions", draw_positions,
            "The embedding of one patch, the vector of its place, and their sum, which enters the first block.",
            "What enters the first block: {{ record.row.key_name }}", with_position,
        ),),
    ),
    Section(
        "What are queries, keys and values?", "walk", step=True,
        says="Every token is normalised (layer norm) and multiplied by three matrices of this head: a query (what it "
        "looks for), a key (what it is found by) and a value (what it hands on), {{ head_dim }} numbers each.",
        charts=(_chart(
            "queries_keys", draw_vectors,
            "Queries, keys and values of all tokens; outlined: the query of {{ record.row.query_name }}, and the key "
            "to "
            "which it attends most.",
            "{{ record.row.name }}: queries, keys and values",
        ),),
    ),
    Section(
        "When is a score large?", "walk", step=True,
        says="A query and a key are multiplied number by number and added up: {{ head_dim }} products make one score, "
        "large where both point the same way. For {{ query_name }} and {{ key_name }} it is {{ product|number }}; over "
        "all pairs the standard deviation is {{ products_deviation|number }}.",
        charts=(_chart(
            "scores", draw_scores,
            "Products q·k of all pairs of tokens, not yet scaled; the outlined row is shown over the image at the "
            "right.",
            "{{ record.row.name }}: the products of all queries and keys",
        ),),
    ),
    Section(
        "Why are scores scaled?", "walk", step=True, says=_scaled,
        charts=(Chart(
            "scaling", lines("rank", "weight", of="how"),
            "The largest weights of the followed query with and without scaling, each sorted by itself.",
            "The weights of {{ record.row.query_name }}, sorted", rows=sorted_weights,
        ),),
    ),
    Section(
        "How do scores become weights?", "walk", step=True,
        says="The scores of a query are exponentiated and divided by their sum: each row of weights is positive and "
        "sums to one. The score {{ score|number }} becomes a weight of {{ weight|percent(1) }}{% if prefix %}; "
        "{{ prefix_mass|percent(1) }} of the row is on the tokens before the patches{% endif %}.",
        charts=(_chart(
            "weights", draw_weights,
            "All scores and weights of the head: one row a query, one column a key.",
            "{{ record.row.name }}: scores and weights of all pairs of tokens",
        ),),
    ),
    Section(
        "What does the head move?", "walk", step=True,
        says="The output of the head for a token is the sum of the values of all {{ tokens }} tokens, each times its "
        "weight. For {{ query_name }} it is a vector of {{ head_dim }} numbers with norm {{ output_norm|number }}.",
        charts=(_chart(
            "values", draw_values,
            "Weights of the followed query (left), the values of all tokens, and below their weighted sum.",
            "{{ record.row.name }}: the output for {{ record.row.query_name }}",
        ),),
    ),
    Section(
        "How much does each head add?", "walk", step=True, opening=_widest,
        charts=(Chart(
            "projection", bars("head", "norm"), "Norm of each head's part for the followed token.",
            "Layer {{ record.row.layer }}: what the heads add to {{ record.row.query_name }}", rows="added",
        ),),
    ),
    Section(
        "What leaves the block?", "block", step=True,
        opening="What attention and then the MLP compute is added to what entered the block, the residual stream. At "
        "{{ record.row.query_name }} a vector of norm {{ rows[0].norm|number }} enters, and one of "
        "{{ rows[-1].norm|number }} leaves.",
        charts=(Chart(
            "residual", bars("part", "norm"),
            "Norms at the followed token. They do not add up, as vectors point in different directions.",
            "Layer {{ record.row.layer }}: the residual stream of {{ record.row.query_name }}",
        ),),
    ),
)  # fmt: skip

_WITHOUT: Final = (
    Section(
        "What happens without scaling?", entropy_rows, step=True, opening=_without_scaling,
        charts=(Chart(
            "without_scaling", lines("layer", "entropy", of="how"),
            "Entropy of every head on this image, mean over its queries: a dot a head, the line their mean.",
            "Entropy of every head, with and without scaling",
        ),),
    ),
    Section(
        "What happens without positions?", "permutations", step=True, opening=_without_positions,
        charts=(Chart(
            "without_positions", images(),
            "The image and its patches in another order, with the predictions of the model with its positions.",
            "The same patches in another order", rows=permuted_patches,
        ),),
    ),
    Section(
        "Which token is read?", _named, step=True, opening=_read,
        columns=("change", "difference", "prediction", "probability", "of_own"),
        charts=(Chart(
            "answers", bars("change", "of_own", words=lambda row: f"predicts {row.prediction}"),
            "Probability of the unchanged model's class with each change of the model.",
            "What each change does to the prediction", only=lambda row: row.prediction is not None,
        ),),
    ),
    Section(
        "Can attention reverse a sequence?", "reversal", step=True, opening=_reversal,
        charts=(
            Chart(
                "reversal", lines("step", "loss", of="how", log=True),
                "Error of the two layers over their training. They are no part of the model.",
                "The error of a layer with positions and of one without", rows=loss_rows,
            ),
            Chart(
                "reversal_weights", images(scale="joint", label="weight (%)", smooth=False),
                "Weights after training, one row a query, one column a key, mean over heads and fresh sequences.",
                "What each layer attends to after its training", rows=reversed_weights,
            ),
        ),
    ),
)  # fmt: skip

REPORT: Final = Report(
    WalkthroughRecord,
    claims=claims,
    unknown=unknown,
    picture=_chart(
        "row", draw_row,
        "Weights of all pairs of tokens; the outlined row, of {{ record.row.query_name }}, is shown over the image at "
        "the right (patches only).",
        "{{ record.row.name }}: the weights of {{ record.row.query_name }}",
    ),
    glance=Overview(_checks, ("step", "formula", "compared", "relative", "note")),
    sections=(*_HEAD, *_WITHOUT),
)  # fmt: skip
