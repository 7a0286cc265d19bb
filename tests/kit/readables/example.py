"""One example of what can be loaded, and the images that examples consist of."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from PIL import Image

Outcome = Literal["read", "read, with a note", "refused"]
GREYS: Final = {
    "cat": 40,
    "dog": 80,
    "elk": 120,
    "tench": 40,
    "goldfish": 80,
    "valid": 40,
    "invalid": 80,
    "caf\u00e9": 40,
    "great_dane": 80,
    "007": 120,
}
WNIDS: Final = ("n01440764", "n01443537")  # tench, goldfish
OBJECT: Final = (slice(10, 30), slice(12, 40))  # rows and columns of the object of a mask
SIZE: Final = (48, 64)


@dataclass(frozen=True)
class Example:
    """An example of what can be loaded, or is refused.

    what: in words, for the documentation.
    make: writes it into a folder.
    outcome: of loading it.
    meaning: what it is read as, or what the refusal asks for.
    """

    what: str
    make: Callable[[Path], object]
    outcome: Outcome
    meaning: str


def picture(path: Path, name: str, *, size: tuple[int, int] = (8, 6), **how: Any) -> None:
    """Write an image whose grey level shows its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grey = GREYS[name]
    Image.new("RGB", size, (grey, grey, grey)).save(path, **how)


def classes(
    root: Path, *, names: tuple[str, ...] = ("cat", "dog"), count: int = 2, suffix: str = ".png"
) -> None:
    """Write a folder for each class."""
    for name in names:
        for number in range(count):
            picture(root / name / f"{number}{suffix}", name)


def parts(*names: str, below: str = "") -> Callable[[Path], None]:
    """Return a function that writes parts of these names with class folders.

    below: a folder between a part and its classes; "again" for one of the part's name.
    """

    def make(root: Path) -> None:
        for name in names:
            between = name if below == "again" else below
            classes(root / name / between)

    return make
