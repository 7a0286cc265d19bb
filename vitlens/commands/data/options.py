"""What `vitlens data` is told."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.scaffold.flags import argument, option


@dataclass(frozen=True)
class DataOptions:
    """name: a set, a folder or an .npz, whose parts are listed; none: all named sets."""

    name: str | None = argument("DATA", "Say more of one.", default=None, complete="data")
    data_dir: Path = option("--data-dir", "Where downloaded data is kept.", default=Path("data"), metavar="DIR")
