"""What `vitlens stats` claims: heads that follow a pattern, heads at fault, and how two models differ."""

from collections.abc import Iterator, Sequence
from math import log2
from typing import Final

from vitlens.analysis.heads.labels import FAULTY, LABELS, THRESHOLD
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.commands.stats.record import ChangeRow, HeadRow, HeadsRow, StatsRecord
from vitlens.report.claims import Claim, above, below, found, judge
from vitlens.report.prose import Marked, counts, say
from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import LEVEL, Estimate, in_points, widened

UNIFORM: Final = 0.5  # bits of a row, below which attention is uniform
DEAD: Final = 0.005  # of the mean norm of the heads' outputs
ON_ONE: Final = 0.25  # of the attention on one patch, from which on a head attends to one place
SMALLEST: Final = 0.02  # of a fraction, or of the distance of uniform attention: smaller differences are no findings
FEW: Final = 2  # images, below which nothing is judged
_CHOOSING: Final = ("object", "background", "sink", "similar")


def title_of(name: str) -> str:
    """The title of a statistic, or of a column that holds it."""
    return STATISTICS[name.rpartition(".")[2]].title


def heads_shown(record: StatsRecord) -> tuple[HeadRow, ...]:
    """The heads of the models; of two with the same backbone of the first alone, as their attention is the same."""
    identical = any(row.identical for row in record.pair)
    return tuple(row for row in record.heads if not identical or row.model == record.aliases[0])


def models_shown(record: StatsRecord) -> tuple[HeadsRow, ...]:
    """The models that the report shows, as heads_shown."""
    return record.means[:1] if any(row.identical for row in record.pair) else record.means


def claims(record: StatsRecord) -> Iterator[Claim]:
    """Which heads follow a pattern, which are at fault, and how two models differ."""
    yield from _difference(record)
    for row in models_shown(record):
        heads = [each for each in record.heads if each.model == row.model]
        yield from _pattern(row, heads)
        yield from _faults(record, row, heads)
        yield from _places(row, heads)


def _pattern(row: HeadsRow, heads: Sequence[HeadRow]) -> Iterator[Claim]:
    clear = [head for head in heads if head.is_clear]
    if not row.heads:
        return
    kinds = counts({label: count for label, count in row.labels.items() if LABELS[label].function})
    yield Claim(
        "pattern",
        row.model,
        say(
            "{{ clear|length }} of {{ n }} heads of **{{ model }}** follow one pattern{% if clear %} ({{ kinds }}){% "
            "endif %}; for the others no single pattern explains half of their attention.",
            clear=clear, n=row.heads, model=row.model, kinds=kinds,
        ),
        title=f"{len(clear)} of {row.heads} heads of {row.model} follow one pattern",
        kind="answer",
        place="specialisation",
    )  # fmt: skip
    for label in dict.fromkeys(head.label for head in clear if head.label not in (*FAULTY, "position")):
        own = [h for h in clear if h.label == label and above(h.score, THRESHOLD, len(heads))]
        if own and label is not None:
            words = Marked(LABELS[label].sentence.split(" (")[0].split(",")[0])
            lead = max(own, key=lambda head: head.score.value if head.score else 0.0)
            yield found(
                f"heads labelled {label}", row.model,
                "{{ heads|names }} of **{{ model }}** (`{{ label }}`): {{ words }}, score {{ effect|value }}{% if "
                "heads|length > 1 %} in {{ lead.name }}{% endif %}.",
                lead.score or Estimate(0.0),
                given={"heads": own, "model": row.model, "label": label, "words": words, "lead": lead},
                reference=THRESHOLD, kind="fact" if label in _CHOOSING else "expected fact", place="specialisation",
            )  # fmt: skip


def _faults(record: StatsRecord, row: HeadsRow, heads: Sequence[HeadRow]) -> Iterator[Claim]:
    if row.faulty is not None:
        yield _health(record, row, heads)
    if row.sinks_off_object is not None and record.images >= FEW:
        says = "{{ effect }} of the patches' attention in **{{ model }}** lies on sinks off the object."
        off = row.sinks_off_object
        yield judge(
            "sinks", row.model, off, "sinks", says=say(says, effect=off, model=row.model),
            because="attention of patches on sinks off the object, mean over heads",
        )  # fmt: skip
    dead = [head for head in heads if head.label == "dead" and below(head.output, DEAD, len(heads))]
    if dead:
        most = max(dead, key=lambda head: head.output.value if head.output else 0.0)
        yield found(
            "dead heads", row.model,
            "{{ heads|names }} of **{{ model }}** {{ heads|are }} dead: at most {{ effect|value }} of the mean norm of "
            "the heads' outputs is added to the residual stream.",
            most.output or Estimate(0.0), given={"heads": dead, "model": row.model}, reference=DEAD,
            kind="hidden fault", place="specialisation",
        )  # fmt: skip
    even = list(_even(record, heads))
    if even:
        least = min(even, key=lambda head: head.statistics["normalised_entropy"].value)
        yield found(
            "uniform heads", row.model,
            "{{ heads|names }} of **{{ model }}** {{ verb }} uniformly: the entropy of a row is at least {{ "
            "effect|value }} of that of uniform attention.",
            least.statistics["normalised_entropy"],
            given={"heads": even, "model": row.model, "verb": "attends" if len(even) == 1 else "attend"},
            reference=_nearly_uniform(record, least), kind="hidden fault", place="heads",
        )  # fmt: skip


