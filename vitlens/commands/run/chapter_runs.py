"""Run chapters one after another, and take those from a cache that were made before.

`ChapterRunner` runs them. `ChapterCache` keeps finished ones, under a digest of all that decides
their numbers: models, images, options, machine, libraries and code.
"""

import ctypes
import gc
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters import ChapterRow
from vitlens.commands.run.flags import typed
from vitlens.commands.run.options import DECIDING, RunOptions
from vitlens.commands.run.publish import write_report
from vitlens.data.arrays import medmnist_file
from vitlens.data.registry import SETS
from vitlens.devices import resolve_device
from vitlens.errors import VitlensError
from vitlens.files import read_json, write_json
from vitlens.models.model_names import ModelName, parse_model
from vitlens.record import CHAPTERS_FOLDER, CONFIG, read_run
from vitlens.references import resolved
from vitlens.typed import read_as

MOST: Final = 2 << 30  # bytes of the whole cache; the chapters used longest ago are dropped first
_CACHE_VARIABLE: Final = "VITLENS_CACHE"  # environment variable: the folder of the cache
# in a cached chapter: which copy it is, and the names of the models when it was made
_KEPT: Final = ".kept.json"
# run options without effect on numbers
_WITHOUT_EFFECT: Final = ("out", "overwrite", "quiet", "command", "at_least", "at_most")
# commands whose numbers are of this machine and moment, and never taken from the cache
_TIMED: Final = ("profile",)
# seconds after which what a killed process left in the cache is removed
_STALE: Final = 24 * 3600.0


@dataclass(frozen=True)
class PlannedChapter:
    """A chapter that will be run.

    word: the command that makes it.
    alias: the alias of its one model, "" for all.
    options: the options of the command.
    cached: True if an earlier run made it.
    """

    word: str
    alias: str
    options: Any
    cached: bool


def as_typed(model: ModelName) -> str:
    """Return a model's name as text, for the options of a command and its command line."""
    return f"{model.alias}={model.name}" + (f"@{model.weights}" if model.weights else "")


@dataclass(frozen=True)
class ChapterImages:
    """The images of all chapters.

    data: a name or a path, None for images without labels.
    images: files and folders of images without labels.
    predicted: True if the commands that need labels use the models' predictions.
    data_dir: where downloaded data is kept.
    """

    data: str | None = None
    images: tuple[str, ...] = ()
    predicted: bool = False
    data_dir: Path = Path("data")

    @property
    def options(self) -> dict[str, Any]:
        """Return the images as options of the commands."""
        return {"data": self.data, "images": self.images}

    @property
    def digest(self) -> str:
        """Return a digest of the images: of their files, or the name of a data set that is drawn.

        A data set that is not there yet is downloaded first, so that a later run finds the same
        files.
        """
        if self.data is None:
            return files_digest(self.images)
        if self.data in SETS:
            if not SETS[self.data].download:
                return self.data
            resolved("vitlens.data.torchvision_sets:download")(self.data, self.data_dir)
            return f"{self.data} {files_digest([self.data_dir])}"
        path = Path(self.data).expanduser()
        if not path.exists():
            path = medmnist_file(self.data, self.data_dir)
        return files_digest([path])


class ChapterRunner:
    """Runs chapters in the folder of a larger run, and keeps the list of those done.

    path: the folder of the larger run.
    run: its run options.
    cache: the cache of chapters of earlier runs, None to run every chapter.
    on_done: called with the list of those done after each chapter.
    """

    def __init__(
        self,
        path: Path,
        run: RunOptions,
        cache: "ChapterCache | None" = None,
        *,
        on_done: Callable[[Sequence[ChapterRow]], object] = lambda _: None,
    ) -> None:
        self.path = path
        # a study that goes on replaces a chapter that was stopped; only the larger run has a page
        self.run_options = replace(run, overwrite=True, html=False)
        self.cache = cache
        self.on_done = on_done
        self.done: list[ChapterRow] = []

    def run(self, word: str, alias: str, options: Any, *, part: str = "") -> ChapterRow:
        """Run one command in its own folder, or copy that folder from the cache.

        word: the command.
        alias: the alias of its one model, "" for all.
        part: which one it is, where one command has several chapters.
        """
        name = "-".join(filter(None, (word, part, alias)))
        folder = f"{CHAPTERS_FOLDER}/{name}"
        place = self.path / folder
        chapter_options = self.with_folder(word, options, place)
        cache = None if word in _TIMED else self.cache
        was_cached = cache is not None and cache.restore(word, chapter_options, place)
        if not was_cached:
            COMMANDS[word].measure(chapter_options)
            if cache is not None:
                cache.keep(word, chapter_options, place)
        seconds = float(str(read_run(place).results["seconds"]))
        row = ChapterRow(word, alias, folder, cached=was_cached, part=part, seconds=seconds)
        self.done.append(row)
        return_free_memory()
        self.on_done(self.done)
        return row

    def with_folder(self, word: str, options: Any, place: Path) -> Any:
        """Return the options of a chapter with its folder, and the command line that makes only it.

        Requirements (--at-least, --at-most) are those of the larger run.
        """
        run = replace(options.run, out=place, at_least=(), at_most=())
        # the command line repeats only the run options that change results
        deciding = {name: getattr(run, name) for name in DECIDING}
        options_to_type = replace(options, run=RunOptions(**deciding))
        command_line = " ".join(("vitlens", word, *typed(options_to_type)))
        return replace(options, run=replace(run, command=command_line))

    def limited_to(self, images: int) -> RunOptions:
        """Return the run options with at most this number of images, and at most --limit."""
        limit = self.run_options.limit
        if limit is None or limit > images:
            limit = images
        return replace(self.run_options, limit=limit)


