"""All checks of explanation methods and of two baselines, on the same images and targets.

The cost of a method is counted in forward passes. `rank_agreement` compares the rankings of two
checks.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.counterfactual import Counterfactuals, along_map
from vitlens.analysis.faithfulness.defaults import CENTRE, RANDOM, SUBSTRATE
from vitlens.analysis.faithfulness.localisation import SCORES, centre_maps, has_edge, random_maps
from vitlens.analysis.faithfulness.maps import (
    Explain,
    MapFaults,
    PerImage,
    map_faults,
    removal_grid,
)
from vitlens.analysis.faithfulness.removal import STEPS, Faithfulness, faithfulness
from vitlens.analysis.faithfulness.sanity import Randomisation, predictions_kept, randomisation
from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.names import Substrate
from vitlens.shapes import Images, Labels, Maps, Masks
from vitlens.uncertainty import Estimate, Side, beyond, widened

RANDOMISED = 32  # images of the randomisation check, which needs a map of each at every stage
COSTLY = 100  # a method that costs more forward passes is checked on RANDOMISED_COSTLY images
RANDOMISED_COSTLY = 12  # enough to be judged (checks.ENOUGH)
MOST_APART = 2.0  # largest possible difference of two values of insertion minus deletion
CHECKS = 5  # steps that `league` reports for each method


@dataclass(frozen=True)
class Settings:
    """The settings of the checks.

    substrate: replaces a removed patch.
    steps: the number of steps of the removal curves.
    counterfactuals: True to search sets of patches that change the prediction.
    seed: the seed of ties, baselines and randomised weights.
    batch_size: variants in one forward pass, None to choose it.
    """

    substrate: Substrate = SUBSTRATE
    steps: int = STEPS
    counterfactuals: bool = True
    seed: int = 0
    batch_size: int | None = None


@dataclass(frozen=True)
class MethodChecks:
    """The results of every check on one method, image by image.

    maps: the raw maps, with zeros for a map that was not finite.
    values: the value of every removal check, by its name.
    scores: the score of every localisation check, by its name, of the images with a mask.
    seconds: the time per image, None for fixed maps.
    forwards: the cost in forward passes of the model, None for a baseline and for fixed maps.
    """

    name: str
    maps: Maps
    faults: MapFaults
    values: Mapping[str, PerImage]
    scores: Mapping[str, Float[Tensor, " masked"]]
    curves: Faithfulness
    counterfactuals: Counterfactuals | None
    randomisation: Randomisation | None
    seconds: float | None
    forwards: float | None


def league(
    model: Model,
    images: Images,
    targets: Labels,
    methods: Mapping[str, Explain],
    *,
    masks: Masks | None = None,
    computed: Mapping[str, tuple[Maps, float | None]] | None = None,
    settings: Settings,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[MethodChecks, ...]:
    """Return the results of all checks for every method, then for the baselines.

    A map that is not finite counts as constant and is flagged.

    images, targets: all of them, on the model's device.
    masks: the masks of the images, None if not known. Images without an object or without
        background are left out of the scores.
    computed: maps that are computed already, with the seconds per image; no others are then
        computed. A name that is no method has fixed maps: none can be computed with randomised
        weights.
    advance: called with the number of finished checks, CHECKS in all for each method and baseline.
    """
    # raw maps and seconds by name: of methods or fixed maps, then of baselines
    timed_maps = dict[str, tuple[Maps, float | None]]()
    if computed:
        timed_maps.update(computed)
    else:
        for name, method in methods.items():
            timed_maps[name] = _time_method(method, model, images, targets)
    for name, maps in baselines(model, len(images), settings.seed).items():
        timed_maps[name] = (maps, 0.0)
    count = len(timed_maps)
    advance(count)
    faults = dict[str, MapFaults]()
    finite_maps = dict[str, Maps]()
    for name, (maps, _) in timed_maps.items():
        faults[name] = map_faults(maps)
        not_finite = faults[name].not_finite[:, None, None]
        finite_maps[name] = torch.where(not_finite, 0.0, maps.float()).to(images.device)
    all_maps = list(finite_maps.values())  # in the order of the results
    common: dict[str, Any] = {"seed": settings.seed, "batch_size": settings.batch_size}
    curves = faithfulness(
        model,
        images,
        targets,
        all_maps,
        substrate=settings.substrate,
        steps=settings.steps,
        **common,
    )
    advance(count)
    imputed = faithfulness(model, images, targets, all_maps, substrate="imputed", **common)
    advance(count)
    counterfactuals: Sequence[Counterfactuals | None] = [None] * count
    if settings.counterfactuals:
        deletion_curves = [method_curves.deletion for method_curves in curves]
        counterfactuals = along_map(
            model, images, all_maps, curves=deletion_curves, substrate=settings.substrate, **common
        )
    advance(count)
    usable_masks = None
    has_mask = torch.zeros(len(images), dtype=torch.bool)
    if masks is not None:
        has_mask = has_edge(masks).cpu()
        if bool(has_mask.any()):
            usable_masks = masks[has_mask.to(masks.device)].cpu()
    randomisation_check = _RandomisationCheck(model, images, targets, settings.seed)
    results = list[MethodChecks]()
    for index, (name, maps) in enumerate(finite_maps.items()):
        raw_maps, seconds = timed_maps[name]
        forwards = None
        randomised_maps = None
        if name in methods:
            # the cost is the same for every image
            forwards = forward_equivalents(model, images[:1], targets[:1], methods[name])
            limit = randomised_images(forwards)
            randomised_maps = randomisation_check.run(methods[name], raw_maps, limit)
        scores = dict[str, Tensor]()
        if usable_masks is not None:
            for key, score in SCORES.items():
                scores[key] = score(maps.cpu()[has_mask], usable_masks)
        results.append(
            MethodChecks(
                name=name,
                maps=maps.cpu(),
                faults=faults[name],
                values={**curves[index].values, "road": imputed[index].gaps},
                scores=scores,
                curves=curves[index],
                counterfactuals=counterfactuals[index],
                randomisation=randomised_maps,
                seconds=seconds,
                forwards=forwards,
            )
        )
        advance(1)
    return tuple(results)


class _RandomisationCheck:
    """The randomisation check of several methods, on the first of the same images."""

    def __init__(self, model: Model, images: Images, targets: Labels, seed: int) -> None:
        self._model = model
        self._images = images
        self._targets = targets
        self._seed = seed
        self._keeps_prediction = predictions_kept(model, images[:RANDOMISED], seed=seed)

    def run(self, method: Explain, maps: Maps, limit: int) -> Randomisation | None:
        """Return the check of one method on at most `limit` images.

        It is None if one of these images has a map that is not finite.

        maps: the maps of the trained model.
        """
        count = min(len(self._images), limit)
        before = maps[:count]
        if not bool(before.isfinite().all()):
            return None
        return randomisation(
            self._model,
            self._images[:count],
            self._targets[:count],
            method,
            kept=self._keeps_prediction[:, :count],
            before=before,
            seed=self._seed,
        )


def _time_method(
    method: Explain, model: Model, images: Images, targets: Labels
) -> tuple[Maps, float]:
    """Return the maps of a method, and the seconds per image."""
    start = _now(images)
    with evaluating(model):
        maps = method(model, images, targets)
    return maps, (_now(images) - start) / len(images)


def _now(images: Images) -> float:
    """Return the time in seconds, after the device has finished all that it was given."""
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def compute_maps(
    model: Model,
    methods: Mapping[str, Explain],
    images: Images,
    targets: Labels,
    *,
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> dict[str, Maps]:
    """Return the maps of every method, then of the baselines, on the CPU.

    Values that are not finite count as 0.
    """
    all_maps = dict[str, Maps]()
    for name, explain in methods.items():
        with evaluating(model):
            maps = explain(model, images, targets.to(model.device))
        all_maps[name] = maps.detach().cpu().float().nan_to_num(0.0, 0.0, 0.0)
        advance(1)
    return all_maps | baselines(model, len(images), seed)


def baselines(model: Model, count: int, seed: int) -> dict[str, Maps]:
    """Return the maps of the baselines, which ignore the image, on the removal grid."""
    grid = removal_grid(model)
    return {RANDOM: random_maps(count, grid, seed=seed), CENTRE: centre_maps(count, grid)}


def randomised_images(forwards: float) -> int:
    """Return the largest number of images for the randomisation check of a method.

    forwards: its cost in forward passes.
    """
    return RANDOMISED if forwards <= COSTLY else RANDOMISED_COSTLY


class SwappedPair(NamedTuple):
    """Two methods that change places between two checks.

    better, worse: the methods, by the first check.
    in_first, in_second: the mean paired difference (better minus worse) in each check. The interval
        of the first lies above 0, that of the second below 0.
    """

    better: str
    worse: str
    in_first: Estimate
    in_second: Estimate


def rank_agreement(
    first: Mapping[str, PerImage],
    second: Mapping[str, PerImage],
    *,
    groups: Tensor | None = None,
    seed: int = 0,
) -> tuple[Estimate, list[SwappedPair]]:
    """Return the agreement of two rankings of methods, and the pairs that change places.

    The agreement is Kendall's tau-b of the mean results: 1 for the same order, -1 for the reverse,
    0 where one ranks nothing.

    The intervals of the differences of a pair are as wide as all pairs require.

    first, second: insertion minus deletion (n,) of at least two methods in each check.
    """
    from scipy import stats  # takes half a second to import

    names = list(first)
    pairs = list(combinations(names, 2))
    first_differences = _differences(first, pairs, groups, seed)
    second_differences = _differences(second, pairs, groups, seed)
    swapped = list[SwappedPair]()
    for pair, by_first, by_second in zip(pairs, first_differences, second_differences):
        minuend, subtrahend = pair
        sides = (beyond(by_first, 0.0), beyond(by_second, 0.0))
        if sides == (Side.ABOVE, Side.BELOW):
            swapped.append(SwappedPair(minuend, subtrahend, by_first, by_second))
        elif sides == (Side.BELOW, Side.ABOVE):
            in_first = _negative(by_first)
            in_second = _negative(by_second)
            swapped.append(SwappedPair(subtrahend, minuend, in_first, in_second))
    first_means = [float(first[name].double().mean()) for name in names]
    second_means = [float(second[name].double().mean()) for name in names]
    tau = float(stats.kendalltau(first_means, second_means).statistic)
    if math.isnan(tau):
        tau = 0.0
    return Estimate(tau, n=len(first[names[0]]), unit=""), swapped


def _differences(
    results: Mapping[str, PerImage],
    pairs: Sequence[tuple[str, str]],
    groups: Tensor | None,
    seed: int,
) -> list[Estimate]:
    """Return the mean paired difference of each pair, with an interval as wide as all require."""
    differences = torch.stack(
        [results[minuend].double() - results[subtrahend].double() for minuend, subtrahend in pairs]
    )
    means = estimates(
        differences, groups=groups, seed=seed, unit="", least=-MOST_APART, most=MOST_APART
    )
    return [widened(mean, len(pairs), least=-MOST_APART, most=MOST_APART) for mean in means]


def _negative(estimate: Estimate) -> Estimate:
    low = None if estimate.high is None else -estimate.high
    high = None if estimate.low is None else -estimate.low
    return replace(estimate, value=-estimate.value, low=low, high=high)


def forward_equivalents(model: Model, images: Images, targets: Labels, explain: Explain) -> float:
    """Return the cost of a method in forward passes of these images.

    Counted are its matrix products and convolutions, also those of backward passes. Other
    operations of a method, such as a blur, are not.
    """

    def forward() -> None:
        with torch.no_grad(), evaluating(model):
            model(images)

    return _flops(lambda: explain(model, images, targets)) / max(1, _flops(forward))


def _flops(compute: Callable[[], object]) -> int:
    """Return the floating-point operations of a computation."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused kernel cannot be counted
    try:
        with _Count() as counter:
            compute()
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)
    return int(counter.total)


