"""Ways to damage a file: each place of its JSON set to many values, its bytes cut and flipped."""

import copy
import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

NAN = "NaN!"  # written as the bare word
MISSING = "MISSING!"
VALUES: tuple[object, ...] = (
    MISSING,
    None,
    True,
    -1,
    0,
    2**33,
    10**12,
    10**30,
    1e308,
    NAN,
    "",
    "x" * 10**5,
    "../../../../pwned",
    "a\0b",
    [],
    {},
    [[[{"a": [1]}]]],
    [1e308] * 3,
)


def places(content: object, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield every place of a nested value; of a list only the first two."""
    if at:
        yield at
    if isinstance(content, dict):
        for key, child in content.items():
            yield from places(child, (*at, key))
    elif isinstance(content, list):
        for index, child in enumerate(content[:2]):
            yield from places(child, (*at, index))


def damaged(content: object, at: tuple[str | int, ...], value: object) -> str:
    """Return the JSON of the content with one place changed."""
    result = copy.deepcopy(content)
    node = result
    for key in at[:-1]:
        node = node[key]
    if value == MISSING:
        del node[at[-1]]
    else:
        node[at[-1]] = value
    return json.dumps(result).replace(f'"{NAN}"', "NaN")


def every(content: object) -> list[tuple[tuple[str | int, ...], object]]:
    """Return all pairs of a place and a value."""
    return list(product(places(content), VALUES))


def damage_bytes(file: Path, generator: random.Random) -> None:
    """Cut a file off, or flip some of its bytes."""
    content = bytearray(file.read_bytes())
    if generator.random() < 0.5:
        content = content[: generator.randrange(len(content))]
    else:
        for _ in range(generator.randrange(1, 9)):
            content[generator.randrange(len(content))] ^= generator.randrange(1, 256)
    file.write_bytes(bytes(content))


def refused(code: int, said: str) -> bool:
    """Return True if a command line ended as for a wrong input: exit code 2, one line."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    return code == 2 and len(errors) == 1 and "unexpected" not in said


def served_or_refused(code: int, said: str) -> bool:
    """Return True if a command line was refused, or did its work (the damage may be harmless)."""
    return refused(code, said) or (code == 0 and "unexpected" not in said)
