"""The options of `vitlens data`."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.commands.run.flags import argument, option


@dataclass(frozen=True)
class DataOptions:
    """The options of `vitlens data`.

    name: a data set, a folder or an .npz, whose parts are listed (None: all named data sets).
    labels: a table of the labels of a folder's images.
    """

    name: str | None = argument("DATA", "Say more of one.", default=None, complete="data")
    data_dir: Path = option(
        "--data-dir", "Where downloaded data is kept.", default=Path("data"), metavar="DIR"
    )
    labels: Path | None = option(
        "--labels",
        "A table (CSV) of file names and labels, for a folder without class folders.",
        metavar="FILE",
        shown=False,
    )