def return_free_memory() -> None:
    """Return freed memory to the system, where its C library can.

    glibc keeps what a chapter has freed, 0.2 to 0.6 GB. The next chapter asks for other sizes and
    would need new memory in addition.
    """
    gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None where the C library is not glibc
    if trim is not None:
        trim(0)


def cache_folder() -> Path:
    """Return the folder of the cache: $VITLENS_CACHE, or vitlens in the user's cache."""
    chosen_folder = os.environ.get(_CACHE_VARIABLE)
    if chosen_folder:
        return Path(chosen_folder)
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"  # an empty variable counts as none
    return Path(user_cache).expanduser() / "vitlens"


@dataclass(frozen=True)
class _Kept:
    """The content of _KEPT, a file written into a cached chapter.

    copy: a random name of this copy, by which a replaced one is noticed.
    names: the names of the models when the chapter was made, ALIAS=NAME.
    """

    copy: str
    names: tuple[str, ...]


def _read_kept(folder: Path) -> _Kept:
    path = folder / _KEPT
    return read_as(_Kept, read_json(path), source=str(path), hint="remove the cache")


class ChapterCache:
    """Chapters of earlier runs, each a folder named by the digest of what it was made from.

    root: the folder of the cache.
    digest_by_model: the digest of each model of the run, by its name, ALIAS=NAME.
    data: the digest of the images.

    Other processes may read and write it at the same time: a chapter is copied to a temporary place
    and renamed.
    """

    def __init__(self, root: Path, digest_by_model: Mapping[str, str], data: str) -> None:
        self.root = root / "chapters"
        self.digest_by_model = dict(digest_by_model)
        self.data = data

    def holds(self, word: str, options: Any) -> bool:
        """Return True if a chapter was made with the same models, images and options."""
        source = self.root / self._key(word, options)
        try:
            _read_kept(source)
            return word not in _TIMED and read_run(source).status == "done"
        except (OSError, VitlensError):
            return False

    def restore(self, word: str, options: Any, place: Path) -> bool:
        """Copy a chapter that was made with the same models, images and options to a place.

        Returns True where there was a whole one; what cannot be read or written counts as not
        cached.
        """
        source = self.root / self._key(word, options)
        temporary = place.with_name(_temporary_name(place))
        try:
            entry = _read_kept(source)
            if read_run(source).status != "done":
                return False
            shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(_KEPT))
            if _read_kept(source) != entry:  # another process has replaced it while it was copied
                return False
            config = read_json(temporary / CONFIG)
            write_json(temporary / CONFIG, self._update_config(config, entry.names, options))
            write_report(temporary)
            shutil.rmtree(place, ignore_errors=True)
            temporary.rename(place)
        except (OSError, VitlensError):
            return False
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            os.utime(source)  # used now: _drop_oldest removes it late
        return True

    def keep(self, word: str, options: Any, place: Path) -> None:
        """Keep a finished chapter; a disk without room keeps none."""
        target = self.root / self._key(word, options)
        temporary = target.with_name(_temporary_name(target))
        try:
            shutil.copytree(place, temporary)
            kept = _Kept(uuid.uuid4().hex, names=tuple(self.digest_by_model))
            write_json(temporary / _KEPT, asdict(kept))
            _remove_at_once(target)
            temporary.rename(target)
            _drop_oldest(self.root)
        except (OSError, VitlensError):
            return
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _update_config(
        self, config: dict[str, Any], old_names: Sequence[str], options: Any
    ) -> dict[str, Any]:
        """Return a cached chapter's config.json with the model names and run options of this run.

        old_names: the names of the models when the chapter was made, ALIAS=NAME.
        """
        # Names are as they were typed, ALIAS=NAME. "options" holds them so, but an entry of
        # "models" has alias and name apart.
        old_by_alias = {parse_model(name).alias: name for name in old_names}
        new_by_alias = {parse_model(name).alias: name for name in self.digest_by_model}
        shared = old_by_alias.keys() & new_by_alias.keys()
        renamed = {old_by_alias[alias]: new_by_alias[alias] for alias in shared}
        settings = _rename_models(config.get("options", {}), renamed)
        settings = {**settings, "run": _as_json(asdict(options.run))}
        models = []
        for model in config.get("models", ()):
            alias = model["alias"]
            if alias in shared:
                old_name = parse_model(old_by_alias[alias]).name
                new_name = parse_model(new_by_alias[alias]).name
                if model.get("name") == old_name:
                    model = {**model, "name": new_name}
            models.append(model)
        return {
            **config,
            "command_line": options.run.command,
            "options": settings,
            "models": models,
        }

    def _key(self, word: str, options: Any) -> str:
        """Return a digest of all that decides what the chapter holds."""
        fields = _as_json(asdict(options))
        run_fields = fields.pop("run")
        device = str(resolve_device(options.run.device))
        run_settings = {}
        for name, value in run_fields.items():
            if name not in _WITHOUT_EFFECT:
                run_settings[name] = value
        run_settings["device"] = device
        # a model counts by its digest and its alias, which names the chapter's metrics and arrays
        digest_by_name = {}
        for name, digest in self.digest_by_model.items():
            digest_by_name[name] = f"{parse_model(name).alias}={digest}"
        optional_files = (options.run.labels, getattr(options, "dictionary", None))
        input_files = [path for path in optional_files if path]
        content = [
            word,
            _rename_models(fields, digest_by_name),
            run_settings,
            self.data,
            files_digest(input_files),
            machine(device),
            libraries(),
            code_digest(),
        ]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _as_json(value: Any) -> Any:
    """Return a value as it is read back from JSON."""
    return json.loads(json.dumps(value, default=str))