def _health(record: StatsRecord, row: HeadsRow, heads: Sequence[HeadRow]) -> Claim:
    """The share of dead and uniform heads; its upper end counts those that more images may show to be so."""
    undecided = sum(
        head.best in FAULTY and not below(head.score, THRESHOLD) for head in heads if head.label not in (None, *FAULTY)
    )
    share = row.faulty.value if row.faulty else 0.0
    value = Estimate(share, share, share + undecided / row.heads, row.heads)
    because = "heads that are dead or attend uniformly"
    if record.images < FEW:
        return Claim("attention health", row.model, state="inconclusive", limit="heads", because="one image; give more")
    limit = LIMITS["heads"]
    if limit.state(value.low or 0.0) != limit.state(value.high or 0.0):
        undecided_words = f"{because}; {undecided} of {row.heads} heads are undecided"
        return Claim("attention health", row.model, state="inconclusive", limit="heads", because=undecided_words)
    return judge("attention health", row.model, value, "heads", because=because)


def _nearly_uniform(record: StatsRecord, head: HeadRow) -> float:
    """The normalised entropy of a row that has UNIFORM bits; 2, beyond all, for a layer of a single key."""
    keys = next(row.keys for row in record.layers if (row.model, row.layer) == (head.model, head.layer))
    return 1 - UNIFORM / log2(keys) if keys > 1 else 2.0


def _even(record: StatsRecord, heads: Sequence[HeadRow]) -> Iterator[HeadRow]:
    for head in heads:
        entropy = head.statistics.get("normalised_entropy")
        if head.label == "uniform" and above(entropy, _nearly_uniform(record, head), len(heads)):
            yield head


def _places(row: HeadsRow, heads: Sequence[HeadRow]) -> Iterator[Claim]:
    """The heads that attend to one fixed place."""
    fixed = [head for head in heads if head.label == "position" and above(head.place_mass, ON_ONE, len(heads))]
    if not fixed:
        return
    lead = max(fixed, key=lambda head: head.place_mass.value if head.place_mass else 0.0)
    yield found(
        "fixed place", row.model,
        "{{ lead.name }} of **{{ model }}** attends to one fixed place: {{ effect }} of the patches' attention lies on "
        "the patch in row {{ lead.place[0] }}, column {{ lead.place[1] }}, whatever the image ({{ chance|percent(1) }} "
        "if it were uniform){% if others %}; so {{ verb }} {{ others|names }}, at places of their own{% endif %}.",
        lead.place_mass or Estimate(0.0),
        given={
            "lead": lead, "model": row.model, "chance": lead.place_chance or 0.0,
            "others": [head for head in fixed if head is not lead], "verb": "does" if len(fixed) == 2 else "do",
        },
        reference=max(lead.place_chance or 0.0, ON_ONE), kind="hidden fault", place="specialisation",
    )  # fmt: skip


def _difference(record: StatsRecord) -> Iterator[Claim]:
    """How many heads of two models differ, and the largest difference in units of the smallest worth reporting."""
    for pair in record.pair:
        between = f"{pair.first} and {pair.second}"
        if pair.identical:
            yield Claim(
                "difference", between,
                say("All {{ p.parameters }} parameters before the classifiers of **{{ p.first }}** and **{{ p.second "
                    "}}** are "
                    "equal, so their attention is identical.", p=pair),
                title=say("{{ p.first }} and {{ p.second }} have the same backbone", p=pair), kind="answer",
            )  # fmt: skip
            continue
        tests = [row for row in record.changes if row.p_all is not None]
        uniform = {row.layer: row.uniform_distance for row in record.layers}
        sized = [(_in_smallest(row, uniform.get(row.layer), len(tests)), row) for row in tests if differs(row)]
        large = [(size, row) for size, row in sized if size > 1]
        if not large:
            continue
        _, lead = max(large, key=lambda each: each[0])
        more, less = (pair.first, pair.second) if lead.difference.value > 0 else (pair.second, pair.first)
        k, n = len({row.name for row in tests if differs(row)}), len({row.name for row in tests})
        yield Claim(
            "difference", between,
            say(
                "{{ k }} of {{ n }} heads differ between **{{ p.first }}** and **{{ p.second }}**; most {{ lead.name "
                "}}, whose {{ what }} is higher in {{ more }} than in {{ less }} (by {{ size }}, p = {{ "
                "lead.p_all|number }}).",
                k=k, n=n, p=pair, lead=lead, what=title_of(lead.statistic), more=more, less=less,
                size=in_points(_positive(lead.difference)),
            ),
            title=f"{k} of {n} heads differ between {between}",
            effect=_positive(lead.difference), p=lead.p_all, kind="answer", place="differences",
        )  # fmt: skip


def differs(row: ChangeRow) -> bool:
    """Whether a head differs significantly, after the correction over heads and statistics."""
    return row.p_all is not None and row.p_all <= LEVEL


def _positive(each: Estimate) -> Estimate:
    return each if each.value >= 0 or each.low is None or each.high is None else Estimate(
        -each.value, -each.high, -each.low, each.n, each.unit
    )  # fmt: skip


def _in_smallest(row: ChangeRow, uniform: float | None, tests: int) -> float:
    """The near end of a difference in units of the smallest that is worth reporting; 0 where it holds none."""
    wide = widened(row.difference, tests)
    smallest = SMALLEST * (1.0 if wide.unit == "fraction" else uniform or float("inf"))
    if wide.low is None or wide.high is None or wide.low <= 0 <= wide.high:
        return 0.0
    return min(abs(wide.low), abs(wide.high)) / smallest
