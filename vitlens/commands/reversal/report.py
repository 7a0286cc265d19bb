"""The report of `vitlens reversal`: how well the layer learned the task, and where heads attend."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from matplotlib.figure import Figure

from vitlens.charts import bars, lines, walkthrough
from vitlens.commands.reversal.options import ReversalOptions
from vitlens.commands.reversal.record import LayerRow, ReversalRecord, ViewRow
from vitlens.commands.run.flags import typed_again
from vitlens.report.claims import Claim, judge
from vitlens.report.next_steps import sentence_of
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Overview, Report, Section

# steps of a training that tests whether more steps help, at least and as a multiple
_MORE_STEPS: Final = 5000
_TIMES_MORE: Final = 5
_MOST_DRAWN: Final = 8  # heads in the figure, as its caption says


def claims(record: ReversalRecord) -> Iterator[Claim]:
    """Yield whether the layer does the task, where it attends, and what queries and keys read."""
    row = record.row
    yield replace(_task_claim(row), next_step=_next_step(record))
    yield Claim(
        "path",
        row.task,
        say(
            "{{ row.share }} of the attention lies on the **{{ row.path }}**; uniform attention "
            "has {{ row.chance|percent(1) }} there.",
            row=row,
        ),
        kind="answer",
        place="heads",
    )
    if len(record.views) > 1:
        yield _views_claim(row, record.views)


def _task_claim(row: LayerRow) -> Claim:
    """Return the verdict on the task, by the share of uniform attention's loss that remains."""
    question = _question(row)
    because = say(
        "loss {{ row.loss|value }} on {{ row.loss.n|number }} new sequences, "
        "{{ row.uniform|number }} for uniform attention",
        row=row,
    )
    claim = judge(question, row.task, row.remaining, "exercise", because=because)
    values = {"row": row, "learned": claim.state == "pass", "impossible": _is_impossible(row)}
    title = say(
        "{% if learned %}One attention layer learned to {{ row.task }} {{ row.length }} vectors"
        "{% elif impossible %}Without positions, one layer cannot {{ row.task }} "
        "{{ row.length }} vectors{% else %}One layer does not learn to {{ row.task }} "
        "{{ row.length }} vectors exactly{% endif %}",
        **values,
    )
    says = say(
        "After {{ row.steps|number }} steps its loss is {{ row.loss|alone }}; uniform attention "
        "has {{ row.uniform|number }}.{% if impossible %} Without positions no layer can have less "
        "than {{ row.without_positions|number }}: it sees a set, not a sequence.{% elif learned "
        "and row.task != 'copy' %} Without positions, {{ row.without_positions|number }} is the "
        "least possible.{% endif %}",
        **values,
    )
    return replace(claim, kind="answer", title=title, says=says)


def _question(row: LayerRow) -> str:
    """Return the topic of the verdict."""
    if _is_impossible(row):
        return "exercise without positions"
    if row.task == "sort":
        return "exercise to sort"
    if row.positions == "fixed":
        return "exercise with fixed positions"
    return "exercise"


def _next_step(record: ReversalRecord) -> str:
    """Return a hypothesis on what the layer lacks, and the command that tests it.

    The command repeats the run with what the hypothesis is about changed.
    """
    row = record.row
    more_steps = max(_MORE_STEPS, _TIMES_MORE * row.steps)
    changes: dict[str, object]
    if row.task == "sort":
        hypothesis = "one layer cannot count ranks, however long it is trained"
        changes = {"positions": "learned", "steps": more_steps}
    elif _is_impossible(row):
        hypothesis = "positions are all that the layer lacks"
        changes = {"positions": "learned"}
    elif row.positions == "fixed":
        hypothesis = "positions that are learned can grow until they stand out from the vectors"
        changes = {"positions": "learned"}
    else:
        hypothesis = "the training was too short"
        changes = {"steps": more_steps}
    same: dict[str, object] = {
        "task": row.task,
        "length": row.length,
        "heads": row.heads,
        "positions": row.positions,
        "steps": row.steps,
        "run": {"seed": record.config.seed},
    }
    words = ["vitlens", "reversal"]
    # None leaves an option out: changed ones are written below, also with the default as new value
    words += typed_again(ReversalOptions, {**same, **dict.fromkeys(changes)})
    for name, value in changes.items():
        if value != same[name]:
            words += [f"--{name}", str(value)]
    return sentence_of(hypothesis, " ".join(words))


def _is_impossible(row: LayerRow) -> bool:
    """Return True if the answer depends on positions and the layer has none."""
    return row.positions == "none" and row.task != "copy"


