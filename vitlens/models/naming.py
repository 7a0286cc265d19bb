"""How a specimen is named: `[alias=]NAME[@weights]`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitlens.errors import InputError
from vitlens.schema import is_name

RANDOM = "random"  # in place of a weights file: the architecture untrained
_ALIAS = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)$")


@dataclass(frozen=True)
class ModelName:
    """name: without alias and weights; alias: what reports call it; weights: the file after @, if any, or "random"."""

    name: str
    alias: str
    weights: str | None = None


def parse_model(text: str) -> ModelName:
    """The parts of `[alias=]NAME[@weights]`; the alias is the last part of the name where none is given."""
    match = _ALIAS.match(text)
    alias, rest = match.groups() if match else (None, text)
    name, _, weights = rest.partition("@")
    if not name:
        raise InputError(f"expected MODEL as [alias=]NAME[@weights], found {text!r}; see vitlens models")
    own = _last_part(name) + (f"-{RANDOM}" if weights == RANDOM else "")
    if not is_name(alias or own):  # it becomes part of file names
        raise InputError(
            f"expected a name for files and reports, found {(alias or own)[:80]!r}; write alias={name[:80]}"
        )
    return ModelName(name, alias or own, weights or None)


def parse_models(texts: Sequence[str]) -> tuple[ModelName, ...]:
    """Several names, each alias unique: those given stay as they are, derived ones get a number where they must.

    Raises InputError for an alias given twice.
    """
    parsed = [parse_model(text) for text in texts]
    given = [text.partition("=")[0] for text in texts if _ALIAS.match(text)]
    twice = {alias for alias in given if given.count(alias) > 1}
    if twice:
        raise InputError(f"expected every alias once, found {sorted(twice)[0]!r} twice; write first=NAME second=NAME")
    taken = set(given)
    unique = []
    for text, model in zip(texts, parsed):
        alias, number = model.alias, 2
        while alias in taken and not _ALIAS.match(text):
            alias, number = f"{model.alias}-{number}", number + 1
        taken.add(alias)
        unique.append(replace(model, alias=alias))
    return tuple(unique)


def _last_part(name: str) -> str:
    last = Path(name.split(":")[-1]).name or name
    if last in (".", "..", "/"):
        last = Path(name).resolve().name or "model"
    return Path(last).stem if last.endswith((".safetensors", ".pth", ".pt", ".bin")) else last