def _rename_models(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value of JSON in which each text that is one of these names is replaced.

    names: the new name by the old one. A text that only contains a name stays.
    """
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return [_rename_models(item, names) for item in value]
    if isinstance(value, dict):
        return {key: _rename_models(item, names) for key, item in value.items()}
    return value


def machine(device: str) -> tuple[str, ...]:
    """Return what changes the last digits: device, its name, processor instructions, threads."""
    device_name = ""
    if device.startswith("cuda"):
        device_name = torch.cuda.get_device_name(device)
    instructions = torch.backends.cpu.get_cpu_capability()
    return device, device_name, instructions, str(torch.get_num_threads())


@cache
def libraries() -> tuple[str, ...]:
    """Return all installed libraries with their versions.

    A command, or a model's code, may import any of them.
    """
    return tuple(
        sorted({f"{library.name} {library.version}" for library in metadata.distributions()})
    )


@cache
def code_digest() -> str:
    """Return the SHA-256 of the source of vitlens, because other code may give other numbers."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def files_digest(paths: Iterable[str | Path]) -> str:
    """Return a digest of files and folders by name, size and times of change.

    Their contents are not read, because data sets are large.
    """
    digest = hashlib.sha256()
    for path in map(Path, paths):
        files: Iterable[Path] = _files_below(path) if path.is_dir() else [path]
        for file in files:
            state = None
            if file.exists():
                status = file.stat()
                state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            entry = repr((str(file), str(file.resolve()), state))
            digest.update(entry.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files_below(folder: Path) -> Iterator[Path]:
    """Return folders and files at any depth, sorted, also behind links.

    Each folder is entered once, so that a loop of links ends.
    """
    entered = set[Path]()
    for place, folders, files in os.walk(folder, followlinks=True):
        yield Path(place)
        real_place = Path(place).resolve()
        if real_place in entered:
            folders.clear()  # os.walk enters only what is left in this list
            continue
        entered.add(real_place)
        folders.sort()
        for name in sorted(files):
            yield Path(place, name)


def _temporary_name(path: Path) -> str:
    return f".{path.name}-{uuid.uuid4().hex[:8]}"


def _remove_at_once(folder: Path) -> None:
    """Remove a chapter so that another process finds it whole or not at all."""
    aside = folder.with_name(_temporary_name(folder))
    with suppress(FileNotFoundError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _drop_oldest(root: Path) -> None:
    """Remove the chapters used longest ago until the cache holds at most MOST bytes.

    Temporary folders that a killed process left are removed, too.
    """
    sizes: dict[Path, int] = {}
    last_uses: dict[Path, float] = {}
    for folder in root.iterdir():
        is_temporary = folder.name.startswith(".")  # as _temporary_name
        with suppress(FileNotFoundError):  # another process has removed it
            last_uses[folder] = folder.stat().st_mtime
            if not is_temporary:
                files = [file for file in folder.rglob("*") if file.is_file()]
                sizes[folder] = sum(file.stat().st_size for file in files)
            elif time.time() - last_uses[folder] > _STALE:
                shutil.rmtree(folder, ignore_errors=True)
    total = sum(sizes.values())
    for folder in sorted(sizes, key=lambda path: last_uses[path]):
        if total <= MOST:
            return
        _remove_at_once(folder)
        total -= sizes[folder]
