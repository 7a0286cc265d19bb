"""Runs chapters one after another; one that the same models, images and code have made before is taken from a cache."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapters import CHAPTERS_FOLDER, ChapterRow
from vitlens.commands.run.flags import typed
from vitlens.commands.run.folder import versions
from vitlens.commands.run.options import DECIDING, RunOptions
from vitlens.errors import InputError
from vitlens.models.naming import ModelName
from vitlens.record import read_run

MOST: Final = 2 << 30  # bytes of the whole cache; the chapters used longest ago are dropped first
_PLACE: Final = "VITLENS_CACHE"  # environment variable: the folder of the cache
_ORIGIN: Final = ".origin"  # in a cached chapter: the folder in which it was made
_OPEN: Final = ("out", "overwrite", "quiet", "command", "at_least", "at_most")  # run options without effect on numbers
_TEXTS: Final = (".json", ".md", ".jsonl")  # files that name the folder of the run


def as_typed(model: ModelName) -> str:
    """A model's name as text, for the options of a command and its command line."""
    return f"{model.alias}={model.name}" + (f"@{model.weights}" if model.weights else "")


@dataclass(frozen=True)
class ChapterImages:
    """The images of all chapters: data, a name or a path, or images, files and folders without labels (data is None
    then). predicted: whether the commands that need labels use the models' predictions."""

    data: str | None = None
    images: tuple[str, ...] = ()
    predicted: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As options of the commands."""
        return {"data": self.data, "images": self.images}

    @property
    def digest(self) -> str:
        """A digest of the images: of files, their names, sizes and times of change; of a data set, its name."""
        if self.data is not None and not Path(self.data).exists():
            return self.data
        return files_digest(self.images or (str(self.data),))


class ChapterRunner:
    """Runs chapters in the folder of a larger run, and keeps the list of those done.

    cache: of chapters of earlier runs; None: every chapter is run.
    """

    def __init__(self, path: Path, run: RunOptions, cache: "ChapterCache | None" = None) -> None:
        self.path, self.run_options, self.cache = path, replace(run, overwrite=True, html=False), cache
        self.done: list[ChapterRow] = []

    def run(self, word: str, alias: str, options: Any, *, part: str = "") -> ChapterRow:
        """Run one command in its own folder.

        alias: of its one model, "" for all; part: which one it is, where one command has several chapters.
        """
        folder = f"{CHAPTERS_FOLDER}/{'-'.join(filter(None, (word, part, alias)))}"
        place = self.path / folder
        run = replace(options.run, out=place, at_least=(), at_most=())
        told = replace(options, run=RunOptions(**{name: getattr(run, name) for name in DECIDING}))
        whole = replace(options, run=replace(run, command=" ".join(("vitlens", word, *typed(told)))))
        cached = self.cache is not None and self.cache.restore(word, whole, place)
        if not cached:
            COMMANDS[word].measure(whole)
            if self.cache is not None:
                self.cache.keep(word, whole, place)
        seconds = float(str(read_run(place).results["seconds"]))
        self.done.append(ChapterRow(word, alias, folder, cached, part, seconds))
        return self.done[-1]

    def at_most(self, images: int) -> RunOptions:
        """The run options with this number of images, or that of --limit where it is smaller."""
        return replace(self.run_options, limit=min(self.run_options.limit or images, images))


def cache_folder() -> Path:
    """Where chapters are kept: $VITLENS_CACHE, or vitlens/chapters in the user's cache."""
    named = os.environ.get(_PLACE)
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitlens"


class ChapterCache:
    """Chapters of earlier runs. names: of models, ALIAS=NAME -> digest of the model; data: digest of the images."""

    def __init__(self, root: Path, names: Mapping[str, str], data: str) -> None:
        self.root, self.names, self.data = root / "chapters", dict(names), data

    def restore(self, word: str, options: Any, place: Path) -> bool:
        """Copy a chapter that was made with the same models, images and options to a place; whether there was one."""
        source = self.root / self._key(word, options)
        try:
            origin = (source / _ORIGIN).read_text(encoding="utf-8")
            whole = read_run(source).status == "done"
        except (OSError, InputError):
            return False
        if not whole:
            return False
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source, place, ignore=shutil.ignore_patterns(_ORIGIN))
        _rename(place, origin, str(place.parent.parent))
        os.utime(source)
        return True

    def keep(self, word: str, options: Any, place: Path) -> None:
        """Keep a finished chapter; a disk without room keeps none."""
        target = self.root / self._key(word, options)
        temporary = target.with_name(f".{target.name}-{os.getpid()}")
        try:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(place, temporary)
            (temporary / _ORIGIN).write_text(str(place.parent.parent), encoding="utf-8")
            temporary.rename(target)
            _drop_oldest(self.root)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)

    def _key(self, word: str, options: Any) -> str:
        """A digest of all that decides what the chapter holds."""
        fields = asdict(options)
        run = {name: value for name, value in fields.pop("run").items() if name not in _OPEN}
        text = json.dumps([word, fields, run, self.data, versions(), code_digest()], sort_keys=True, default=str)
        for name, digest in self.names.items():  # the alias stays: a chapter's metrics and arrays are named by it
            text = text.replace(json.dumps(name), json.dumps(f"{name.partition('=')[0]}={digest}"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def code_digest() -> str:
    """SHA-256 of vitlens' own source: other code makes other numbers."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def files_digest(paths: Iterable[str | Path]) -> str:
    """A digest of files and folders by name, size and time of change: their contents are not read."""
    digest = hashlib.sha256()
    for path in map(Path, paths):
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        for file in files:
            state = file.stat() if file.exists() else None
            known = (str(file), state and state.st_size, state and state.st_mtime_ns)
            digest.update(repr(known).encode())
    return digest.hexdigest()


def _rename(place: Path, before: str, now: str) -> None:
    """Name the folder of this run where the files of a chapter name that of an earlier one."""
    for path in place.rglob("*"):
        if path.is_file() and path.suffix in _TEXTS:
            text = path.read_text(encoding="utf-8")
            if before in text:
                path.write_text(text.replace(before, now), encoding="utf-8")


def _drop_oldest(root: Path) -> None:
    """Remove the chapters used longest ago until the cache holds at most MOST bytes."""
    sizes = {
        folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for folder in root.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    }
    whole = sum(sizes.values())
    for folder in sorted(sizes, key=lambda each: each.stat().st_mtime):
        if whole <= MOST:
            return
        shutil.rmtree(folder, ignore_errors=True)
        whole -= sizes[folder]
