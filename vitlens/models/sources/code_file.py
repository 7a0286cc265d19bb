"""Models built by a function in a Python file (`FILE.py:FUNCTION`), if --model-file names it.

`load` runs the file's code and calls the function. `restore` does so for a file that `save` wrote,
which names the function. Both record a digest of the code (`_code_digest`).
"""

import copy
import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from vitlens.errors import (
    InputError,
    ModelError,
    UnknownNameError,
    VitlensError,
    argument,
    by_caller,
    lacks_memory,
    nearest,
)
from vitlens.files import sha256
from vitlens.models.cutting import cut_heads
from vitlens.models.derived import for_classes
from vitlens.models.model import Model
from vitlens.models.rebuild import Architecture, rebuilt, seeded, versions
from vitlens.models.saved import fingerprint
from vitlens.models.sources.registry import SOURCES, ModelRequest
from vitlens.preprocessing import Preprocessing

_UNIQUE: Final = "_vitlens_model_file_"  # the beginning of the module names of such files
# modules in these folders are not the user's
_LIBRARIES: Final = (
    Path(sysconfig.get_path("stdlib")).resolve(),
    Path(__file__).resolve().parents[2],
)
# names of the user's modules that such a file has imported, by the file's module name
_IMPORTED: Final[dict[str, set[str]]] = {}
_MOST_LISTED: Final = 6  # functions in a message


def load(request: ModelRequest) -> Model:
    """Return the model that the function returns.

    The code of the file is run, so request.code_files must name it. Raises InputError if it is not
    named, ModelError for a file or function that is missing, takes arguments, raises or returns
    anything but a `vitlens.Model`.
    """
    text, _, name = request.name.rpartition(".py:")
    path = Path(f"{text}.py")
    full_name = request.name
    if not text or not name.isidentifier():
        raise ModelError(
            f"expected FILE.py:FUNCTION, found {full_name!r}; name the function that returns the "
            "model"
        )
    if os.path.normpath(full_name) not in map(os.path.normpath, _allowed_functions(request)):
        raise InputError(
            f"expected {_flag(full_name)} for {full_name}, whose code is run; add it where you "
            "trust the file"
        )
    if request.file is not None or request.random or request.image_size is not None:
        raise InputError(
            f"expected only {full_name}, whose function sets weights and size; leave out "
            f"{argument('weights')}, {argument('random_weights')} and {argument('image_size')}"
        )
    if not path.is_file():
        raise ModelError(f"expected a Python file, found nothing at {path}; check {_flag()}")
    modules_before = set(sys.modules)
    with seeded(request.seed), _running(path, full_name):
        module = _module(path)
        returned = _function(module, name, full_name)()
    digest = _code_digest(path, module, modules_before)
    if not isinstance(returned, Model):
        library = type(returned).__module__
        type_name = type(returned).__qualname__
        if library != "builtins" and not library.startswith(_UNIQUE):
            type_name = f"{library}.{type_name}"
        raise ModelError(
            f"expected {full_name}() to return a vitlens.Model, found {type_name}; "
            "return vitlens.wrap(module, image_size=..., mean=..., std=...)"
        )
    model = copy.copy(returned)  # the function may return the same object in every call
    model.alias = request.alias
    architecture = Architecture(
        kind="code",
        name=f"{path.name}:{name}",
        classes=len(model.classes),
        image_size=model.input_size,
        overrides={"code_sha256": digest},
    )
    model.architecture = asdict(architecture)
    notes = (
        *model.provenance.notes,
        f"made by {name}() of {path.name}, whose code was run (--model-file)",
    )
    model.provenance = replace(
        model.provenance,
        name=full_name,
        weights=path.name,
        # of the weights themselves, which the code may read from any file; that of the code is
        # part of the architecture
        sha256=fingerprint(model.module),
        versions=versions(),
        notes=notes,
    )
    return model


def restore(
    request: ModelRequest,
    architecture: Architecture,
    classes: tuple[str, ...],
    preprocessing: Preprocessing,
) -> Model:
    """Return the model that `save` described, built by the same function, without its weights.

    Raises InputError if --model-file does not name that function, and for random weights or another
    size.
    """
    matching = [
        name for name in _allowed_functions(request) if Path(name).name == architecture.name
    ]
    if not matching:
        raise InputError(
            f"expected {_flag()} with {architecture.name} for {request.name}, whose module that "
            f"function makes (its code is run); add {_flag(f'PATH/{architecture.name}')} where you "
            "trust the file"
        )
    if request.random or request.image_size not in (None, preprocessing.size):
        raise InputError(
            f"expected {request.name} with its weights and size, which {architecture.name} "
            f"decides; leave out @random and {argument('image_size')}"
        )
    # of ALIAS=PATH, both readings match: take the one that is a file, else the one without an alias
    existing = [name for name in matching if Path(name.rpartition(":")[0]).is_file()]
    function = existing[0] if existing else matching[-1]
    model = load(
        replace(request, source=SOURCES["code"], name=function, file=None, image_size=None)
    )
    notes = model.provenance.notes
    if model.architecture["overrides"] != architecture.overrides:
        notes = (
            *notes,
            f"{architecture.name.partition(':')[0]} has changed since the weights were saved",
        )
    model = for_classes(model, classes)
    if architecture.pruned:
        cut_heads(model.module, architecture.pruned)
    return rebuilt(model, model.module, architecture, replace(model.provenance, notes=notes))