class _Count(TorchDispatchMode):
    """Counts the floating-point operations computed while it is entered, by formulas of torch.

    torch's FlopCounterMode also tracks modules, with hooks that do not work with
    torch.autograd.grad. torch has no formulas for fused attention on the CPU, nor for oneDNN's
    linear layer (lens/quick_passes.py).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.formulas = dict(flop_registry)
        attention = "_scaled_dot_product_flash_attention_for_cpu"
        missing: list[tuple[Any, str, Callable[..., int]]] = [
            (torch.ops.aten, attention, _attention_flops),
            (torch.ops.aten, f"{attention}_backward", _attention_backward_flops),
            (torch.ops.mkldnn, "_linear_pointwise", _linear_flops),
        ]
        for namespace, name, formula in missing:
            if hasattr(namespace, name):
                self.formulas[getattr(namespace, name)] = formula

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count a call, by its formula or decomposed, and execute it. torch calls this."""
        kwargs = kwargs or {}
        formula = self.formulas.get(func._overloadpacket)
        if formula is None:
            # A composed operation is counted by its parts, when they reach this mode again.
            with self:
                composed = func.decompose(*args, **kwargs)
            if composed is not NotImplemented:
                return composed
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out


# Formulas of operations, which torch calls with the arguments of the operation.


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return _products(query, key, value, times=1.0)


def _attention_backward_flops(
    _gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    return _products(query, key, value, times=2.5)  # five products where the forward has two


def _linear_flops(tokens: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * tokens.numel() * weight.shape[0])


def _products(query: Any, key: Any, value: Any, *, times: float) -> int:
    """Return the operations of queries times keys and of weights times values, times a factor."""
    *leading, queries, head_dim = query.shape
    keys = key.shape[-2]
    value_dim = value.shape[-1]
    return int(times * 2 * prod(leading) * queries * keys * (head_dim + value_dim))
