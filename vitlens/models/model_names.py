"""How a model is named: `[alias=]NAME[@weights]`; weights are a file, the folder of a LoRA adapter,
or FILE@FOLDER.

An alias names a model in metrics, tables and files, so it is restricted: letters, digits, ".", "_"
and "-", beginning with a letter or digit, at most ALIAS_LENGTH characters. An alias that the user
types is refused otherwise; one that is derived from the model's name is made to fit.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitlens.errors import InputError
from vitlens.models.library_folders import is_adapter
from vitlens.models.sources.registry import SOURCES, WEIGHTS_FILES
from vitlens.typed import is_name

RANDOM = "random"  # instead of a weights file: random weights
ALIAS_LENGTH = 80
# functions whose name says nothing of their model
_USUAL = ("build", "main", "model", "get_model", "make_model")
_DERIVED_LENGTH = 60  # of an alias derived from a name, to which a number may be added
ALIAS_RULE = (
    "letters, digits, '.', '_' and '-', beginning with a letter or digit, at most "
    f"{ALIAS_LENGTH} characters"
)
_ALIAS = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)$")


@dataclass(frozen=True)
class ModelName:
    """The parts of a model's name.

    name: without alias and weights.
    alias: its name in reports.
    weights: the file or folder after @, "random", or None.
    """

    name: str
    alias: str
    weights: str | None = None


def parse_model(text: str) -> ModelName:
    """Return the parts of `[alias=]NAME[@weights]`.

    Without an alias, it is derived from the last part of the name. "=" and "@" in the name of
    an existing file or folder are part of it.
    """
    typed, rest = _alias_of(text)
    name, weights = _weights_of(rest)
    if not name:
        raise InputError(
            f"expected MODEL as [alias=]NAME[@weights], found {text!r}; see vitlens models"
        )
    alias = typed or _last_part(name)
    if not typed and weights == RANDOM:
        alias += f"-{RANDOM}"
    if not is_name(alias):  # it is part of file names
        raise InputError(
            f"expected a name for files and reports, found {alias[:80]!r}; write alias={name[:80]}"
        )
    return ModelName(name, alias, weights or None)


def _alias_of(text: str) -> tuple[str | None, str]:
    """Return the alias that was typed, or None, and the rest."""
    match = _ALIAS.match(text)
    if match is None or os.path.lexists(text) or os.path.lexists(_weights_of(text)[0]):
        return None, text
    return match[1], match[2]


def _weights_of(text: str) -> tuple[str, str]:
    """Return the name and the weights after it, "" for none: divided at the first "@" behind an
    existing path.
    """
    if os.path.lexists(text):
        return text, ""
    for position, letter in enumerate(text):
        if letter == "@" and os.path.lexists(text[:position]):
            return text[:position], text[position + 1 :]
    name, _, weights = text.partition("@")
    return name, weights


def divide_weights(text: str) -> tuple[str | None, str | None]:
    """Return the weights file and the folder of an adapter in FILE, FOLDER or FILE@FOLDER.

    None stands for the one that is not there.
    """
    if is_adapter(Path(text)):
        return None, text
    file, at, folder = text.rpartition("@")
    if at and not os.path.lexists(text) and is_adapter(Path(folder)):
        return file, folder
    return text, None


def parse_models(texts: Sequence[str]) -> tuple[ModelName, ...]:
    """Return several names with unique aliases: typed ones stay unchanged, derived ones get a
    number where needed.

    Raises InputError for an alias given twice.
    """
    parsed = [parse_model(text) for text in texts]
    aliases = [_alias_of(text)[0] for text in texts]
    typed = [alias for alias in aliases if alias is not None]
    twice = {alias for alias in typed if typed.count(alias) > 1}
    if twice:
        raise InputError(
            f"expected every alias once, found {sorted(twice)[0]!r} twice; write first=NAME "
            "second=NAME"
        )
    used = set(typed)
    unique = []
    for typed_alias, model in zip(aliases, parsed):
        alias = model.alias
        number = 2
        while alias in used and typed_alias is None:
            alias = f"{model.alias}-{number}"
            number = number + 1
        used.add(alias)
        unique.append(replace(model, alias=alias))
    return tuple(unique)


def require_rule(texts: Sequence[str]) -> None:
    """Raise InputError for an alias that does not follow ALIAS_RULE; for all names, before anything
    is loaded.

    Text before "=" is not an alias where it is part of an existing file or folder, or of a name
    with a source's prefix.
    """
    prefixes = tuple(source.prefix for source in SOURCES.values() if source.prefix)
    for text in texts:
        alias, equals, _ = text.partition("=")
        name, weights = _weights_of(text)
        if not equals or text.startswith(prefixes) or os.path.lexists(name):
            continue
        if "@" in alias and os.path.lexists(weights):  # the "=" is one of the weights' name
            continue
        if not _ALIAS.match(f"{alias}=NAME") or len(alias) > ALIAS_LENGTH:
            raise InputError(f"expected alias=NAME with an alias of {ALIAS_RULE}, found {alias!r}")


def _last_part(name: str) -> str:
    """Return the last part of a name as a valid alias."""
    file, _, function = name.rpartition(".py:")
    last = Path(name.split(":")[-1]).name or name
    if function in _USUAL:
        last = Path(file).name
    if last in (".", "..", "/"):
        last = Path(name).resolve().name or "model"
    for suffix in WEIGHTS_FILES:
        if last.endswith(suffix):
            last = last.removesuffix(suffix)
            break
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-").rstrip("-")
    return plain[:_DERIVED_LENGTH] or "model"
