"""RunFolder: the folder of one run, whose status is done only when the run has ended."""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike

from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.run_place import default_place, make_folder, remove_unfinished, require_plain
from vitlens.errors import InputError, VitlensError
from vitlens.files import CONFIG, RESULTS, RunRecord, named_file, read_run, write_arrays, write_json
from vitlens.record import SCHEMA, Record, written
from vitlens.safe_paths import inside
from vitlens.version import __version__

Status = Literal["running", "done", "failed", "interrupted"]

_WRITTEN = ("title", "formats", "versions", "command_line", "options", "models")  # in config.json by every command


class RunFolder:
    """The folder of a run while it runs: a context manager.

    config.json is written first and results.json with the status running; leaving the block makes that done, failed
    (an exception) or interrupted (Ctrl-C). A killed run stays at running.
    """

    def __init__(self, record: RunRecord) -> None:
        self.path = record.folder
        self.config = record.config
        self.command = record.command
        metrics, tables = record.results["metrics"], record.results["tables"]
        self._metrics: dict[str, dict[str, object]] = dict(metrics) if isinstance(metrics, Mapping) else {}
        self._tables: dict[str, list[dict[str, object]]] = dict(tables) if isinstance(tables, Mapping) else {}
        self._before = float(str(record.results["seconds"]))  # of earlier attempts, when it is resumed
        self._start = time.monotonic()
        self._seconds: float | None = None

    @classmethod
    def create(
        cls,
        command: str,
        *,
        name_parts: Sequence[str] = (),
        title: str = "",
        out: Path | None = None,
        overwrite: bool = False,
        config: Mapping[str, object] | None = None,
        formats: Sequence[str] = ("png",),
    ) -> "RunFolder":
        """A new folder: out, or reports/<command>-<name parts>-<time> (for train runs/<name parts>-<time>).

        Raises OutputError when out exists (unless overwrite, and then it must be a run or empty), is a file, or cannot
        be written; StorageError when the disk is full.
        """
        path = default_place(command, name_parts) if out is None else out
        make_folder(path, overwrite=overwrite)
        whole: dict[str, object] = {
            "command": command,
            "title": title or " ".join((command.capitalize(), *name_parts)),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "formats": list(formats),
            "versions": versions(),
            **(config or {}),
        }
        write_json(path / CONFIG, whole)
        folder = cls(RunRecord(path, whole, _results(command, "running", 0.0, {}, {})))
        folder._write("running")
        return folder

    @classmethod
    def reopen(
        cls, path: Path, *, needs: Mapping[str, object | None] | None = None, config: Mapping[str, object] | None = None
    ) -> "RunFolder":
        """The folder of an earlier run, to go on with it (--resume): what it holds is kept, its status is running.

        needs: what its config.json must say besides what every command writes, by name, with its value where that is
        known; None: nothing at all. config: what the run that goes on knows itself, as for `create`; it takes the place
        of what was read, but for the command line. Raises InputError for links, and for a config.json that says less or
        another thing.
        """
        record = read_run(path)
        require_plain(path)
        own = {name: value for name, value in (config or {}).items() if name != "command_line"}
        folder = cls(replace(record, config={**record.config, **own}))
        needed = {} if needs is None else {**dict.fromkeys(_WRITTEN), **needs}
        for name, value in needed.items():
            if name not in record.config or value not in (None, record.config[name]):
                raise InputError(
                    f"expected the {name} that the run began with in {path / CONFIG}, found something else; "
                    "begin anew without --resume"
                )
        remove_unfinished(path)
        if own:
            write_json(path / CONFIG, folder.config)
        folder._write("running")
        return folder

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status: Status = "done"
        if kind is not None:
            status = "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"
        if isinstance(error, KeyboardInterrupt):  # the boundary prints what an interruption carries
            error.args = (f"what was done lies in {self.path}",)
        try:
            self._write(status)
        except (VitlensError, OSError):
            if kind is None:  # else the first error is the one to report; results.json still says running
                raise

    def keep(self, record: Record) -> None:
        """Keep a record: its metrics and tables, and write its arrays."""
        self._metrics, self._tables, files = written(record)
        for name, values in files.items():
            self.arrays(name, **values)

    def arrays(self, name: str, **arrays: ArrayLike) -> None:
        """Write arrays/<name>.npz, from which figures are drawn again."""
        write_arrays(self.place("arrays", named_file(name, ".npz")), arrays)

    def place(self, *parts: str) -> Path:
        """Where something is written in this folder. Raises InputError for a link, and for what leads out of it."""
        return inside(self.path, *parts)

    def record(self) -> RunRecord:
        """Write what is known so far, and return it as read back from the folder."""
        self._write("running")
        return read_run(self.path)

    def finish(self) -> RunRecord:
        """Stop the clock; the record as it will stand once the block is left."""
        self._seconds = self._elapsed()
        return RunRecord(self.path, self.config, self._content("done"))

    @property
    def seconds(self) -> float:
        """How long the run has taken, or took."""
        return round(self._elapsed(), 3)

    def _elapsed(self) -> float:
        return self._before + time.monotonic() - self._start if self._seconds is None else self._seconds

    def _content(self, status: Status) -> dict[str, object]:
        return _results(self.command, status, self.seconds, self._metrics, self._tables)

    def _write(self, status: Status) -> None:
        write_json(self.place(RESULTS), self._content(status))


def versions() -> dict[str, str]:
    """The versions that decide the numbers: vitlens, python and the libraries, without importing them."""
    installed = {"vitlens": __version__, "python": platform.python_version()}
    for library in ("torch", "torchvision", "timm", "numpy"):
        try:
            installed[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _results(
    command: str, status: Status, seconds: float, metrics: Mapping[str, object], tables: Mapping[str, object]
) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "command": command,
        "status": status,
        "seconds": seconds,
        "metrics": dict(metrics),
        "tables": dict(tables),
    }


if TYPE_CHECKING:
    from vitlens.data.split import Split
    from vitlens.models.model import Model


def settings(
    options: Any, run: RunOptions, *, models: "Sequence[Model]" = (), split: "Split | None" = None, **more: object
) -> dict[str, object]:
    """The settings of a run for RunFolder.create(config=...), read back as `Record.config`.

    options: the dataclass that the command took; run: its run options as they hold in this process; more: further
    entries of config.json.
    """
    content: dict[str, object] = {
        "command_line": run.command,
        "seed": run.seed,
        "precision": run.precision,
        "device": str(models[0].device) if models else run.device,
        "options": asdict(options),
        "models": [_model(model) for model in models],
        **more,
    }
    return content if split is None else {**content, "data": _split(split)}


def _model(model: "Model") -> dict[str, object]:
    return {
        "alias": model.alias,
        **asdict(model.provenance),
        "family": model.anatomy.family,
        "architecture": model.architecture,
        "parameters": model.parameter_count(),
        "preprocessing": asdict(model.preprocessing),
        "classes": len(model.classes),
    }


def _split(split: "Split") -> dict[str, object]:
    return {
        "name": split.name,
        "title": split.title or split.name,
        "part": split.part,
        "images": len(split),
        "size": list(split.size),
        "classes": len(split.classes),
        "skipped": [asdict(skipped) for skipped in split.skipped],
        "notes": list(split.notes),
    }
