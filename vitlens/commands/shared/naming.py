"""The heads of a run's model named, with the labels that its images have, or why what heads write cannot be said."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.statistics import Statistics
from vitlens.analysis.naming.names import HeadNames, named
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.pixels import Streamed

_NONE: Final[Mapping[str, Tensor]] = MappingProxyType({})


def heads_named(
    run: Run[Any],
    split: Split,
    attributes: Mapping[str, Tensor] = _NONE,
    *,
    remove: bool = True,
    known: Statistics | None = None,
) -> tuple[HeadNames, Tensor | None]:
    """The words for every head on these images, with a note where what heads write cannot be said; and the labels as
    columns of the logits, None without them. remove, known: see `named`."""
    model, labels, why = run.model, None, ""
    if not model.has_classifier:
        why = f"{model.alias} has no classifier"
    elif remove:
        doing = "say what heads write"
        try:
            labels = labels_of(model, split, predicted=run.options.predicted, doing=doing, options=run.run)
        except InputError as error:
            why = str(error)
    images, size = Streamed(split, model.mean.dtype), run.run.batch_size or fitting_batch_size(model)
    with autocast(model.device, run.run.precision):
        found = named(
            model, images, labels, attributes, split.masks, size, run.run.seed, run.progress,
            remove=remove and labels is not None, known=known,
        )  # fmt: skip
    return (replace(found, notes=(*found.notes, f"what heads write: {why}")) if why else found), labels
