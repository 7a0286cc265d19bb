"""The folder of a run: its place, its settings, and what it holds while the run lasts and after.

`RunFolder` writes it; its status is "done" only when the run has ended. `Hold` keeps other runs out
of it. `settings` returns what config.json says of a run.
"""

import errno
import os
import platform
import re
import shlex
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike

from vitlens import files
from vitlens.arrays import write_arrays
from vitlens.commands.run.options import RunOptions
from vitlens.errors import InputError, OutputError, VitlensError
from vitlens.files import inside, require_no_links
from vitlens.names import LABELS, fingerprinted
from vitlens.record import CHAPTERS_FOLDER, CONFIG, RESULTS, SCHEMA, Record, RunRecord, read_run
from vitlens.record_files import serialise_record, serialise_tables
from vitlens.references import resolved
from vitlens.version import __version__

if TYPE_CHECKING:
    from vitlens.data.split import Split
    from vitlens.models.model import Model

Status = Literal["running", "done", "failed", "interrupted"]

# what every command writes into config.json
_CONFIG_ENTRIES = ("title", "formats", "versions", "command_line", "options", "models")

# what a run, and later `vitlens report`, write: --overwrite removes these files and nothing else.
# Logs of W&B stay, as each run has a folder of its own in wandb/
_WRITTEN_FILES = (
    "report.md",
    "report.html",
    "portfolio.md",
    "portfolio.html",
    "comparison.md",
    "comparison.html",
    "comparison/*.csv",
    "metrics.jsonl",
    "*.safetensors",
    "figures/*.png",
    "figures/*.svg",
    "figures/*.pdf",
    "tables/*.csv",
    "arrays/*.npz",
    "checkpoint/*",
    "progress/*.npz",
    "kept/*.safetensors",
    "tensorboard/events.out.*",
    "tensorboard/*/events.out.*",
    "tensorboard/*/hparams.yml",
    "points/*/seed-*/*",
    "points/*/seed-*/checkpoint/*",
    "adversarial/*/*.png",
)
# the folders, and the files with a fixed name, at the top of a run's folder
_TOP_NAMES = (
    pattern.partition("/")[0] for pattern in _WRITTEN_FILES if "/" in pattern or "*" not in pattern
)
# none of _TOP and _NESTED may be a link
_TOP = tuple(dict.fromkeys((CONFIG, RESULTS, *_TOP_NAMES)))
# folders of runs, and of a model, within a run's folder
_NESTED = (CHAPTERS_FOLDER, "pruned")
# the start of this process: older temporary files were left by a process that was killed
_PROCESS_START = time.time()


class Hold:
    """The lock of a run on its folder.

    `release` ends it; so does the end of the process, even if it is killed.

    Raises OutputError where another run has locked the folder, here or in another process.
    """

    def __init__(self, path: Path) -> None:
        self.release: Callable[[], object] = lambda: None
        try:
            import fcntl
        except ImportError:  # Windows has no such locks
            return
        descriptor = os.open(path, os.O_RDONLY)
        # closing the folder releases its lock; also called when this object is garbage
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise OutputError(
                f"expected a run that has ended in {path}, found one that is still running; wait "
                "for it, stop it, or choose another --out"
            ) from error
        except OSError:  # a file system without locks
            self.release()


