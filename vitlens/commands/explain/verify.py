"""`vitlens.verify`: the checks of maps that vitlens did not make, next to its methods."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.analysis.faithfulness.external import ExternalMethod, external_method, require_maps
from vitlens.analysis.faithfulness.maps import Explain
from vitlens.attribution.explain import require_method
from vitlens.classes import class_targets
from vitlens.commands.explain.checks import check_methods
from vitlens.commands.explain.external import require_name
from vitlens.commands.explain.methods import as_function
from vitlens.commands.explain.options import NONE, ExplainOptions
from vitlens.commands.explain.record import LeagueRow, StabilityRow, StageRow
from vitlens.commands.run.options import RunOptions
from vitlens.commands.shared.maps.record import JudgedMap, MapCheckRow, OnObjectRow, judged_maps
from vitlens.data.split import Split, as_split
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.inputs import takes_splits
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.pixels import AnyImages, Targets
from vitlens.shapes import Labels, Maps
from vitlens.summary import Line, Table

AnyMethod: TypeAlias = str | ExternalMethod | Tensor | NDArray[Any]

_BATCH: Final = 256  # images read at once


@dataclass(frozen=True, repr=False)
class Verification(Table):
    """The verdicts on maps, and the tables of checks behind them.

    verdicts: one for each method, the best first: its state ("pass", "warn", "inconclusive" or
        "fail") and the reason, `because`.
    checks: each check of each method.
    league: the means of every check, also of the baselines.
    stages: of the randomisation of the weights.
    stability: under shifts and a flip of the images.
    on_object: scores on the masks.
    maps: (n, rows, columns), by method.
    targets: (n,) the classes that the maps explain.
    """

    verdicts: tuple[JudgedMap, ...]
    checks: tuple[MapCheckRow, ...]
    league: tuple[LeagueRow, ...]
    stages: tuple[StageRow, ...]
    stability: tuple[StabilityRow, ...]
    on_object: tuple[OnObjectRow, ...]
    maps: Mapping[str, Maps]
    targets: Labels

    def __getitem__(self, method: str) -> JudgedMap:
        """Return the verdict on one method. Raises UnknownNameError for another name."""
        for verdict in self.verdicts:
            if verdict.method == method:
                return verdict
        raise UnknownNameError("method", method, self.maps)

    def summary(self) -> Iterator[Line]:
        """Yield the verdict on each method, with its reason."""
        for verdict in self.verdicts:
            yield Line(verdict.method, f"{verdict.state}: {verdict.lacks or 'passes every check'}")

    def records(self) -> Iterator[Mapping[str, object]]:
        """Yield the score and the result of each check of each method."""
        for row in self.checks:
            yield {
                "method": row.method,
                "check": row.checked_with,
                "state": row.state,
                "score": None if row.value is None else row.value.value,
                "baseline": row.baseline,
                "above baseline": None if row.margin is None else row.margin.value,
                "lacks": ", ".join(row.lacks),
            }


@takes_splits
def verify(
    model: Model,
    images: AnyImages,
    *,
    methods: Mapping[str, AnyMethod],
    targets: Targets = "predicted",
    masks: Tensor | NDArray[np.bool_] | None = None,
    batch_size: int | None = None,
    seed: int = DEFAULT_SEED,
) -> Verification:
    """Judge attribution maps of any origin by the checks of `vitlens explain --verify`.

    images: a Split, or any form that `vitlens.images` takes.
    methods: by name, a function, maps (n, rows, columns) as a tensor or an array, or the name of a
        method of `vitlens.list_methods()`. Maps may have any resolution, from the patches of the
        model to its pixels, and must be finite.
    targets: the classes that the maps explain: "predicted", "label", a class, or indices (n,).
    masks: of the objects (n, height, width), True inside (None: those of the Split, if any).
    batch_size: images at a time (None: chosen to fit).
    seed: of all random numbers, also of torch when a function is called.

    A function is called as `function(model, images, targets)` and returns maps (batch, rows,
    columns). The model is the Model: an nn.Module that takes images (batch, 3, height, width) in
    [0, 1] and normalises them itself. The images are a leaf that requires gradients; targets are
    class indices (batch,). It is called again with random weights and with shifted images, so it
    must use the model that it is given. Afterwards, weights, buffers, hooks and modes must be as
    before; gradients do not count. Maps of captum, for example: `lambda model, images, targets:
    Saliency(model).attribute(images, targets).amax(1)`.

    Maps without a function are fixed: checks with random weights and shifts are not possible, and
    the best verdict is "inconclusive". Intervals of differences from baselines are corrected for
    the number of methods. Only the command has composites, counterfactuals and further replacements
    of removed patches.

    Raises InputError, which names the method, for maps of another form, functions that raise or
    change the model, and names that are taken; DataError for masks of another form;
    UnsupportedError for a model without a classifier, and a method that it does not support.

    >>> import torch, vitlens
    >>> vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=12)
    >>> def gradient_times_input(model, images, targets):
    ...     model(images).gather(1, targets[:, None]).sum().backward()
    ...     return (images * images.grad).sum(1)
    >>> noise = torch.rand(12, 8, 8, generator=torch.Generator().manual_seed(1))
    >>> judged = vitlens.verify(
    ...     vit, digits, methods={"mine": gradient_times_input, "noise": noise}
    ... )
    >>> judged["noise"].state, judged.maps["mine"].shape
    ('fail', torch.Size([12, 32, 32]))
    """
    model.require_classifier()
    split = _with_masks(as_split(images), masks)
    if not methods:
        raise InputError("expected methods={NAME: function, maps or method}, found none")
    options = ExplainOptions(
        models=(model.alias,),
        verify=True,
        counterfactuals=False,
        composites=(NONE,),
        other_substrates=("mean",),
        run=RunOptions(batch_size=batch_size, seed=seed, quiet=True),
    )
    with torch.inference_mode(mode=False):  # inside it, nothing has a gradient
        functions, fixed = _as_methods(methods, model, len(split), options)
        classes = class_targets(targets, model, len(split), split=split)
        if classes is None:
            classes = predicted_logits(model, split, batch_size=batch_size).argmax(-1)
        # maps and seconds per image, None for fixed maps: see `check_methods`
        computed: dict[str, tuple[Tensor, float | None]] = {}
        for name in methods:
            if name in fixed:
                computed[name] = (fixed[name], None)
                continue
            maps, seconds = _time_method(functions[name], model, split, classes)
            if not isinstance(methods[name], str):
                maps = require_maps(maps, model, len(split), what=f"maps from {name!r}")
            computed[name] = (maps, seconds)
        tables: dict[str, Any] = check_methods(model, split, classes, functions, computed, options)
    return Verification(
        verdicts=judged_maps(tables["checks"]),
        checks=tables["checks"],
        league=tables["league"],
        stages=tables["stages"],
        stability=tables["stability"],
        on_object=tables["on_object"],
        maps={name: maps for name, (maps, _) in computed.items()},
        targets=classes.cpu(),
    )


def _as_methods(
    methods: Mapping[str, AnyMethod], model: Model, count: int, options: ExplainOptions
) -> tuple[dict[str, Explain], dict[str, Maps]]:
    """Return the methods as functions, and the fixed maps, both by name.

    count: the number of images, each of which must have a fixed map.
    """
    run = options.run
    functions: dict[str, Explain] = {}
    fixed: dict[str, Maps] = {}
    for name, method in methods.items():
        if isinstance(method, str):
            require_method(model, method)
            if name != method:
                require_name(name)
            functions[name] = as_function(method, options, batch_size=run.batch_size)
            continue
        require_name(name)
        if isinstance(method, Tensor) or not callable(method):
            fixed[name] = require_maps(method, model, count, what=f"maps of {name!r}").cpu()
        else:
            functions[name] = external_method(
                name, method, batch_size=run.batch_size, seed=run.seed
            )
    return functions, fixed


def _time_method(
    function: Explain, model: Model, split: Split, classes: Labels
) -> tuple[Tensor, float]:
    """Return the maps of all images on the CPU, and the seconds per image."""
    parts = []
    seconds = 0.0
    for batch in split.batches(_BATCH, device=model.device):
        targets = classes[batch.indices].to(model.device)
        start = time.perf_counter()
        # the copy to the CPU waits for an asynchronous device
        parts.append(function(model, batch.images, targets).cpu())
        seconds += time.perf_counter() - start
    return torch.cat(parts), seconds / len(split)


def _with_masks(split: Split, masks: Tensor | NDArray[np.bool_] | None) -> Split:
    """Return the split with these masks; None changes nothing."""
    if masks is None:
        return split
    values = torch.as_tensor(masks).cpu()
    if values.dtype != torch.bool:
        kind = str(values.dtype).removeprefix("torch.")
        raise DataError(
            f"expected masks of booleans, True on the object, found {kind}; give masks > 0"
        )
    return replace(split, masks=values)
