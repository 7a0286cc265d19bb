"""Failures of both models by category, with causal tests."""

from collections.abc import Iterator

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.compare.record import METHODS
from vitlens.commands.shared.failures.sections import failure_sections, findings_of
from vitlens.records import Record
from vitlens.report.document import Finding, Section


def explained_sections(record: Record) -> Iterator[Section]:
    """Why images are misclassified; nothing for a folder of before that was measured."""
    return failure_sections(record, {row.model: ATTRIBUTIONS[row.method].title for row in record.rows(METHODS)})


def failure_findings(record: Record) -> Iterator[Finding | None]:
    """The causes of failures that a test supports, and categories more frequent among failures."""
    return findings_of(record)
