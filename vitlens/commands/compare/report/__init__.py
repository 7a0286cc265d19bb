"""The report of `vitlens compare`, from its record."""

from collections.abc import Iterator

from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.report.errors import error_section, failure_section
from vitlens.commands.compare.report.failures import explained_sections
from vitlens.commands.compare.report.harder import harder_sections, shape_bias_sections
from vitlens.commands.compare.report.maps import side_by_side
from vitlens.commands.compare.report.summary import summary_sentences
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence

__all__ = ["report"]


def report(record: Record) -> Document:
    """Summary, maps, the cells of errors, failures and successes, disturbed images, shape bias."""
    sections = (
        Section("Summary", tuple(summary_sentences(record)), leading=True),
        side_by_side(record),
        error_section(record),
        failure_section(record),
        *explained_sections(record),
        *harder_sections(record),
        *shape_bias_sections(record),
    )
    return Document(record.config.title, sections, limits=tuple(_limits(record)))


def _limits(record: Record) -> Iterator[Sentence]:
    option = record.options(CompareOptions).target
    target = {"predicted": "each model's own prediction", "true": "the true class"}.get(option, f"the class {option}")
    yield Sentence(
        f"Maps explain the logit of {target}. Negative values (evidence against the class) count as 0 in figures and "
        "in statistics of mass and position; rank correlations use the raw maps. Two attribution methods differ even "
        "on one model: a difference between maps is a difference between models only as far as both methods are "
        "faithful (vitlens explain --verify)."
    )
    yield Sentence(
        "The intervals cover the choice of images of this kind. They do not cover other training runs or images of "
        "another kind."
    )
    yield Sentence("What differs between failures and successes need not be a cause of failure.")
