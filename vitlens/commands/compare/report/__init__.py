"""The report of `vitlens compare`, from its record."""

from collections.abc import Iterator

from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.report.errors import error_section, failure_section
from vitlens.commands.compare.report.harder import harder_sections, shape_bias_sections
from vitlens.commands.compare.report.maps import side_by_side
from vitlens.commands.compare.report.summary import summary_sentences
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence

__all__ = ["report"]


def report(record: Record) -> Document:
    """Summary, maps side by side, the cells of errors, failures, harder images, shape or texture."""
    sections = (
        Section("Summary", tuple(summary_sentences(record)), leading=True),
        side_by_side(record),
        error_section(record),
        failure_section(record),
        *harder_sections(record),
        *shape_bias_sections(record),
    )
    return Document(record.config.title, sections, limits=tuple(_limits(record)))


def _limits(record: Record) -> Iterator[Sentence]:
    asked = record.options(CompareOptions).target
    target = {"predicted": "each model's own prediction", "true": "the true class"}.get(asked, f"the class {asked}")
    yield Sentence(
        f"Maps are of the logit of {target}. Negative values (evidence against it) are left out of shares, of sheets "
        "and of the position of a map; ranks are of the raw maps. Two methods differ for reasons of their own: a "
        "difference between maps is one of models only as far as the methods can be trusted (vitlens explain --verify)."
    )
    yield Sentence(
        "The intervals say how much the numbers would change with other images of the same kind; not how much with "
        "another training run, and nothing about images of another kind."
    )
    yield Sentence("What differs between failures and successes need not cause them.")
