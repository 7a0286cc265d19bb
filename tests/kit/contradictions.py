"""What no report may claim: two things about one question and subject, or a cause that nothing was changed to show."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from vitlens.report.claims import Claim

_CAUSE: Final = re.compile(r"\b(because|due to|caused by)\b", re.IGNORECASE)


def contradictions(claims: Iterable[Claim]) -> Iterator[str]:
    """What two claims on one question and subject say differently, and causes that nothing was changed to show."""
    seen: dict[tuple[str, str], Claim] = {}
    for claim in claims:
        first = seen.setdefault((claim.question, claim.subject), claim)
        about = f"{claim.question} of {claim.subject}"
        if claim.state != first.state:
            yield f"{about}: {first.state or 'no judgement'} and {claim.state or 'no judgement'}"
        if claim.effect and first.effect and claim.effect.value * first.effect.value < 0:
            yield f"{about}: two signs"
        if claim.effect and first.effect and claim.effect.n != first.effect.n:
            yield f"{about}: {first.effect.n} and {claim.effect.n} images"
        if claim.evidence != "intervened" and _CAUSE.search(claim.says):
            yield f"{about}: a cause without an intervention: {claim.says}"
