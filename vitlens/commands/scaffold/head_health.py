"""The verdict on attention health: which share of a model's heads has a fault; free of torch."""

from vitlens.report import verdicts as rules
from vitlens.report.document import Verdict
from vitlens.uncertainty import wilson


def head_health(subject: str, faulty: int, undecided: int, heads: int, because: str) -> Verdict:
    """The verdict on the share of heads with a fault, by Wilson's interval over the heads.

    undecided: heads of which the images show neither; where counting them as faulty changes the state, or the model has
    too few heads for any interval to pass, the verdict is inconclusive, unless the lower end shows a fault.
    """
    share, limit = wilson(faulty, heads), rules.HEADS
    worst = wilson(faulty + undecided, heads)
    assert share.low is not None
    assert worst.high is not None
    least, most = limit.state(share.low), limit.state(worst.high)
    if least == most:
        return Verdict(subject, least, share, limit.words, because)
    if undecided and limit.state(share.high or 0.0) != most:
        return rules.inconclusive(subject, share, limit, f"{because}; {undecided} of {heads} heads are undecided")
    if (wilson(0, heads).high or 1.0) > limit.passes and limit.state(share.value) == "pass":
        few = f"{because}; no interval over as few as {heads} heads lies below the threshold"
        return rules.inconclusive(subject, share, limit, few)
    return rules.judged(subject, share, limit, because)
