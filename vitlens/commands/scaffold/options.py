"""What every run is told, whoever calls it; free of torch, so that the command line can name it at once."""

from dataclasses import dataclass
from pathlib import Path

from vitlens.names import DEFAULT_SEED, Precision


@dataclass(frozen=True)
class RunOptions:
    """How to run and where to write.

    device: auto, cpu, cuda, cuda:N or mps; batch_size: images at a time (None: chosen to fit); limit: at most so many
    images (None: all); out: the folder to write (None: a new one named by time); formats: of the figures; data_dir:
    where downloaded data is kept; command: the line that was typed, for config.json.
    """

    device: str = "auto"
    precision: Precision = "auto"
    seed: int = DEFAULT_SEED
    batch_size: int | None = None
    limit: int | None = None
    out: Path | None = None
    overwrite: bool = False
    quiet: bool = False
    formats: tuple[str, ...] = ("png",)
    data_dir: Path = Path("data")
    command: str = ""


@dataclass(frozen=True)
class ModelOptions:
    """What is said about weights that do not say it themselves.

    weights: a file for the one model named; random_weights: untrained ones; arch: the architecture of a weights file;
    image_size: pixels (height, width); mean, std: per channel, in [0, 1]; classes: a file with one name a line.
    """

    weights: Path | None = None
    random_weights: bool = False
    arch: str | None = None
    image_size: tuple[int, int] | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    classes: Path | None = None