class RunFolder:
    """The folder of a run while it runs: a context manager.

    config.json is written first and results.json with the status running; leaving the block makes
    that done, failed (an exception) or interrupted (Ctrl-C). A killed run stays at running.
    """

    def __init__(
        self,
        path: Path,
        command: str,
        config: Mapping[str, object],
        results: Mapping[str, Any] | None = None,
        *,
        hold: Hold,
    ) -> None:
        """Take a folder that exists and is locked.

        results: the results.json of the run that is resumed, None for a new run.
        """
        self._hold = hold
        earlier_results = results or {}
        self.path = path
        self.command = command
        self.config = config
        self._metrics: Mapping[str, object] = earlier_results.get("metrics", {})
        self._tables: Mapping[str, object] = earlier_results.get("tables", {})
        # the clock goes on from the seconds of earlier attempts
        self._start: float = time.monotonic() - earlier_results.get("seconds", 0.0)
        self._end: float | None = None
        self.figures: tuple[str, ...] = ()  # names of figures that this run has saved
        self.verdicts: Sequence[Mapping[str, str]] = ()  # of its report

    @classmethod
    def opened(
        cls,
        command: str,
        run: RunOptions,
        config: Mapping[str, object] | None = None,
        *,
        name_parts: Sequence[str] = (),
        title: str = "",
        resume: Path | None = None,
        needs: Mapping[str, object | None] | None = None,
    ) -> "RunFolder":
        """Return a new folder, or that of --resume, as `reopen`.

        A new folder is --out or `default_place`.

        config: the entries of config.json, as of `settings`.
        name_parts: words of the default place and of the default title, models and data.
        title: the title of the report, "" for the command and the name parts.
        needs: as for `reopen`.

        Raises OutputError when --out exists (unless --overwrite, and then it must be a run or
        empty), is a file, or cannot be written; StorageError when the disk is full.
        """
        if resume is not None:
            return cls.reopen(resume, needs=needs, config=config)
        path = run.out
        if path is None:
            path = default_place(command, name_parts)
        hold = make_folder(path, overwrite=run.overwrite)
        content: dict[str, object] = {
            "command": command,
            "title": title or " ".join((command.capitalize(), *name_parts)),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "formats": list(run.formats),
            "width": run.width,
            "versions": versions(),
            **(config or {}),
        }
        files.write_json(path / CONFIG, content)
        folder = cls(path, command, content, hold=hold)
        folder._write("running")
        return folder

    @classmethod
    def reopen(
        cls,
        path: Path,
        *,
        needs: Mapping[str, object | None] | None = None,
        config: Mapping[str, object] | None = None,
    ) -> "RunFolder":
        """Return the folder of an earlier run, to resume it: its contents stay.

        needs: entries that its config.json must have, in addition to what every command writes, by
            name; the value None stands for any value. Without `needs`, none must be there.
        config: the entries of the run that resumes. They replace those read, except for the command
            line, which stays that of the first attempt.

        Raises InputError for links, and for a config.json without such an entry or with another
        value.
        """
        record = read_run(path)
        require_plain(path)
        updates = dict(config or {})
        updates.pop("command_line", None)
        folder = cls(
            path, record.command, {**record.config, **updates}, record.results, hold=Hold(path)
        )
        _require_same_images(path, record.config.get("fingerprints"), updates.get("fingerprints"))
        needed: dict[str, object | None] = {}
        if needs is not None:
            needed = {**dict.fromkeys(_CONFIG_ENTRIES), **needs}
        for name, value in needed.items():
            # None: the entry must be there, with any value
            is_same = name in record.config and value in (None, record.config[name])
            if not is_same:
                raise InputError(
                    f"expected the {name} that the run began with in {path / CONFIG}, "
                    "found something else; start again without --resume"
                )
        remove_unfinished(path)
        if updates:
            files.write_json(path / CONFIG, folder.config)
        folder._write("running")
        return folder

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        status: Status
        if kind is None:
            status = "done"
        elif issubclass(kind, KeyboardInterrupt):
            status = "interrupted"
        else:
            status = "failed"
        if isinstance(error, KeyboardInterrupt):  # the command line prints these words
            error.args = (self._interruption_words(),)
        try:
            self._write(status)
        except (VitlensError, OSError):
            # after another error, that one is reported, and results.json still says running
            if kind is None:
                raise
        finally:
            self._hold.release()

    def _interruption_words(self) -> str:
        """Return what an interrupted run leaves, and the command that continues it.

        With an option --resume, this is that option with the folder. Else it is the run's command
        line, of which finished chapters come from the cache.
        """
        options = self.config.get("options")
        saved_options = options if isinstance(options, Mapping) else {}
        # a study of chapters has no --resume: its chapters are in the cache
        is_study_of_chapters = self.command == "study" and "points" not in self.config
        if "resume" not in saved_options or is_study_of_chapters:
            return self._words_without_resume(saved_options)
        command_line = ["vitlens", self.command, "--resume", str(self.path)]
        # an option of the command itself, or of its bundle of model options
        model_files = saved_options.get("model_file")
        model_options = saved_options.get("model_options")
        if not model_files and isinstance(model_options, Mapping):
            model_files = model_options.get("model_file")
        for file in model_files or ():  # None without the option
            command_line += ["--model-file", str(file)]
        return f"finished parts are kept in {self.path}; continue with {shlex.join(command_line)}"

    def _words_without_resume(self, options: Mapping[str, Any]) -> str:
        """Return what an interrupted run leaves, and its command line, which begins it again.

        Finished chapters then come from the cache.
        """
        line = str(self.config.get("command_line") or "")
        run = options.get("run")
        run_options = run if isinstance(run, Mapping) else {}
        if line and run_options.get("out") and not run_options.get("overwrite"):
            line += " --overwrite"
        if not (self.path / CHAPTERS_FOLDER).is_dir():
            kept = f"finished parts are in {self.path}"
            return f"{kept}; begin again with {line}" if line else kept
        report = shlex.join(["vitlens", "report", str(self.path)])
        kept = f"the finished chapters are in {self.path}, and {report} writes their report"
        if line and options.get("cache"):
            return f"{kept}; continue with {line}"
        return kept

    def keep_tables(self, record: Record) -> None:
        """Write the tables of an unfinished record, for a report if the run is stopped."""
        self._tables = serialise_tables(record)
        self._write("running")

    def keep(self, record: Record) -> None:
        """Keep a record: its metrics and tables, and write its arrays."""
        self._metrics, self._tables, arrays = serialise_record(record)
        for name, values in arrays.items():
            self.arrays(name, **values)

    def arrays(self, name: str, **arrays: ArrayLike) -> None:
        """Write arrays/<name>.npz, from which figures are drawn again."""
        write_arrays(self.place("arrays", files.named_file(name, ".npz")), arrays)

    def place(self, *parts: str) -> Path:
        """Return where something is written in this folder.

        Raises InputError for a link, and for what leads out of it.
        """
        return inside(self.path, *parts)

    def record(self) -> RunRecord:
        """Write what is known so far, and return it as read back from the folder."""
        self._write("running")
        return read_run(self.path)

    def stop(self) -> float:
        """Stop the clock, and return how many seconds the run took."""
        self._end = time.monotonic()
        return self.seconds

    @property
    def seconds(self) -> float:
        """Return how long the run has taken, or took."""
        end = time.monotonic() if self._end is None else self._end
        return round(end - self._start, 3)

    def _write(self, status: Status) -> None:
        content = {
            "schema": SCHEMA,
            "command": self.command,
            "status": status,
            "seconds": self.seconds,
            "metrics": self._metrics,
            "tables": self._tables,
            "verdicts": list(self.verdicts),
        }
        files.write_json(self.place(RESULTS), content)


