"""The attention explorer of a study."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vitlens.commands.shared.explorer import of_layers
from vitlens.commands.shared.label_rows import word_table
from vitlens.commands.study.record import StudyRecord
from vitlens.report.explorer import Explorer


def explorer(record: StudyRecord) -> Explorer | None:
    """Return the explorer of the first ViT, with its heads' labels, words and importance."""
    for alias in record.vits:
        attention = record.about("attention", alias)
        view = None if attention is None else attention.document.explorer
        if view is None:
            continue
        chosen_layers = view.layers or None  # None: all layers, from 0
        stats = record.about("stats", alias)
        if stats is not None:
            view = replace(view, words=of_layers(word_table(stats.record.names), chosen_layers))
        ablate = record.about("ablate", alias)
        if ablate is None or view.images[0].weights is None:
            return view
        return _with_importance(view, ablate.record.heads)
    return None


def _with_importance(view: Explorer, ablated_heads: Sequence[Any]) -> Explorer:
    """Return the explorer with the loss without each head and with the heads' labels."""
    weights = view.images[0].weights
    assert weights is not None
    layers, heads = weights.shape[:2]  # (layers, heads, queries, keys)
    shown_layers = view.layers or range(layers)
    position_of_layer = {layer: position for position, layer in enumerate(shown_layers)}
    importance = np.full((layers, heads), np.nan)  # NaN: the head was not removed
    labels = [[""] * heads for _ in range(layers)]
    for row in ablated_heads:
        if row.layer in position_of_layer and row.head < heads:
            position = position_of_layer[row.layer]
            importance[position, row.head] = row.loss.value
            labels[position][row.head] = row.label or ""
    return replace(view, labels=tuple(map(tuple, labels)), importance=importance)
