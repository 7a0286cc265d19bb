"""What the repr of a model says: read from the model as it stands, without a forward pass."""

from typing import Final

from vitlens.models.model import Model
from vitlens.models.sources.registry import SOURCES
from vitlens.models.support import checked_needs, model_commands, needs_of

_CLASSES: Final = 4  # names shown


def description(model: Model) -> list[tuple[str, str]]:
    """Names and values: family, source, input, classes, blocks and heads, parameters, normalisation, supports."""
    anatomy, preprocessing = model.anatomy, model.preprocessing
    height, width = model.input_size
    rows = [
        ("family", anatomy.family),
        ("source", _source(model)),
        ("input", f"{height} x {width} px, in [0, 1]"),
        ("normalisation", f"mean {_triple(preprocessing.mean)}, std {_triple(preprocessing.std)}, inside the model"),
        ("classes", _classes(model.classes)),
        ("blocks", _blocks(model)),
    ]
    if anatomy.layout is not None:
        down, across = anatomy.layout.grid
        prefix = f" after {', '.join(anatomy.layout.prefix)}" if anatomy.layout.prefix else ""
        rows.append(("tokens", f"{down} x {across} patches{prefix}"))
    rows += [("parameters", f"{model.parameter_count():,}"), ("device", str(model.device)), *_supports(model)]
    return rows


def _source(model: Model) -> str:
    provenance = model.provenance
    kind = str(model.architecture.get("kind", ""))
    library = f" ({kind})" if kind in SOURCES and not provenance.name.startswith(kind) else ""
    return f"{provenance.name}{library}, weights: {provenance.weights}"


def _classes(names: tuple[str, ...]) -> str:
    if not names:
        return "none: its outputs are features"
    more = f" and {len(names) - _CLASSES} more" if len(names) > _CLASSES else ""
    return f"{len(names)}: {', '.join(names[:_CLASSES])}{more}"


def _blocks(model: Model) -> str:
    """The number of blocks, and of heads."""
    heads = sorted({model.anatomy.parts[name].heads for name in model.anatomy.attention_modules})
    words = f", {' or '.join(map(str, heads))} heads each" if heads else ""
    return f"{len(model.anatomy.blocks)}{words}"


def _supports(model: Model) -> list[tuple[str, str]]:
    """The commands whose needs are known to be met, and those not checked yet, as that would take a forward pass."""
    met = checked_needs(model)
    known = [word for word in model_commands() if all(met.get(need, False) for need in needs_of(word))]
    open_ones = [word for word in model_commands() if any(need not in met for need in needs_of(word))]
    rows = [("supports", ", ".join(known))]
    return [*rows, ("not checked", ", ".join(open_ones))] if open_ones else rows


def _triple(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
