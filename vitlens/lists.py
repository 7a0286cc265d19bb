"""What can be named: `list_methods`, `list_attacks`, `list_statistics` and `list_models`, read from
the registries.

Free of torch, but for a pattern of `list_models` that asks a library for the names of its models.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

from vitlens.analysis.heads.registry import STATISTICS
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.models.sources.registry import SOURCES, unknown_model
from vitlens.summary import as_html, as_text

_NEEDS: Final = {  # of attributions and of layers, in words
    "chain": "attention in every layer, from the image to the classifier",
    "maps": "attention with a place in the image",
    "cam": "a layer of maps",
    "grid": "patches that attend to patches",
    "prefix": "tokens before the patches",
    "cls": "a CLS token",
}


@dataclass(frozen=True)
class Named:
    """Something that can be named.

    name: as it is typed; help: what it is, in a sentence; needs: what it requires of the model or
    of the installation, "" for nothing; family: the kind it belongs to: of methods the families of
    models, of attacks the norm, of statistics the query rows, of models the source.
    """

    name: str
    help: str
    needs: str = ""
    family: str = ""


class NameList(tuple[Named, ...]):
    """Entries in the registry's order, shown as a table; `names` are the names alone."""

    title: str

    def __new__(cls, title: str, entries: Iterable[Named]) -> "NameList":
        """Return the entries under a title."""
        found = super().__new__(cls, entries)
        found.title = title
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names, to be given to a function."""
        return tuple(entry.name for entry in self)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return NameList(self.title, found) if isinstance(index, slice) else found

    def __repr__(self) -> str:
        return as_text(f"{len(self)} {self.title}", [astuple(entry) for entry in self])

    def _repr_html_(self) -> str:
        columns = tuple(field.name for field in fields(Named))
        return as_html(f"{len(self)} {self.title}", columns, [astuple(entry) for entry in self])


def list_methods() -> NameList:
    """Return the attribution methods, names of `method` in `vitlens.explain`.

    >>> import vitlens
    >>> vitlens.list_methods()[0].name
    'relevance'
    """
    entries = []
    for name, method in ATTRIBUTIONS.items():
        needs = _needs(method.needs, "gradients" if method.gradients else None)
        entries.append(
            Named(name, f"{method.title}: {method.description}", needs, ", ".join(method.families))
        )
    return NameList("methods", entries)


def list_attacks() -> NameList:
    """Return the attacks, names of `method` in `vitlens.attack`.

    >>> import vitlens
    >>> [attack.name for attack in vitlens.list_attacks() if attack.family == "l2"]
    ['pgd-l2', 'cw', 'deepfool']
    """
    entries = [
        Named(
            name,
            f"{attack.title}: {attack.description}",
            "gradients" if attack.gradients else "",
            attack.norm,
        )
        for name, attack in ATTACKS.items()
    ]
    return NameList("attacks", entries)


def list_statistics() -> NameList:
    """Return the statistics of heads, attributes of what `vitlens.statistics` gives.

    >>> import vitlens
    >>> vitlens.list_statistics()[1].help
    'spread of a row over all keys, ln(keys) when uniform (nats)'
    """
    entries = []
    for name, statistic in STATISTICS.items():
        unit = f" ({statistic.unit})" if statistic.unit else ""
        entries.append(
            Named(name, statistic.meaning + unit, _needs(*statistic.needs), statistic.rows)
        )
    return NameList("statistics", entries)


def list_models(pattern: str = "*") -> NameList:
    """Return the models that can be loaded, by names that match a pattern or contain it; without
    one, a library is one entry.

    A pattern asks the libraries for their names, and so imports them. Raises UnknownNameError where
    nothing matches.

    >>> import vitlens
    >>> vitlens.list_models("*-digits").names
    ('vit-digits', 'cnn-digits')
    """
    entries: list[Named] = []
    for source in SOURCES.values():
        needs = {
            "own": "",
            "hub": "weights from its hub, or a file",
            "none": "training, or a file of weights",
        }
        needed = [
            needs[source.weights],
            f"pip install 'vitlens[{source.extra}]'" if source.extra else "",
        ]
        whole = pattern in ("", "*") and source.prefix
        for name in [source.usage] if whole else source.matching(pattern):
            entries.append(Named(name, source.help, "; ".join(filter(None, needed)), source.kind))
    if not entries:
        raise unknown_model(pattern, hint="vitlens.list_models()")
    return NameList("models", entries)


def _needs(*needs: str | None) -> str:
    return "; ".join(_NEEDS.get(need, need) for need in needs if need)
