"""Contradictions of a report: two claims about one subject, or a cause that no change tested."""

from collections.abc import Iterable, Iterator

from vitlens.commands.run.consistency import claim_conflicts
from vitlens.report.claims import Claim


def contradictions(claims: Iterable[Claim]) -> Iterator[str]:
    """Yield conflicts of claims on one question and subject, and causes that no change tested."""
    for conflict in claim_conflicts(claims):
        yield f"{conflict.about}: {conflict.error}"
