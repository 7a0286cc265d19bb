"""What figures and words of an evaluation read from its folder."""

from collections.abc import Mapping

from vitlens.files import RunRecord
from vitlens.uncertainty import Estimate

ENOUGH = 5  # images of the largest class from which accuracy by class says anything


def models_of(record: RunRecord) -> list[str]:
    """The models' names, in the order in which they were given."""
    models = record.config["models"]
    return [str(model["alias"]) for model in models] if isinstance(models, list) else []


def ending_of(alias: str, aliases: list[str]) -> str:
    """What the names of a model's own figures end with: nothing where there is one model."""
    return f"-{alias}" if len(aliases) > 1 else ""


def metric_of(word: str, alias: str, aliases: list[str], found: Mapping[str, Estimate]) -> Estimate:
    """A model's metric; without the model's name where there is one model."""
    return found[f"{word}/{alias}" if len(aliases) > 1 else word]


def enough_by_class(record: RunRecord) -> bool:
    """Whether some class has images enough for an accuracy of its own."""
    return max(int(str(row["n"])) for row in record.table("per_class")) >= ENOUGH
