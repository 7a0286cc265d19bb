"""The attention explorer of a study: its attention chapter's images, its heads with their labels and importance."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from vitlens.commands.study.report.whole.chapters import Study
from vitlens.commands.study.report.whole.heads import known_heads
from vitlens.report.explorer import Explorer


def study_explorer(study: Study) -> Explorer | None:
    """The explorer of the first ViT that has one; None for studies of earlier versions, and where no ViT has one."""
    found = list(_explorers(study))
    if not found:
        return None
    first, *others = found
    notes = first.notes
    if others:
        named = ", ".join(each.model for each in others)
        notes = (*notes, f"The explorer shows {first.model}; that of {named} is on the page of its chapter.")
    return replace(first, notes=notes)


def _explorers(study: Study) -> Iterator[Explorer]:
    for alias in study.vits:
        chapter = study.about("attention", alias)
        explorer = None if chapter is None else chapter.document.explorer
        if explorer is not None:
            yield _with_heads(study, alias, explorer)


def _with_heads(study: Study, alias: str, explorer: Explorer) -> Explorer:
    """An explorer with what the study's other chapters found about its heads."""
    known, weights = known_heads(study, alias), explorer.images[0].weights
    if weights is None or not known:
        return explorer
    layers, heads = weights.shape[:2]
    importance = np.full((layers, heads), np.nan)
    labels = [[""] * heads for _ in range(layers)]
    for (layer, head), described in known.items():
        if layer < layers and head < heads:
            importance[layer, head] = described.main.loss.value
            labels[layer][head] = described.label
    return replace(explorer, labels=tuple(map(tuple, labels)), importance=importance)
