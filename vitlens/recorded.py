"""What the JSON of a run's folder is, as types: what all commands write alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from vitlens.names import FigureFormat
from vitlens.schema import Between, Count, Given, Length, Name, Text, Verbatim


@dataclass(frozen=True)
class Measured:
    """One of the metrics."""

    value: float
    low: float | None = None
    high: float | None = None
    n: Count | None = None
    unit: str = ""


@dataclass(frozen=True)
class Results:
    """results.json, but for what the rows of its tables are: each command knows its own."""

    schema: Literal[2]
    command: Name
    status: Literal["running", "done", "failed", "interrupted"]
    seconds: Annotated[float, Between(0, 1e10)]
    metrics: Mapping[str, Measured]
    tables: Mapping[str, tuple[Annotated[Mapping[str, object], Length(0, 1000)], ...]]


@dataclass(frozen=True)
class ModelEntry:
    """One of the models in config.json: what becomes part of file names, and what every report says of it."""

    alias: Name
    name: Annotated[Text, Given()] = ""
    weights: Annotated[Text, Given()] = ""
    sha256: str | None = None
    parameters: Count = 0
    family: Text = ""
    notes: tuple[Text, ...] = ()


@dataclass(frozen=True)
class SkippedEntry:
    """An image that was left out."""

    file: Annotated[Text, Given()]
    reason: Text


@dataclass(frozen=True)
class Data:
    """What config.json says of the images. size: (height, width), px."""

    title: Annotated[Text, Given()] = ""
    part: Text = ""
    images: Count = 0
    classes: Count = 0
    skipped: tuple[SkippedEntry, ...] = ()
    notes: tuple[Text, ...] = ()
    size: tuple[Count, Count] = (0, 0)


@dataclass(frozen=True)
class Config:
    """config.json, as far as all commands write it alike."""

    title: Text = ""
    formats: tuple[FigureFormat, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    command_line: Annotated[Text, Verbatim()] = ""
    device: Text = ""
    precision: Text = ""
    seed: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    models: tuple[ModelEntry, ...] = ()
    data: Data | None = None
