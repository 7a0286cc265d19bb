"""The report of `vitlens report --compare`: the release decision, and what changed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from vitlens.commands.report.changes import (
    changes_between,
    common_metrics,
    compare_images,
    compare_settings,
    compare_verdicts,
)
from vitlens.commands.report.claims import claims, unknown
from vitlens.commands.report.record import ComparedRuns, MetricChange
from vitlens.errors import InputError
from vitlens.report.prose import say
from vitlens.report.sections import Overview, Report, Section


def compared_runs(before: Any, after: Any, command_line: str) -> ComparedRuns:
    """Return the comparison of two runs of one command.

    command_line: the line that repeats the comparison.

    Raises InputError unless both runs are done, with the same number of models.
    """
    _require_comparable(before, after)
    verdicts = compare_verdicts(before, after)
    names_before = common_metrics(before, after)  # by name after
    only_after = [name for name in after.metrics if name not in names_before]
    only_before = [name for name in before.metrics if name not in names_before.values()]
    return ComparedRuns(
        config=replace(after.config, command_line=command_line, data=None, fingerprints={}),
        folder=after.folder,
        earlier=before.folder.resolve().name,
        later=after.folder.resolve().name,
        same_images=compare_images(before, after),
        changes=changes_between(before, after),
        judged=verdicts.rows,
        settings=tuple(compare_settings(before, after)),
        alone=(*only_after, *only_before),
        judged_alone=verdicts.alone,
        failures=verdicts.failures,
    )


def _require_comparable(before: Any, after: Any) -> None:
    if before.command != after.command:
        raise InputError(
            f"expected two folders of one command, found {before.command} ({before.folder}) and "
            f"{after.command} ({after.folder})"
        )
    for record in (before, after):
        if record.status != "done":
            raise InputError(
                f"expected a run that is done in {record.folder}, found one that is {record.status}"
            )
    if len(before.aliases) != len(after.aliases):
        raise InputError(
            f"expected as many models in both folders, found {len(before.aliases)} in "
            f"{before.folder} and {len(after.aliases)} in {after.folder}"
        )


def _without_interval(runs: ComparedRuns) -> Sequence[MetricChange]:
    """Return the metrics that differ and cannot be tested, as they have no interval over images."""
    return [row for row in runs.changes if row.p is None and row.difference.value]


def _verdicts_words(runs: ComparedRuns) -> str:
    differing = [row for row in runs.judged if row.before != row.after]
    return say(
        "{{ differing }} of {{ n }} verdicts differ. A verdict near its limit can differ by "
        "chance.",
        differing=len(differing),
        n=len(runs.judged),
    )


REPORT: Final = Report(
    ComparedRuns,
    claims=claims,
    unknown=unknown,
    title="What changed from {{ record.earlier }} to {{ record.later }}",
    glance=Overview("changed", ("words", "before", "after", "difference", "p_holm", "test")),
    sections=(
        Section(
            "Which metrics without a test differ?",
            _without_interval,
            opening="{{ rows|length }} {{ rows|length|are }} not judged.",
            columns=("words", "before", "after", "difference"),
        ),
        Section(
            "Do the verdicts agree?",
            "judged",
            opening=_verdicts_words,
            columns=("judged", "before", "after"),
        ),
        Section(
            "Which settings differ?",
            "settings",
            opening="{{ rows|length }} setting{{ rows|length|s }} "
            "differ{% if rows|length == 1 %}s{% endif %}.",
            without="No setting differs.",
            columns=("setting", "before", "after"),
        ),
        Section(
            "What did both runs measure?",
            "changes",
            columns=("metric", "words", "before", "after", "difference", "p_holm"),
            order=lambda row: row.metric,
        ),
    ),
)
