"""Other libraries whose attribution methods vitlens runs as `LIBRARY:NAME`; free of torch.

A library is imported when one of its methods, or the list of them, is asked for. To add one, write
its adapter here and one entry. An adapter has two functions: `methods()` returns the library's
methods as entries of the registry, by their full names, and `library_maps` computes their maps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from vitlens.errors import InputError, UnknownNameError, in_one_line
from vitlens.references import resolved

if TYPE_CHECKING:
    from vitlens.attribution.registry import Attribution

ALL: Final = "all"  # after the colon: every method of the library
_PATENT: Final = (
    "layer-wise relevance propagation is patented (US 12061966 B2, EP 3271863 B1): ask the holders "
    "before commercial use"
)


@dataclass(frozen=True)
class Library:
    """A library with attribution methods.

    name: the word before the colon.
    description: its methods, in a sentence.
    package: its name on PyPI.
    module: its name in an import.
    extra: the extra of vitlens that installs it.
    adapter: the module of vitlens with `methods()` and `library_maps`.
    families: the families of models that it supports; empty for all.
    note: a note about licences and patents.
    noted: the methods that the note is about, by their full names; empty for all.
    remarks: patterns of warnings about its normal work, which are not shown.
    """

    name: str
    description: str
    package: str
    module: str
    extra: str
    adapter: str
    families: tuple[str, ...] = ()
    note: str = ""
    noted: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Return True if it can be imported; it is not imported."""
        return find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """Return its installed version."""
        return metadata.version(self.package)

    @property
    def install(self) -> str:
        """Return the command that installs it."""
        return f"pip install 'vitlens[{self.extra}]'"

    def entries(self) -> "Mapping[str, Attribution]":
        """Return its methods, by their full names.

        Raises InputError where it is not installed, or cannot be imported.
        """
        if not self.is_installed:
            raise InputError(
                f"expected the library {self.package} for the methods {self.name}:NAME, found "
                f"none; type {self.install}"
            )
        return _entries(self)


_ENTRIES: Final = (
    Library(
        name="grad-cam",
        description="class activation maps, at the target layer of gradcam",
        package="grad-cam",
        module="pytorch_grad_cam",
        extra="grad-cam",
        adapter="vitlens.attribution.adapters.grad_cam",
    ),
    Library(
        name="captum",
        description="gradients, perturbations, Shapley values and, for CNNs, propagation rules",
        package="captum",
        module="captum",
        extra="captum",
        adapter="vitlens.attribution.adapters.captum",
        note=_PATENT,
        noted=("captum:lrp",),
        remarks=(r"Setting (forward, )?backward hooks",),  # DeepLift, guided backpropagation
    ),
    Library(
        name="zennit",
        description="layer-wise relevance propagation of CNNs, by composites of rules",
        package="zennit",
        module="zennit",
        extra="lrp",
        adapter="vitlens.attribution.adapters.zennit",
        families=("cnn",),
        note=f"the library zennit is under the LGPL 3; {_PATENT}",
    ),
    Library(
        name="autolrp",
        description="layer-wise relevance propagation through every operation, attention included",
        package="autoLRP",
        module="autolrp",
        extra="lrp",
        adapter="vitlens.attribution.adapters.autolrp",
        note=f"the library autoLRP is under the MIT licence; {_PATENT}",
        remarks=(r"In-place .* for LRP: the input is not modified",),
    ),
)
LIBRARIES: Final[Mapping[str, Library]] = MappingProxyType(
    {library.name: library for library in _ENTRIES}
)


def is_of_library(name: str) -> bool:
    """Return True for a name with a library before a colon."""
    return ":" in name


def library_of(name: str) -> Library:
    """Return the library of the name of a method.

    Raises UnknownNameError for an unknown library.
    """
    prefix = name.partition(":")[0]
    if prefix not in LIBRARIES:
        raise UnknownNameError("library of methods", prefix, LIBRARIES)
    return LIBRARIES[prefix]


def note_of(name: str) -> str:
    """Return the note about licences and patents of a method; "" where there is none."""
    library = LIBRARIES.get(name.partition(":")[0])
    if library is None or (library.noted and name not in library.noted):
        return ""
    return library.note


def library_method(name: str) -> "Attribution":
    """Return the method of this name, LIBRARY:NAME.

    Raises InputError for a library that is not installed, UnknownNameError for an unknown name.
    """
    entries = library_of(name).entries()
    if name not in entries:
        raise UnknownNameError("method", name, entries)
    return entries[name]


def library_names(name: str) -> tuple[str, ...]:
    """Return the methods that a name means: itself, or those of its library for LIBRARY:all.

    Raises as `library_method`.
    """
    library = library_of(name)
    if name == f"{library.name}:{ALL}":
        return tuple(library.entries())
    return (library_method(name).name,)


@cache
def _entries(library: Library) -> "Mapping[str, Attribution]":
    reinstall = f"its installed version may not fit; type {library.install} --upgrade"
    with in_one_line(f"a library {library.package} that can be imported", reinstall, InputError):
        import_module(library.module)
    entries: Mapping[str, Attribution] = resolved(f"{library.adapter}:methods")()
    return MappingProxyType(dict(entries))
