"""The claims of `vitlens stats`: the patterns that heads follow, and heads that are at fault."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Final

from vitlens.analysis.heads.registry import THRESHOLD
from vitlens.analysis.naming.words import MATTERS
from vitlens.commands.shared.label_rows import NameRow, note_sentences, rest_words
from vitlens.commands.stats.record import FEW, HeadRow, HeadsRow, StatsRecord, faulty_share
from vitlens.report.claims import Claim, above, below, found, judge, unjudged
from vitlens.report.prose import say
from vitlens.report.verdicts import LIMITS
from vitlens.uncertainty import Estimate

UNIFORM: Final = 0.5  # bits of a row, below which attention is uniform
DEAD: Final = 0.005  # of the mean norm of the heads' outputs
ON_ONE: Final = 0.25  # of the attention on one patch, from which on a head attends to one place
_FEW_IMAGES: Final = 20  # below which the report says that other images may give other means


def claims(record: StatsRecord) -> Iterator[Claim]:
    """Yield how many heads follow a pattern, and which are at fault."""
    for row in record.means:
        heads = [head for head in record.heads if head.model == row.model]
        if row.heads:
            yield _patterns_claim(row, heads)
        yield from _writes_claim(record, row.model)
        if row.faulty is not None:
            yield _health_claim(record, row, heads)
        if row.sinks_off_object is not None and record.images >= FEW:
            yield _sinks_claim(row.model, row.sinks_off_object)
        yield from _fault_claims(record, row.model, heads)


def _patterns_claim(row: HeadsRow, heads: Sequence[HeadRow]) -> Claim:
    """Return how many heads follow one pattern."""
    clear = [head for head in heads if head.is_clear]
    return found(
        "pattern",
        row.model,
        "{{ count }} of {{ n }} heads of **{{ model }}** follow{{ 's' if count == 1 }} one "
        "pattern{% if count %} ({{ labels|counts }}){% endif %}{% if others %}; the others: "
        "{{ others|counts }}{% endif %}.",
        headline="{{ count }} of {{ n }} heads of {{ model }} follow{{ 's' if count == 1 }} one "
        "pattern",
        given={
            "count": len(clear),
            "n": row.heads,
            "model": row.model,
            "labels": Counter(head.label for head in clear),
            "others": Counter(head.label for head in heads if head.label and not head.is_clear),
        },
        kind="answer",
        place="specialisation",
    )


def _sinks_claim(model: str, off_object: Estimate) -> Claim:
    """Return the judgement of the attention on sinks off the object."""
    claim = judge(
        "sinks",
        model,
        off_object,
        "sinks",
        says=say(
            "{{ share }} of the attention in **{{ model }}** lies on sinks off the object.",
            share=off_object,
            model=model,
        ),
        because="attention of patches on sinks off the object, mean over heads",
    )
    brief = say(
        "In **{{ model }}**, {{ share|value }} of the attention lies on a few patches off the "
        "object (sinks).",
        share=off_object,
        model=model,
    )
    return replace(claim, brief=brief)


def _writes_claim(record: StatsRecord, model: str) -> Iterator[Claim]:
    """Yield how many heads write a class to which they matter."""
    names = [name for name in record.names if name.model == model and name.state is not None]
    if not names:
        return
    states = Counter(name.state for name in names if name.state is not None)
    matter = [name for name in names if name.state == MATTERS]
    matter.sort(key=lambda name: -margin(name))
    lead = matter[0] if matter else None
    yield found(
        "writes",
        model,
        "{{ matter }} of {{ n }} heads of **{{ model }}** {% if matter == 1 %}matters more to the "
        "classes or attributes that it separates{% else %}matter more to the classes or attributes "
        "that they separate{% endif %} best than to the others{% if lead %}, most of all "
        "{{ lead.name }}: without it, images of {{ lead.writes }} lose {{ effect|alone }} more "
        "log-odds than others{% endif %}.{% if rest %} Of the others, "
        "{{ rest|whole }}.{% endif %}",
        None if lead is None else lead.margin,
        brief="{% if lead %}Removing **{{ lead.name }}** hurts images of {{ lead.writes }} "
        "most.{% endif %}",
        given={
            "matter": len(matter),
            "n": len(names),
            "model": model,
            "lead": lead,
            "rest": rest_words(states),
        },
        kind="answer",
        evidence="intervened",
    )


def _health_claim(record: StatsRecord, row: HeadsRow, heads: Sequence[HeadRow]) -> Claim:
    """Return the judgement of the share of dead and uniform heads.

    The share is that of the rows of heads, because folders of earlier versions have no interval.
    """
    share = faulty_share(heads, images=record.images)
    if share is None or share.high is None:
        return unjudged("attention health", row.model, "one image; give more", limit="heads")
    because = "dead or uniform heads"
    limit = LIMITS["heads"]
    # the undecided heads, which the upper end counts as faulty, do not change the judgement
    if limit.state(share.value) == limit.state(share.high):
        return judge("attention health", row.model, share, "heads", because=because)
    undecided = round((share.high - share.value) * row.heads)
    because = f"{because}; {undecided} heads are undecided"
    return unjudged("attention health", row.model, because, limit="heads")


@dataclass(frozen=True)
class _Fault:
    """A fault of heads with one label.

    question: the question of its claim.
    label: the label of heads that may have it.
    number: returns the number of a head that is tested against the limit of the fault.
    limit: returns the limit of a head, from it and the number of keys by layer.
    template: the sentence about all heads that have it. {{ lead }} is the head whose number
        bounds those of all, or the strongest example: see `_fault_claims`.
    brief: the short sentence.
    is_low: True if low numbers are the fault.
    """

    question: str
    label: str
    number: Callable[[HeadRow], Estimate | None]
    limit: Callable[[HeadRow, Mapping[int, int]], float]
    template: str
    brief: str = ""
    is_low: bool = False

    def value(self, head: HeadRow) -> float:
        """Return the number of a head; 0 for a head without one."""
        number = self.number(head)
        return 0.0 if number is None else number.value


def _uniform_entropy(keys: int) -> float:
    """Return the normalised entropy of a row of so many keys from which attention is uniform.

    log2(keys) is the entropy of uniform attention in bits.
    """
    if keys < 2:
        return 2.0  # never reached: an entropy is at most 1 of that of uniform attention
    return 1 - UNIFORM / log2(keys)


_FAULTS: Final = (
    _Fault(
        "dead heads",
        "dead",
        lambda head: head.output,
        lambda _head, _keys_of_layer: DEAD,
        "{{ heads|names }} of **{{ model }}** {{ heads|are }} dead: at most {{ effect|value }} "
        "of the mean norm of the heads' outputs is added to the residual stream.",
        brief="Heads {{ heads|names }} of **{{ model }}** add next to nothing.",
        is_low=True,
    ),
    _Fault(
        "uniform heads",
        "uniform",
        lambda head: head.statistics.get("normalised_entropy"),
        lambda head, keys_of_layer: _uniform_entropy(keys_of_layer[head.layer]),
        "The attention of {{ heads|names }} of **{{ model }}** is uniform: the entropy of a row "
        "is at least {{ effect|value }} of that of uniform attention.",
        brief="Heads {{ heads|names }} of **{{ model }}** attend to all patches alike.",
    ),
    _Fault(
        "fixed place",
        "position",
        lambda head: head.place_mass,
        lambda _head, _keys_of_layer: ON_ONE,
        "{{ heads|names }} of **{{ model }}** {{ heads|are }} fixed to places of their own: in "
        "{{ lead.name }} {{ effect }} of the patches' attention lies on the patch in row "
        "{{ lead.place[0] }}, column {{ lead.place[1] }}, whatever the image "
        "({{ lead.place_chance|percent(1) }} if it were uniform).",
    ),
)


def _fault_claims(record: StatsRecord, model: str, heads: Sequence[HeadRow]) -> Iterator[Claim]:
    """Yield the heads that are dead, attend uniformly, or attend to one fixed place."""
    keys_of_layer = {row.layer: row.keys for row in record.layers if row.model == model}
    for fault in _FAULTS:
        is_beyond = below if fault.is_low else above
        faulty = []
        for head in heads:
            if head.label != fault.label:
                continue
            limit = fault.limit(head, keys_of_layer)
            if is_beyond(fault.number(head), limit, tests=len(heads)):
                faulty.append(head)
        if not faulty:
            continue
        # dead: "at most" the largest number; uniform: "at least" the smallest; fixed place: the
        # strongest example
        lead = max(faulty, key=fault.value)
        if fault.label == "uniform":
            lead = min(faulty, key=fault.value)
        yield found(
            fault.question,
            model,
            fault.template,
            fault.number(lead) or Estimate(0.0),
            brief=fault.brief,
            reference=fault.limit(lead, keys_of_layer),
            kind="hidden fault",
            given={"heads": faulty, "model": model, "lead": lead},
            place="specialisation",
        )


def margin(name: NameRow) -> float:
    """Return how much more log-odds images of a head's class lose without it; 0 if unknown."""
    return 0.0 if name.margin is None else name.margin.value


def unknown(record: StatsRecord) -> Iterator[str]:
    """Yield what statistics of attention do not show."""
    labelled = [head for head in record.heads if head.label is not None]
    yield from note_sentences(record.notes)
    if labelled and all(name.state is None for name in record.names):
        yield (
            "No head was removed: `vitlens ablate` measures whether predictions depend on what a "
            "head attends to."
        )
    near = [head for head in labelled if _is_near_threshold(head)]
    if near:
        yield say(
            "The scores of {{ near|names }} lie within their interval of the threshold of "
            "{{ threshold }}: other images may give them another label.",
            near=near,
            threshold=THRESHOLD,
        )
    unlabelled = len(record.heads) - len(labelled)
    if unlabelled:
        yield say(
            "{{ n }} heads have no label, as their tokens have no place in the image.", n=unlabelled
        )
    if record.images < _FEW_IMAGES:
        yield say(
            "These are means over {{ n }} image{{ n|s }}: other images may give others.",
            n=record.images,
        )


def _is_near_threshold(head: HeadRow) -> bool:
    """Return True if the interval of a head's score holds the threshold of labels."""
    if head.score is None:
        return False
    return not above(head.score, THRESHOLD) and not below(head.score, THRESHOLD)
