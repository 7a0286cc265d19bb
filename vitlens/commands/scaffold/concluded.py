"""What a command gives back that judges what it wrote; free of heavy imports."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Concluded:
    """What a command wrote, the lines for its end, and whether what it judges holds (otherwise exit code 3)."""

    path: Path
    lines: tuple[str, ...]
    holds: bool
