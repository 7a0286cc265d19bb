"""`vitlens.read`: a report folder as Python values, without torch."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import read_arrays
from vitlens.commands.run.publish import REPORT, read_folder
from vitlens.errors import InputError, UnknownNameError
from vitlens.files import inside, named_file
from vitlens.record import Config, VerdictEntry, read_run
from vitlens.record_files import flat
from vitlens.summary import Line, Summary, as_text, data_frame
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from pandas import DataFrame

_MOST_SHOWN = 8  # metrics in the repr


class ArrayFiles(Mapping[str, Mapping[str, NDArray[np.generic]]]):
    """The files of arrays/ by name, each read when it is asked for: its arrays by name.

    Raises UnknownNameError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> Mapping[str, NDArray[np.generic]]:
        if name not in self:
            raise UnknownNameError("file of arrays", str(name), list(self))
        return read_arrays(inside(self._folder, "arrays", named_file(name, ".npz")))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the arrays of a file, or the default where there is none."""
        return self[name] if name in self else default  # noqa: SIM401  this is what it is

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.stem for path in (self._folder / "arrays").glob("[!.]*.npz")))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return as_text(f"{len(self)} files of arrays", [(name,) for name in self])


class NamedMetrics(dict[str, Estimate]):
    """Metrics by name; for an unknown name the error gives the nearest ones."""

    def __missing__(self, name: str) -> Estimate:
        raise UnknownNameError("metric", str(name), self)

    def __repr__(self) -> str:
        rows = [(name, f"{estimate.value:.4g}", estimate.unit) for name, estimate in self.items()]
        return as_text(f"{len(rows)} metrics", rows)


class ReportFolder(Summary):
    """The folder of a run, as `read` gives it; names in it are as they were written.

    folder: its path.
    command: "ablate".
    status: "done", "running", "failed" or "interrupted".
    config: models, data, options, versions.
    metrics: by name, each an `Estimate` (.value, .low, .high, .n, .unit).
    verdicts: in the order of the report, each with .question, .subject, .state ("pass", "warn",
        "fail", "inconclusive", "not tested"), .because and .limit.
    arrays: by file.
    """

    def __init__(self, folder: Path, *, unfinished: bool) -> None:
        self._record = read_folder(folder)
        self.folder = folder
        self.command: str = self._record.command
        self.status: str = self._record.status
        self.config: Config = self._record.config
        self.metrics: Mapping[str, Estimate] = NamedMetrics(self._record.metrics)
        self.verdicts: tuple[VerdictEntry, ...] = read_run(folder).verdicts
        self.arrays: Mapping[str, Mapping[str, NDArray[np.generic]]] = ArrayFiles(folder)
        if self.status != "done" and not unfinished:
            raise InputError(
                f"expected a finished run at {folder}, found one that is {self.status}; "
                "repeat its command with --overwrite (--resume, if it has that option), "
                "or read the finished parts with unfinished=True"
            )

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of its tables."""
        return tuple(self._record.tables)

    @property
    def report(self) -> Path:
        """Return the path of report.md. Raises InputError where there is none."""
        path = self.folder / REPORT
        if not path.is_file():
            raise InputError(
                f"expected {REPORT} in {self.folder}, found none; write it with vitlens report "
                f"{self.folder}"
            )
        return path

    def table(self, name: str) -> list[Any]:
        """Return the rows of a table, each of the dataclass that the command declares.

        Raises UnknownNameError.
        """
        if name not in self._record.tables:
            raise UnknownNameError(f"table of {self.command}", name, self._record.tables)
        return list(self._record.tables[name])

    def to_pandas(self, name: str) -> "DataFrame":
        """Return a table as a pandas DataFrame, a column for each field.

        Raises InputError where pandas is not installed.
        """
        rows = self.table(name)
        kind = type(self._record).contents().tables[name]
        return data_frame(
            map(flat, rows), columns=None if rows else [column.name for column in fields(kind)]
        )

    def summary(self) -> Iterator[Line]:
        """Yield the command, its status, the first metrics, the tables with their rows, and the
        files of arrays.
        """
        yield Line("folder", str(self.folder))
        yield Line("command", self.command)
        yield Line("status", self.status)
        yield Line("models", self._record.aliases)
        for name in list(self.metrics)[:_MOST_SHOWN]:
            yield Line(name, self.metrics[name])
        if len(self.metrics) > _MOST_SHOWN:
            yield Line("further metrics", len(self.metrics) - _MOST_SHOWN)
        states = Counter(verdict.state for verdict in self.verdicts)
        if states:
            yield Line("verdicts", ", ".join(f"{count} {state}" for state, count in states.items()))
        filled = {name: len(rows) for name, rows in self._record.tables.items() if rows}
        yield Line("tables", ", ".join(f"{name} ({count})" for name, count in filled.items()))
        yield Line("arrays", ", ".join(self.arrays))


def read(folder: str | Path, *, unfinished: bool = False) -> ReportFolder:
    """Return the report of a run, as typed values: metrics, rows of tables, arrays; needs no torch.

    folder: as a command printed it.
    unfinished: also of a run that is running, failed or was interrupted, whose later tables are
        empty.

    Raises InputError, one line, where `vitlens report` does: for what is no run, is damaged, or was
    written by another version.

    >>> import vitlens
    >>> run = vitlens.read("reports/stats-deit-tiny")
    >>> run.command, run.status
    ('stats', 'done')
    """
    return ReportFolder(Path(folder).expanduser(), unfinished=unfinished)
