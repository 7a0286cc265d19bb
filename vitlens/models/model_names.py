"""The names of models: `[alias=]NAME[@weights]`.

Weights are a file, the folder of a LoRA adapter, or FILE@FOLDER. An alias names a model in metrics,
tables and files, so it is restricted: letters, digits, ".", "_" and "-", beginning with a letter or
digit, at most ALIAS_LENGTH characters. Another alias that the user types is refused. An alias
derived from the model's name is made to fit.
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

RANDOM = "random"  # typed in place of a weights file for random weights
ALIAS_LENGTH = 80
# names of functions that do not describe their model
_GENERIC_NAMES = ("build", "main", "model", "get_model", "make_model")
# most characters of an alias derived from a name; a number may be added to it
_DERIVED_LENGTH = 60
ALIAS_RULE = (
    "letters, digits, '.', '_' and '-', beginning with a letter or digit, at most "
    f"{ALIAS_LENGTH} characters"
)
_ALIAS = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)$")


@dataclass(frozen=True)
class ModelName:
    """The parts of a model's name.

    name: the name without alias and weights.
    alias: the model's name in reports.
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
    typed_alias, name_and_weights = _alias_of(text)
    name, weights = _weights_of(name_and_weights)
    if not name:
        raise InputError(
            f"expected MODEL as [alias=]NAME[@weights], found {text!r}; see vitlens models"
        )
    alias = typed_alias or _last_part(name)
    if not typed_alias and weights == RANDOM:
        alias += f"-{RANDOM}"
    if not is_name(alias):  # it is part of file names
        raise InputError(
            f"expected a name for files and reports, found {alias[:80]!r}; write alias={name[:80]}"
        )
    return ModelName(name, alias, weights or None)


def _alias_of(text: str) -> tuple[str | None, str]:
    """Return the alias that was typed, or None, and the rest."""
    match = _ALIAS.match(text)
    if match is None or os.path.lexists(text):
        return None, text
    whole_name, _ = _weights_of(text)
    if os.path.lexists(whole_name):  # the "=" belongs to the name of a file or folder
        return None, text
    return match[1], match[2]


def _weights_of(text: str) -> tuple[str, str]:
    """Return the name and the weights after it, or "" for none.

    The text is divided at the first "@" after an existing path, else at the first "@".
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
    """Return several names with unique aliases.

    Typed aliases stay unchanged; derived ones get a number if they would occur twice. Raises
    InputError for an alias that was typed twice.
    """
    parsed = [parse_model(text) for text in texts]
    typed_aliases = []  # None for a name without one
    for text in texts:
        typed_alias, _ = _alias_of(text)
        typed_aliases.append(typed_alias)
    used = [alias for alias in typed_aliases if alias is not None]
    twice = {alias for alias in used if used.count(alias) > 1}
    if twice:
        raise InputError(
            f"expected every alias once, found {sorted(twice)[0]!r} twice; write first=NAME "
            "second=NAME"
        )
    unique = []
    for typed_alias, model in zip(typed_aliases, parsed):
        alias = model.alias
        number = 2
        while typed_alias is None and alias in used:
            alias = f"{model.alias}-{number}"
            number = number + 1
        used.append(alias)
        unique.append(replace(model, alias=alias))
    return tuple(unique)


def require_rule(texts: Sequence[str]) -> None:
    """Raise InputError for an alias that does not follow ALIAS_RULE.

    All names are checked before anything is loaded. Text before "=" is not an alias if it is part
    of an existing file or folder, or of a name with a source's prefix.
    """
    prefixes = tuple(source.prefix for source in SOURCES.values() if source.prefix)
    for text in texts:
        alias, equals, _ = text.partition("=")
        # divided together with its alias, because a path may have an "=", too
        name, weights = _weights_of(text)
        is_path = os.path.lexists(name)
        belongs_to_weights = "@" in alias and os.path.lexists(weights)
        if not equals or text.startswith(prefixes) or is_path or belongs_to_weights:
            continue
        if not _ALIAS.match(f"{alias}=NAME") or len(alias) > ALIAS_LENGTH:
            raise InputError(f"expected alias=NAME with an alias of {ALIAS_RULE}, found {alias!r}")


def _last_part(name: str) -> str:
    """Return the last part of a name as a valid alias."""
    file, separator, function = name.rpartition(".py:")
    _, _, without_prefix = name.rpartition(":")
    part = Path(without_prefix).name or name
    if separator and function in _GENERIC_NAMES:
        part = Path(file).name
    if part in (".", "..", "/"):
        part = Path(name).resolve().name or "model"
    for suffix in WEIGHTS_FILES:
        if part.endswith(suffix):
            part = part.removesuffix(suffix)
            break
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", part).lstrip("._-").rstrip("-")
    return plain[:_DERIVED_LENGTH] or "model"
