"""What the chapters of one run share: its images, and names of models as they are typed; free of torch."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlens.commands.run.chapters.cache import files_digest
from vitlens.models.naming import ModelName


def as_typed(model: ModelName) -> str:
    """A model's name as text, for the options of a command and its command line."""
    return f"{model.alias}={model.name}" + (f"@{model.weights}" if model.weights else "")


@dataclass(frozen=True)
class ChapterImages:
    """The images of all chapters: data, a name or a path, or images, files and folders without labels (data is None
    then).

    predicted: whether the commands that need labels use the models' predictions.
    """

    data: str | None = None
    images: tuple[str, ...] = ()
    predicted: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As options of the commands."""
        return {"data": self.data, "images": self.images}

    @property
    def digest(self) -> str:
        """A digest of the images: of files, their names, sizes and times of change; of a data set, its name."""
        if self.data is not None and not Path(self.data).exists():
            return self.data
        return files_digest(self.images or (str(self.data),))

    @property
    def typed(self) -> str:
        """As part of a command line."""
        return f"--images {shlex.join(self.images)}" if self.images else f"--data {self.data}"

    @property
    def typed_with_labels(self) -> str:
        """As part of the command line of a command that needs labels."""
        return f"{self.typed} --predicted" if self.predicted else self.typed