def _require_same_images(path: Path, before: object, now: object) -> None:
    """Raise InputError where the images or labels of a part are not those that a run began with.

    before, now: fingerprints by part; a part that only one of them has is not compared.
    """
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return
    shared_parts = sorted(before.keys() & now.keys())
    # images before labels: with other images the labels differ, too
    images_first = sorted(shared_parts, key=lambda part: part.endswith(LABELS))
    for part in images_first:
        if before[part] != now[part]:
            raise InputError(
                f"expected the {fingerprinted(part)} that the run in {path} began with, "
                "found others; give the same ones, or start again without --resume"
            )


def versions() -> dict[str, str]:
    """Return the versions that decide the numbers, of vitlens, python and libraries.

    The libraries are not imported.
    """
    installed = {"vitlens": __version__, "python": platform.python_version()}
    for library in ("torch", "torchvision", "timm", "numpy"):
        try:
            installed[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return installed


def settings(
    options: Any,
    run: RunOptions,
    *,
    models: "Sequence[Model]" = (),
    split: "Split | None" = None,
    others: "Sequence[Split]" = (),
    **more: object,
) -> dict[str, object]:
    """Return the settings of a run for RunFolder.opened, read back as `Record.config`.

    options: the dataclass that the command took.
    run: its run options as they hold in this process.
    models: the models of the run.
    split: the images of the run, None for a command without images.
    others: the other parts of the data that it reads.
    more: further entries of config.json.
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
    if split is None:
        return content
    # imported here, because a report is made without torch
    fingerprints_of = resolved("vitlens.data.identity:fingerprints_of")
    split_by_part = {part.part: part for part in (split, *others)}
    return {**content, "data": _split(split), "fingerprints": fingerprints_of(split_by_part)}


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


def require_plain(path: Path) -> None:
    """Raise InputError where a file or folder that a run writes is a link."""
    require_no_links(path, (*_TOP, *_NESTED))


def default_place(command: str, name_parts: Sequence[str]) -> Path:
    """Return a new path: reports/<command>-<parts>-<time>, for train runs/<parts>-<time>."""
    words = [re.sub(r"[^\w.=-]+", "-", Path(part).name).strip("-.") for part in name_parts]
    if command == "train":
        root = Path("runs")
    else:
        root = Path("reports")
        words = [command, *words]
    words.append(time.strftime("%Y%m%d-%H%M%S"))
    name = "-".join(filter(None, words))
    place = root / name
    count = 1
    while place.exists():  # two runs within a second
        count += 1
        place = root / f"{name}-{count}"
    return place


def make_folder(path: Path, *, overwrite: bool, option: str = "--out") -> Hold:
    """Make a run's folder, or empty that of an earlier run, and lock it.

    option: the option that names it. Raises OutputError and StorageError.
    """
    try:
        was_there = path.exists() or path.is_symlink()
        if was_there:
            require_free(path, overwrite=overwrite, option=option)
        path.mkdir(parents=True, exist_ok=True)
        hold = Hold(path)  # before it is emptied: another run may have it
        if was_there:
            _clear(path)
        files.write_probe(path)  # fails now, not after hours, if nothing can be written
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise files.storage_error(path, error) from error
        raise OutputError(
            f"expected a folder that can be written at {path}, found: {error.strerror}; choose "
            f"another {option}"
        ) from error
    return hold


def require_free(path: Path, *, overwrite: bool, option: str = "--out") -> None:
    """Raise OutputError unless a run may be made in a folder; nothing is changed.

    A folder may be new, that of an earlier run with --overwrite, or that of a run that failed
    before it had a result.

    option: the option that names it; only --out has --overwrite.
    """
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise OutputError(
            f"expected a new folder for {option}, found a file at {path}; choose another {option}"
        )
    if not overwrite and not _holds_no_results(path):
        hint = "choose another"
        if option == "--out":
            hint += ", or add --overwrite"
        raise OutputError(f"expected a new folder for {option}, found {path}; {hint}")
    is_run = (path / CONFIG).is_file() and (path / RESULTS).is_file()
    if any(path.iterdir()) and not is_run:
        raise OutputError(
            f"expected --overwrite of an earlier run, found other files in {path}; choose another "
            f"{option}"
        )
    require_plain(path)


def _clear(path: Path) -> None:
    """Remove the files of an earlier run.

    results.json is the first: without it, a half-emptied folder does not look like a finished run.
    """
    for pattern in (RESULTS, CONFIG, *_WRITTEN_FILES):
        for file in path.glob(pattern):
            if not file.is_dir():
                file.unlink()


def _holds_no_results(path: Path) -> bool:
    """Return True if a folder is that of a run that failed or was interrupted without a result.

    It must hold nothing else: no metric, figure, checkpoint or file of the user's.
    """
    if not (path / RESULTS).is_file():
        return False
    run_folders = []
    for file in path.rglob("*"):
        if file.is_dir() and not file.is_symlink():
            continue
        if file.name not in (CONFIG, RESULTS):
            return False
        if file.name == RESULTS:
            run_folders.append(file.parent)
    try:
        records = [read_run(folder) for folder in run_folders]
    except VitlensError:
        return False
    for record in records:
        if record.status not in ("failed", "interrupted"):
            return False
        results: Any = record.results
        if results["metrics"] or any(results["tables"].values()):
            return False
    return True


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files of a killed run.

    Those of this run's other processes are newer than this process.
    """
    for file in path.rglob(".*"):
        if files.is_temporary(file.name) and file.lstat().st_mtime < _PROCESS_START:
            file.unlink(missing_ok=True)
