"""What was measured, as JSON lines: a file that is added to, and from which a later run takes what
is there.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

Value = float | int | str | None


@dataclass(frozen=True)
class Row:
    """One check or one case of a part.

    kind: "check" or "case"; device, versions: of the machine; tiny: of small models and sizes,
    whose times mean nothing; values: by name, which has the unit.
    """

    part: str
    case: str
    kind: str
    device: str
    versions: str
    tiny: bool
    values: Mapping[str, Value]


class Rows:
    """The rows of one file; a line that was cut off by a killed run is left out, and measured
    again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = _read(path)

    def find(self, part: str, case: str, *, device: str, versions: str, tiny: bool) -> Row | None:
        """Return the last row of this case on this machine, or None."""
        key = (part, case, device, versions, tiny)
        return next((row for row in reversed(self.rows) if _key(row) == key), None)

    def of(self, *, device: str, versions: str, tiny: bool) -> list[Row]:
        """Return the rows of this machine, the last of each case."""
        last = {_key(row): row for row in self.rows}
        return [
            row
            for row in last.values()
            if (row.device, row.versions, row.tiny) == (device, versions, tiny)
        ]

    def add(self, row: Row) -> None:
        """Add a row to the file at once, so that a killed run loses only the case that it was
        at."""
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if (
                file.tell() and self.path.read_bytes()[-1:] != b"\n"
            ):  # behind a line that was cut off
                file.write(b"\n")
            file.write(json.dumps(asdict(row)).encode() + b"\n")


def _key(row: Row) -> tuple[str, str, str, str, bool]:
    return row.part, row.case, row.device, row.versions, row.tiny


def _read(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return rows
