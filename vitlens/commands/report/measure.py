"""The figures and report.md of an earlier run, from its folder alone; torch is not imported."""

from pathlib import Path

from vitlens.commands.report.options import ReportOptions
from vitlens.commands.scaffold.publish import report


def measure(options: ReportOptions) -> Path:
    """Make them again; returns the report's path. Raises InputError for a folder that is no run's."""
    return report(options.folder, html=options.html)
