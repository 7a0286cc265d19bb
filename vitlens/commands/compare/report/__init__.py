"""The report of `vitlens compare`, from its record."""

from collections.abc import Iterator

from vitlens.commands.compare.conclusions import findings, verdicts
from vitlens.commands.compare.fair import MapComparison, checks_of, map_comparison
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.record import DIFFERENCE, HARDER, SEPARATIONS, USABLE
from vitlens.commands.compare.report.errors import error_section, failure_section
from vitlens.commands.compare.report.failures import explained_sections, failure_findings
from vitlens.commands.compare.report.harder import harder_sections, shape_bias_sections
from vitlens.commands.compare.report.maps import side_by_side
from vitlens.commands.compare.report.summary import pair_of, summary_sentences, summary_table
from vitlens.commands.run.describe import data_sentences
from vitlens.commands.shared.maps.judged import judged_maps
from vitlens.commands.shared.trainings import training_sentences
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence
from vitlens.report.numbers import in_words

__all__ = ["report"]


def report(record: Record) -> Document:
    """Summary, maps, the cells of errors, failures and successes, disturbed images, shape bias."""
    sections = (
        Section("Which model is better", tuple(summary_sentences(record)), (summary_table(record),), leading=True),
        side_by_side(record),
        error_section(record),
        failure_section(record),
        *explained_sections(record),
        *harder_sections(record),
        *shape_bias_sections(record),
    )
    return Document(
        record.config.title,
        sections,
        limits=tuple(_limits(record)),
        verdicts=tuple(verdicts(record)),
        findings=findings(record, failure_findings(record)),
        preface=(*data_sentences(record), *training_sentences(record), *_targets(record)),
    )


def _targets(record: Record) -> Iterator[Sentence]:
    """Which class the maps explain."""
    option = record.options(CompareOptions).target
    target = {"predicted": "each model's own prediction", "true": "the true class"}.get(option, f"the class {option}")
    yield Sentence(f"Maps explain the logit of {target}.", (option,), "setting")


def _limits(record: Record) -> Iterator[Sentence]:
    """What could overturn a finding of this run, the most serious first."""
    gap = record.metric(DIFFERENCE(**pair_of(record)))
    yield Sentence(
        f"One training of each model: the interval of the difference in accuracy, {in_words(gap)}, covers the choice "
        "of test images, not that of the seed, and not images of another kind.",
        (gap,),
    )
    comparison = map_comparison(record)
    usable = [record.metric(USABLE(model=alias)) for alias in record.aliases]
    checked = [each.check for each in comparison.judged if each is not None]
    if checked:
        on = max(check.images for check in checked)
        yield Sentence(
            f"Methods were chosen by checks on {on} images with removed patches replaced by a blurred image; with "
            "other replacements the order of the methods, and with it whose maps are shown, may differ. The "
            f"statistics of maps are over {usable[0].n or 0} images, which may include those.",
            (*checked, *usable),
        )
    yield from _other_methods(record, comparison)
    separations, harder = record.rows(SEPARATIONS), record.rows(HARDER)
    if separations:
        fewest = min(row.failures for row in separations)
        yield Sentence(
            "What differs between failures and successes need not be a cause of failure; the smallest group of "
            f"failures holds {fewest:,} images.",
            separations,
        )
    if harder:
        yield Sentence(
            f"Disturbed images ({harder[0].n or 0:,} of them at each level) are unlike the training images of either "
            "model: an accuracy there can be low because of what was removed, or because the image is unfamiliar.",
            harder,
        )


def _other_methods(record: Record, comparison: MapComparison) -> Iterator[Sentence]:
    """That maps by two methods were compared although another verified one was there."""
    shown = {(row.model, row.method) for row in comparison.methods}
    judged = [each for alias in record.aliases for each in judged_maps(checks_of(record, alias))]
    others = [
        each.check for each in judged if each.state == "pass" and (each.check.model, each.check.method) not in shown
    ]
    if comparison.same or not comparison.fair or not others:
        return
    listed = " and ".join(f"{check.method} for {check.model} ({check.estimate.value:.3f})" for check in others)
    chosen = [each.check for each in comparison.judged if each is not None]
    best = " and ".join(f"{check.method} for {check.model} ({check.estimate.value:.3f})" for check in chosen)
    yield Sentence(
        f"The maps of the two models are by two methods, {best} (in brackets: {others[0].judged_by}); verified as well "
        f"are {listed}. A difference between the maps may be one between the methods; `--method` with one name "
        "compares by one.",
        (*chosen, *others),
    )
