"""Figures that an earlier drawing of a report left and that it shows no more.

A folder may hold pictures of its owner's. What vitlens drew is known by two signs together: the folder's report.md, as
vitlens wrote it, shows the figure, and matplotlib, which signs its files, made it.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, get_args

from vitlens.names import FigureFormat
from vitlens.report.markdown import figures_shown

_SIGNATURE: Final = b"Matplotlib"  # in the metadata of each of them


def shown_in(report: Path) -> tuple[str, ...]:
    """The names of the figures in an earlier report.md; none where there is no such file."""
    return figures_shown(report.read_text(encoding="utf-8", errors="replace")) if report.is_file() else ()


def remove_old_figures(folder: Path, shown: Iterable[str], *, keep: Collection[str]) -> None:
    """Remove the files of figures that were shown before and are not among those to keep, from a run's figures/.

    shown: names, from `shown_in` before the report was written again; keep: names of the figures drawn now. A link, a
    file in another format and a file without matplotlib's signature stay.
    """
    old = {f"{name}.{form}" for name in shown if name not in keep for form in get_args(FigureFormat)}
    for path in sorted((folder / "figures").glob("*")):
        if path.name in old and path.is_file() and not path.is_symlink() and _SIGNATURE in path.read_bytes():
            path.unlink()
