"""Where a run's folder lies: a new one, an earlier one that is taken over, and what a run may write in it."""

import errno
import re
import time
from collections.abc import Sequence
from pathlib import Path

from vitlens.errors import OutputError, VitlensError
from vitlens.files import CONFIG, RESULTS, RunRecord, is_temporary, read_run, storage_error
from vitlens.safe_paths import require_no_links

# All that a run ever writes; --overwrite takes these away and touches nothing else.
_OURS = (
    "report.md",
    "metrics.jsonl",
    "*.safetensors",
    "figures/*.png",
    "figures/*.svg",
    "figures/*.pdf",
    "panels/*.png",
    "arrays/*.npz",
    "checkpoint/*",
    "progress/*.npz",
    "kept/*.safetensors",
    "features/*.safetensors",
    "animations/*.gif",
    "animations/*.mp4",
    "tensorboard/events.out.*",
    "tensorboard/*/events.out.*",
    "tensorboard/*/hparams.yml",
    "points/*/seed-*/*",
    "points/*/seed-*/checkpoint/*",
)
# the files and folders at its top, which must be no links
_TOP = tuple(
    dict.fromkeys(
        (CONFIG, RESULTS, *(pattern.partition("/")[0] for pattern in _OURS if "/" in pattern or "*" not in pattern))
    )
)
_BEGAN = time.time()  # of this process: temporary files that are older were left by a killed one
_PARTS = ("chapters", "frozen", "full", "pruned")  # runs, and a model, within a run


def require_plain(path: Path) -> None:
    """Raise InputError where a file or folder that a run writes is a link, anywhere in its folder."""
    require_no_links(path, (*_TOP, *_PARTS))


def default_place(command: str, name_parts: Sequence[str]) -> Path:
    """reports/<command>-<name parts>-<time>, for train runs/<name parts>-<time>; of a name that is not there yet."""
    words = [re.sub(r"[^\w.=-]+", "-", Path(part).name).strip("-.") for part in name_parts]
    root, words = (Path("runs"), words) if command == "train" else (Path("reports"), [command, *words])
    name = "-".join([word for word in words if word] + [time.strftime("%Y%m%d-%H%M%S")])
    place, count = root / name, 1
    while place.exists():  # two runs within a second
        count += 1
        place = root / f"{name}-{count}"
    return place


def make_folder(path: Path, *, overwrite: bool) -> None:
    """Make a run's folder, or empty that of an earlier run. Raises OutputError and StorageError."""
    try:
        if path.exists() or path.is_symlink():
            _clear(path, overwrite=overwrite)
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".vitlens-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise storage_error(path, error) from error
        raise OutputError(
            f"expected a folder that can be written at {path}, found: {error.strerror}; choose another --out"
        ) from error


def _clear(path: Path, *, overwrite: bool) -> None:
    """Take an earlier run's files away, results.json first so that no moment shows a finished run."""
    if not path.is_dir():
        raise OutputError(f"expected a new folder for --out, found a file at {path}; choose another --out")
    if not overwrite and not _holds_no_results(path):
        raise OutputError(f"expected a new folder for --out, found {path}; choose another, or add --overwrite")
    if any(path.iterdir()) and not all((path / name).is_file() for name in (CONFIG, RESULTS)):
        raise OutputError(f"expected --overwrite of an earlier run, found other files in {path}; choose another --out")
    require_plain(path)
    for pattern in (RESULTS, CONFIG, *_OURS):
        for file in path.glob(pattern):
            if not file.is_dir():
                file.unlink()


def _holds_no_results(path: Path) -> bool:
    """Whether a folder is that of a run that failed or was interrupted before it had written any result.

    A new run may use such a folder. It must hold nothing else: no metric, figure, checkpoint or file of the user's.
    """
    files = [file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
    if not (path / RESULTS).is_file() or any(file.name not in (CONFIG, RESULTS) for file in files):
        return False
    try:
        records = [read_run(file.parent) for file in files if file.name == RESULTS]
    except VitlensError:
        return False
    return all(
        record.status in ("failed", "interrupted") and not record.results["metrics"] and not _rows(record)
        for record in records
    )


def _rows(record: RunRecord) -> int:
    """How many rows its tables have."""
    tables = record.results["tables"]
    return sum(map(len, tables.values())) if isinstance(tables, dict) else 0


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files of a killed run; those of this run's other processes are newer than this process."""
    for file in path.rglob(".*"):
        if is_temporary(file.name) and file.lstat().st_mtime < _BEGAN:
            file.unlink(missing_ok=True)
