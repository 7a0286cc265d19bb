"""Read back a run that W&B wrote offline: its .wandb file, without W&B's service."""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HEADER: Final = 7  # bytes at the beginning of a file, and of a piece of a record
BLOCK: Final = 32768  # bytes; pieces do not cross blocks
FULL, FIRST, MIDDLE, LAST = range(1, 5)  # kinds of pieces


@dataclass
class LoggedRun:
    """Values of a run by name, as (step, value); config: its settings."""

    history: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def of_type(self, kind: str) -> dict[str, list[tuple[int, Any]]]:
        """Return the values of W&B's media of a type, such as "histogram" or "image-file"."""
        media = {}
        for name, values in self.history.items():
            if all(isinstance(value, dict) and value.get("_type") == kind for _, value in values):
                media[name] = values
        return media


def read_run(file: Path) -> LoggedRun:
    """Return what is logged in a .wandb file. Raises AssertionError for a damaged one."""
    from wandb.proto.wandb_internal_pb2 import Record

    run = LoggedRun()
    for content in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        for item in record.config.update:
            run.config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        if record.HasField("history"):
            items: dict[str, Any] = {}
            for item in record.history.item:
                place = items
                *path, last = item.nested_key or [item.key]
                for part in path:
                    place = place.setdefault(part, {})
                place[last] = json.loads(item.value_json)
            for name, value in items.items():
                run.history.setdefault(name, []).append((items["_step"], value))
    return run


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, whose checksums must agree."""
    assert content[:4] == b":W&B"
    place = HEADER
    parts: list[bytes] = []
    while place < len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER:  # the rest of a block is empty
            place += left
            continue
        checksum, length, kind = struct.unpack("<IHB", content[place : place + HEADER])
        piece = content[place + HEADER : place + HEADER + length]
        assert zlib.crc32(bytes([kind]) + piece) == checksum
        parts.append(piece)
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []
        place += HEADER + length
