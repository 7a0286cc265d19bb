"""The JSON in a run's folder as types: the parts that all commands share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vitlens.names import FigureFormat
from vitlens.typed import Count, Name, Text, between, length


@dataclass(frozen=True)
class Results:
    """results.json; the rows of its tables are declared by each command."""

    schema: Literal[2, 3]
    command: Name
    status: Literal["running", "done", "failed", "interrupted"]
    seconds: Annotated[float, between(0, 1e10)]
    metrics: Mapping[str, Mapping[str, Any]]
    tables: Mapping[str, tuple[Annotated[Mapping[str, Any], length(0, 1000)], ...]]


@dataclass(frozen=True)
class ModelEntry:
    """One of the models in config.json, as in file names and in every report."""

    alias: Name
    name: Text = ""
    weights: Text = ""
    sha256: str | None = None
    parameters: Count = 0
    family: Text = ""
    notes: tuple[Text, ...] = ()


@dataclass(frozen=True)
class SkippedEntry:
    """An image that was left out."""

    file: Text
    reason: Text


@dataclass(frozen=True)
class Data:
    """The images in config.json. size: (height, width), px."""

    title: Text = ""
    part: Text = ""
    images: Count = 0
    classes: Count = 0
    skipped: tuple[SkippedEntry, ...] = ()
    notes: tuple[Text, ...] = ()
    size: tuple[Count, Count] = (0, 0)


@dataclass(frozen=True)
class Config:
    """config.json, the part that all commands share."""

    title: Text = ""
    formats: tuple[FigureFormat, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    command_line: Text = ""
    device: Text = ""
    precision: Text = ""
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[ModelEntry, ...] = ()
    data: Data | None = None