def _views_claim(row: LayerRow, views: tuple[ViewRow, ...]) -> Claim:
    both, positions, vectors = views  # in the order of SequenceView
    return Claim(
        "what queries and keys read",
        row.task,
        say(
            "With queries and keys computed from the positions only, the loss is "
            "{{ positions.loss|value }}; from the vectors only, {{ vectors.loss|value }}; from "
            "both, {{ both.loss|value }}.",
            both=both,
            positions=positions,
            vectors=vectors,
        ),
        kind="answer",
        evidence="intervened",
        place="views",
    )


def unknown(record: ReversalRecord) -> Iterator[str]:
    """Yield what one training of a toy task does not show."""
    yield say(
        "This is one training with one seed. Try others: `--seed 1`, `--length`, `--heads` and "
        "`--positions`."
    )
    yield (
        "The values are the vectors themselves. In a ViT they are learned, and a head that attends "
        "to a token need not pass it on."
    )
    if record.row.positions == "fixed":
        yield say(
            "Two fixed positions differ by {{ row.place_distance|number }} on average, two vectors "
            "by {{ row.vector_distance|number }}. Whether that is why training stops here was not "
            "tested.",
            row=record.row,
        )


def _task_words(record: ReversalRecord) -> str:
    return say(
        "Each step draws {{ row.batch }} new sequences of {{ row.length }} random vectors of "
        "{{ row.width }} numbers. {% if row.task == 'reverse' %}The answer is the sequence in "
        "reverse order{% elif row.task == 'copy' %}The answer is the sequence itself{% else %}The "
        "answer is sorted by the angle that the first two numbers of a vector form{% endif %}. The "
        "layer has {{ row.heads }} head{{ row.heads|s }}, {{ row.parameters|number }} parameters "
        "and {% if row.positions == 'none' %}no{% else %}{{ row.positions }}{% endif %} positions.",
        row=record.row,
    )


def _heads_words(record: ReversalRecord) -> str:
    return say(
        "{% if row.task == 'sort' %}Keys are drawn in the order of the answer, so a layer that "
        "sorts attends along the diagonal. One score sees one key and not the others, so it can "
        "find vectors near a rank, but not count ranks.{% elif row.task == 'copy' %}A layer that "
        "copies attends from each place to itself: the diagonal.{% else %}A layer that reverses "
        "attends from the first place to the last, from the second to the last but one, and so "
        "on: the anti-diagonal.{% endif %}",
        row=record.row,
    )


def _maps_figure(record: Any, title: str) -> Figure:
    return walkthrough.path_maps(
        record.maps.weights[:_MOST_DRAWN], title, is_reversed=record.row.task == "reverse"
    )


REPORT: Final = Report(
    ReversalRecord,
    claims=claims,
    unknown=unknown,
    picture=Chart(
        "heads",
        _maps_figure,
        "Attention weights of {% if record.row.heads > 8 %}the first 8 of {{ record.row.heads }} "
        "heads{% else %}each head{% endif %}, mean over new sequences. The {{ record.row.path }} "
        "is outlined.",
        "{{ record.row.share|value(1) }} of the attention is on the {{ record.row.path }}",
        whole=True,
    ),
    glance=Overview("layer", ("task", "length", "heads", "positions", "loss", "share")),
    sections=(
        Section(
            "Did the layer learn the task?",
            "losses",
            opening=_task_words,
            about=(
                "exercise",
                "exercise to sort",
                "exercise with fixed positions",
                "exercise without positions",
            ),
            charts=(
                Chart(
                    "loss",
                    lines("step", "loss", reference="uniform"),
                    "Loss during training; each point is a mean over several steps. Dashed: "
                    "uniform attention.",
                    "The loss of the training",
                ),
            ),
        ),
        Section(
            "Where does each head attend?",
            "by_head",
            opening=_heads_words,
            columns=("head", "share", "uniform", "followed"),
        ),
        Section(
            "Do queries and keys read positions or vectors?",
            lambda record: record.views if len(record.views) > 1 else (),
            opening="The trained layer is run again on the same sequences, with queries and keys "
            "computed from a part of its input. The values are still the vectors.",
            columns=("view", "loss", "share"),
            charts=(
                Chart(
                    "views",
                    bars("view", "share"),
                    "Attention on the right token with queries and keys computed from a part of "
                    "the input, mean over {{ first.share.n|number }} new sequences.",
                    "What queries and keys read",
                ),
            ),
        ),
    ),
)
