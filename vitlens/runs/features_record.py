"""What is read of a features run's folder by both its figures and its words."""

from collections.abc import Mapping
from typing import Any

from vitlens.files import RunRecord

_METHODS = {"tsne": "t-SNE", "pca": "PCA"}


def aliases_of(record: RunRecord) -> list[str]:
    """What the models are called."""
    models: Any = record.config["models"]
    return [str(model["alias"]) for model in models]


def classes_of(record: RunRecord) -> list[str]:
    """The names of the data's classes."""
    found: Any = record.config.get("class_names", [])
    return [str(name) for name in found]


def chance_of(record: RunRecord) -> float:
    """What always saying the most frequent class would get, a fraction."""
    return float(str(record.config.get("chance", 0.0)))


def has_table(record: RunRecord, name: str) -> bool:
    """Whether the run wrote a table of that name with anything in it."""
    tables: Any = record.results["tables"]
    return bool(tables.get(name))


def rows_of(record: RunRecord, name: str) -> list[dict[str, Any]]:
    """A table's rows, none where it was not written."""
    return [dict(row) for row in record.table(name)] if has_table(record, name) else []


def neighbours_asked(record: RunRecord) -> list[int]:
    """How many neighbours voted, each k."""
    options: Any = record.config["options"]
    return [int(k) for k in options["ks"]]


def has_matches(record: RunRecord, alias: str) -> bool:
    """Whether any patch of one image was matched with one of another."""
    if not record.has_arrays(f"matches-{alias}"):
        return False
    found = record.arrays(f"matches-{alias}")
    return any(len(values) for name, values in found.items() if name.startswith("similarity_"))


HEADS = 6  # in a figure
ROWS = 60  # of a table in the report; results.json has them all


def heads_figures(record: RunRecord, alias: str) -> list[str]:
    """The names of the figures of a model's heads, as many as they need."""
    if not record.has_arrays(f"heads-{alias}"):
        return []
    count = len(record.arrays(f"heads-{alias}")["maps"][0])
    if count <= HEADS:
        return [f"heads_{alias}"]
    return [f"heads_{alias}_{1 + start // HEADS}" for start in range(0, count, HEADS)]


def name_of_classifier(name: str) -> str:
    """As a figure says it: "20 nearest neighbours", "linear probe"."""
    if name == "probe":
        return "linear probe"
    k = name.partition("-")[2]
    return "nearest neighbour" if k == "1" else f"{k} nearest neighbours"


def title_of_map(row: Mapping[str, object]) -> str:
    """A map of the space with how far it can be trusted."""
    trust = float(str(row["trustworthiness"]))
    said = f"{_METHODS[str(row['method'])]}, {int(str(row['n'])):,} {row['of']}, trustworthiness {trust:.3f}"
    explained = row.get("explained")
    if isinstance(explained, list):
        said += f"\n{100 * sum(float(str(share)) for share in explained):.0f} % of the variance"
    elif row.get("perplexity") is not None:
        said += f"\nperplexity {float(str(row['perplexity'])):g}"
    return said
