"""The attention explorer of a study."""

from dataclasses import replace

import numpy as np

from vitlens.commands.shared.explorer import of_layers
from vitlens.commands.shared.label_rows import word_table
from vitlens.commands.study.record import StudyRecord
from vitlens.report.explorer import Explorer


def explorer(record: StudyRecord) -> Explorer | None:
    """Return the explorer of the first ViT, with its heads' labels, words and importance."""
    for alias in record.vits:
        attention, ablate, stats = (
            record.about(word, alias) for word in ("attention", "ablate", "stats")
        )
        view = None if attention is None else attention.document.explorer
        if view is None:
            continue
        numbers = view.layers or None
        if stats is not None:
            view = replace(view, words=of_layers(word_table(stats.record.names), numbers))
        weights = view.images[0].weights
        if ablate is None or weights is None:
            return view
        layers, heads = weights.shape[:2]
        place_of = {number: place for place, number in enumerate(numbers or range(layers))}
        importance = np.full((layers, heads), np.nan)
        labels = [[""] * heads for _ in range(layers)]
        for row in ablate.record.heads:
            if row.layer in place_of and row.head < heads:
                place = place_of[row.layer]
                importance[place, row.head] = row.loss.value
                labels[place][row.head] = row.label or ""
        return replace(view, labels=tuple(map(tuple, labels)), importance=importance)
    return None
