"""What the repr of a model shows."""

from collections.abc import Sequence
from typing import Final

from vitlens.models.model import Model
from vitlens.models.numbering import numbers_text
from vitlens.models.sources.registry import SOURCES
from vitlens.references import provided, resolved

_MOST_CLASSES: Final = 4  # whose names are shown


def description(model: Model) -> list[tuple[str, str]]:
    """Return what a model's repr shows, as names and values.

    Family, source, input, normalisation, classes, blocks and heads, parameters, supported commands.
    Commands whose needs have not been checked yet, as that would take a forward pass, are listed
    apart.
    """
    height, width = model.input_size
    rows = [
        ("family", model.anatomy.family),
        ("source", _describe_source(model)),
        ("input", f"{height} x {width} px, in [0, 1]"),
        ("photographs", model.preprocessing.rule),
        ("normalisation", _describe_normalisation(model)),
        ("classes", _describe_classes(model.classes)),
        ("blocks", _describe_blocks(model)),
    ]
    layout = model.anatomy.layout
    if layout is not None:
        down, across = layout.grid
        prefix = f" after {', '.join(layout.prefix)}" if layout.prefix else ""
        rows.append(("tokens", f"{down} x {across} patches{prefix}"))
    elif model.anatomy.unread:
        rows.append(("not read", model.anatomy.unread))
    # a function of the commands, which is named by a string, as imports only point down
    supported, unchecked = resolved(provided("checked_commands"))(model)
    rows.append(("parameters", f"{model.parameter_count():,}"))
    rows.append(("device", str(model.device)))
    described = resolved(provided("described_commands"))(model, supported)
    rows.append(("supports", ", ".join(described)))
    rows += [("note", note) for note in model.provenance.notes]
    if unchecked:
        rows.append(("not checked", ", ".join(unchecked)))
    return rows


def _describe_source(model: Model) -> str:
    provenance = model.provenance
    kind = str(model.architecture.get("kind", ""))
    library = f" ({kind})" if kind in SOURCES and not provenance.name.startswith(kind) else ""
    return f"{provenance.name}{library}, weights: {provenance.weights}"


def _describe_normalisation(model: Model) -> str:
    mean = ", ".join(f"{value:g}" for value in model.preprocessing.mean)
    std = ", ".join(f"{value:g}" for value in model.preprocessing.std)
    return f"mean {mean}, std {std}, inside the model"


def _describe_classes(classes: Sequence[str]) -> str:
    if not classes:
        return "none: its outputs are features"
    text = f"{len(classes)}: {', '.join(classes[:_MOST_CLASSES])}"
    if len(classes) > _MOST_CLASSES:
        text += f" and {len(classes) - _MOST_CLASSES} more"
    return text


def _describe_blocks(model: Model) -> str:
    anatomy = model.anatomy
    text = f"{len(anatomy.blocks)}"
    counts = sorted({anatomy.parts[name].heads for name in anatomy.attention_modules})
    if len(counts) == 1:
        text += f", {counts[0]} heads each"
    elif counts:
        *smaller, largest = map(str, counts)
        text += f", with {', '.join(smaller)} or {largest} heads"
    if anatomy.without_attention:
        text += f", with attention {numbers_text([*anatomy.attention_by_layer], joined_by='and')}"
    return text