def _flag(file: str | None = None) -> str:
    """Return the argument that names the files with code that may be run, as the caller types it.

    file: its value, or None for its name only.
    """
    if file is None:
        return argument("code_files", flag="model-file")
    return argument("code_files", _OneFile((file,)), flag="model-file")


class _OneFile(tuple[str, ...]):
    """A tuple of one file for a message.

    In Python, `argument` shows its repr, the tuple. On the command line it shows str, the file.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return self[0]


def _allowed_functions(request: ModelRequest) -> list[str]:
    """Return every FILE.py:FUNCTION whose code may be run, from ALIAS=FILE.py:FUNCTION too."""
    allowed = []
    for text in request.code_files:
        without_alias = text.partition("=")[2]
        allowed += [name for name in (text, without_alias) if name]
    return allowed


def _function(module: ModuleType, name: str, full_name: str) -> Callable[[], Any]:
    """Return the function of the file, which takes no arguments. Raises ModelError."""
    function = getattr(module, name, None)
    if not callable(function):
        public = []
        for other, value in vars(module).items():
            if inspect.isfunction(value) and not other.startswith("_"):
                public.append(other)
        suggested = nearest(name, public) or public[:_MOST_LISTED]
        near = ", ".join(suggested) or "no functions"
        raise ModelError(
            f"expected a function {name} in {module.__file__}, found none; it has {near}"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ModelError(
            f"expected {full_name} to need no arguments, found: {error}; give each a default value"
        ) from error
    except ValueError:  # a callable that does not give its signature
        pass
    return function  # type: ignore[no-any-return]


def _module(path: Path) -> ModuleType:
    """Return the file as a module; the same content is executed once in a process."""
    digest = hashlib.sha256(f"{path.resolve()}\0".encode() + path.read_bytes()).hexdigest()[:16]
    unique = f"{_UNIQUE}{digest}"
    if unique not in sys.modules:
        spec: Any = spec_from_file_location(unique, path)
        sys.modules[unique] = module_from_spec(spec)  # dataclasses and pickles look for it there
        try:
            spec.loader.exec_module(sys.modules[unique])
        except BaseException:
            del sys.modules[unique]
            raise
    return sys.modules[unique]


def _code_digest(path: Path, module: ModuleType, before: Collection[str]) -> str:
    """Return the SHA-256 of a file and, if there are any, of the user's modules that it imports.

    A module that another model file has already loaded counts if one of this file's globals leads
    to it.

    before: the names of the modules that were loaded before the file ran.
    """
    unique = module.__name__
    imported = _IMPORTED.setdefault(unique, set())
    for name in set(sys.modules) - set(before) - {unique}:
        if _is_of_user(sys.modules[name]):
            imported.add(name)
    # sys.modules shows only the first import in this process: modules that an earlier model file
    # has loaded are found through the globals of this file, and of the modules that these lead to
    imported_by_any = set().union(*_IMPORTED.values())
    reached = set(imported)
    pending = [unique, *imported]
    while pending:
        modules_in_globals = _named_modules(sys.modules.get(pending.pop()))
        for name in (modules_in_globals & imported_by_any) - reached:
            reached.add(name)
            pending.append(name)
    files = sorted({str(sys.modules[name].__file__) for name in reached if name in sys.modules})
    if not files:
        return sha256(path)
    digests = [sha256(path), *(sha256(Path(file)) for file in files)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _named_modules(module: ModuleType | None) -> set[str]:
    """Return the names of the modules in a module's globals, and of those that define globals."""
    names: set[str] = set()
    if module is None:
        return names
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            name = value.__name__
        else:
            name = getattr(value, "__module__", "")
        if isinstance(name, str):
            names.add(name)
    return names


def _is_of_user(module: ModuleType) -> bool:
    """Return True for a module in a file outside the libraries and vitlens."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not Path(file).is_file():
        return False
    path = Path(file).resolve()
    is_installed = "site-packages" in path.parts or "dist-packages" in path.parts
    return not is_installed and not any(path.is_relative_to(folder) for folder in _LIBRARIES)


@contextmanager
def _running(path: Path, full_name: str) -> Iterator[None]:
    """Run the file's code as a script: it may import its neighbours.

    Its errors become one line, and it prints on stderr, as stdout has only results.
    """
    previous_path = list(sys.path)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with redirect_stdout(sys.stderr):
            yield
    except VitlensError as error:  # raised by vitlens.wrap; its message says what to do
        error_class = type(error)
        if isinstance(error, UnknownNameError):  # which takes a name, not a message
            error_class = InputError
        raise error_class(f"{error} (in {full_name})") from error
    except (Exception, SystemExit) as error:
        if lacks_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        fault = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        hint = by_caller(python="", command="; --debug shows where")
        raise ModelError(f"expected the code of {full_name} to run, found {fault}{hint}") from error
    finally:
        sys.path[:] = previous_path
