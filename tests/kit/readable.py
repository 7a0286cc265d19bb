"""Everything that is read, noted or refused: folders, tables, masks and weights, by example.

The tests try every entry; docs/readable.md is made from the same lists (`python -m docs.make`).
"""

from tests.kit.readables.example import GREYS, OBJECT, SIZE, Example
from tests.kit.readables.folders import FOLDERS
from tests.kit.readables.masks import MASKS
from tests.kit.readables.tables import TABLES
from tests.kit.readables.weights import WEIGHTS, hub_folder, weights

__all__ = [
    "FOLDERS",
    "GREYS",
    "MASKS",
    "OBJECT",
    "SIZE",
    "TABLES",
    "WEIGHTS",
    "Example",
    "hub_folder",
    "weights",
]
