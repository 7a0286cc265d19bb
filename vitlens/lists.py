"""Lists of methods, attacks, statistics and models, read from the registries.

They are free of torch, except that a pattern of `list_models` asks a library for its models.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from fnmatch import fnmatch
from typing import Any, Final

from vitlens.analysis.heads.registry import STATISTICS
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.adapters.registry import LIBRARIES, Library, is_of_library
from vitlens.attribution.registry import ATTRIBUTIONS, Attribution
from vitlens.errors import UnknownNameError
from vitlens.models.sources.registry import SOURCES, unknown_model
from vitlens.summary import as_html, as_text

_NEEDS: Final = {  # descriptions of the needs of attributions and of layers
    "chain": "attention in every layer, from the image to the classifier",
    "maps": "attention with a place in the image",
    "cam": "a layer of maps",
    "grid": "patches that attend to patches",
    "prefix": "tokens before the patches",
    "cls": "a CLS token",
}


_WEIGHTS: Final = {  # descriptions of a source's weights
    "own": "",
    "hub": "weights from its hub, or a file",
    "none": "training, or a file of weights",
}


@dataclass(frozen=True)
class Named:
    """An entry of a list of names.

    name: the name as it is typed.
    help: a description in a sentence.
    needs: requirements of the model or of the installation, "" for none.
    family: the group that it belongs to. This is the families of models of a method, the norm of an
        attack, the query rows of a statistic, or the source of a model.
    """

    name: str
    help: str
    needs: str = ""
    family: str = ""


class NameList(tuple[Named, ...]):
    """Entries in the registry's order, printed as a table; `names` are only the names."""

    title: str

    def __new__(cls, title: str, entries: Iterable[Named]) -> "NameList":
        """Return the entries under a title."""
        names = super().__new__(cls, entries)
        names.title = title
        return names

    def __getnewargs__(self) -> Any:
        """Return the arguments with which copy and pickle make the list again."""
        return self.title, tuple(self)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names, as arguments of a function."""
        return tuple(entry.name for entry in self)

    def __getitem__(self, index: Any) -> Any:
        selection = super().__getitem__(index)
        return NameList(self.title, selection) if isinstance(index, slice) else selection

    def __repr__(self) -> str:
        return as_text(f"{len(self)} {self.title}", [astuple(entry) for entry in self])

    def _repr_html_(self) -> str:
        columns = tuple(field.name for field in fields(Named))
        return as_html(f"{len(self)} {self.title}", columns, [astuple(entry) for entry in self])


def list_methods(pattern: str = "*") -> NameList:
    """Return the attribution methods whose names match a pattern, names of `method` in
    `vitlens.explain`.

    Without a pattern, another library is one entry, with its version or how to install it. A
    pattern with a colon asks the installed libraries for their names, and so imports them. Raises
    UnknownNameError if nothing matches.

    >>> import vitlens
    >>> vitlens.list_methods()[0].name
    'relevance'
    >>> vitlens.list_methods("captum:kernel*").names
    ('captum:kernel-shap',)
    """
    methods = list(ATTRIBUTIONS.values())
    library_entries: list[Named] = []
    for library in LIBRARIES.values():
        if is_of_library(pattern):
            if library.is_installed and fnmatch(library.name, pattern.partition(":")[0]):
                methods += library.entries().values()
        elif fnmatch(f"{library.name}:NAME", pattern):
            library_entries.append(_library_entry(library))
    matching = [_method_entry(method) for method in methods if fnmatch(method.name, pattern)]
    if not matching and not library_entries:
        raise UnknownNameError("method", pattern, (*ATTRIBUTIONS, *LIBRARIES))
    return NameList("methods", (*matching, *library_entries))


def _method_entry(method: Attribution) -> Named:
    description = f"{method.title}: {method.description}"
    gradients = "gradients" if method.gradients else None
    needs = _describe_needs(method.needs, gradients)
    return Named(method.name, description, needs, ", ".join(method.families))


def _library_entry(library: Library) -> Named:
    """Return an entry for all methods of a library, which is not imported."""
    needs = library.install
    version = "not installed"
    if library.is_installed:
        needs = ""
        version = library.version
    description = f"{library.package} ({version}): {library.description}"
    families = "any"
    if library.families:
        families = ", ".join(library.families)
    return Named(f"{library.name}:NAME", description, needs, families)


def list_attacks() -> NameList:
    """Return the attacks, names of `method` in `vitlens.attack`.

    >>> import vitlens
    >>> [attack.name for attack in vitlens.list_attacks() if attack.family == "l2"]
    ['pgd-l2', 'cw', 'deepfool']
    """
    entries = []
    for name, attack in ATTACKS.items():
        description = f"{attack.title}: {attack.description}"
        needs = "gradients" if attack.gradients else ""
        entries.append(Named(name, description, needs, attack.norm))
    return NameList("attacks", entries)


def list_statistics() -> NameList:
    """Return the statistics of heads, attributes of the result of `vitlens.statistics`.

    >>> import vitlens
    >>> vitlens.list_statistics()[1].help
    'spread of a row over all keys, ln(keys) when uniform (nats)'
    """
    entries = []
    for name, statistic in STATISTICS.items():
        unit = f" ({statistic.unit})" if statistic.unit else ""
        needs = _describe_needs(*statistic.needs)
        entries.append(Named(name, statistic.meaning + unit, needs, statistic.rows))
    return NameList("statistics", entries)


def list_models(pattern: str = "*") -> NameList:
    """Return the models that can be loaded with a name that matches a pattern or contains it.

    Without a pattern, a library is one entry. With a pattern, the libraries are imported and asked
    for their names. Raises UnknownNameError if nothing matches.

    >>> import vitlens
    >>> vitlens.list_models("*-digits").names
    ('vit-digits', 'cnn-digits')
    """
    entries: list[Named] = []
    for source in SOURCES.values():
        needs = [_WEIGHTS[source.weights]]
        if source.extra:
            needs.append(f"pip install 'vitlens[{source.extra}]'")
        is_library = bool(source.prefix)
        is_one_entry = is_library and pattern in ("", "*")
        names = [source.usage] if is_one_entry else source.matching(pattern)
        for name in names:
            entries.append(Named(name, source.help, "; ".join(filter(None, needs)), source.kind))
    if not entries:
        raise unknown_model(pattern, hint="vitlens.list_models()")
    return NameList("models", entries)


def _describe_needs(*needs: str | None) -> str:
    return "; ".join(_NEEDS.get(need, need) for need in needs if need)
