"""All checks of explanation methods and of two model-free baselines, on the same images and
targets; what a method costs, counted in forward passes; and whether two checks rank methods alike.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any

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
# of a method of more than COSTLY forward passes: enough to be judged (checks.ENOUGH)
RANDOMISED_COSTLY = 12
COSTLY = 100
MOST_APART = 2.0  # difference of two values of insertion minus deletion
CHECKS = 5  # steps of `league` for each method


@dataclass(frozen=True)
class Settings:
    """How methods are checked."""

    substrate: Substrate = SUBSTRATE  # what replaces a removed patch
    steps: int = STEPS  # of the removal curves
    counterfactuals: bool = True  # whether to search sets of patches that change the prediction
    seed: int = 0  # of ties, baselines, randomised weights
    batch_size: int | None = None


@dataclass(frozen=True)
class MethodChecks:
    """The results of every check on one method, image by image."""

    name: str
    maps: Maps  # raw, with zeros where they were not finite
    faults: MapFaults
    values: Mapping[str, PerImage]  # of every check, by its name in the league
    scores: Mapping[
        str, Float[Tensor, " masked"]
    ]  # the same of localisation, of the images with a mask
    curves: Faithfulness
    counterfactuals: Counterfactuals | None
    randomisation: Randomisation | None
    seconds: float  # per image
    forwards: float | None  # the cost in forward passes of the model, None for a baseline


def league(
    model: Model,
    images: Images,
    targets: Labels,
    methods: Mapping[str, Explain],
    *,
    masks: Masks | None = None,
    computed: Mapping[str, tuple[Maps, float]] | None = None,
    settings: Settings,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[MethodChecks, ...]:
    """Return the results of all checks for every method, followed by the baselines random and
    centre.

    images, targets: on the model's device, all at once; masks: of the images, None if not known;
    images without an object or without background are left out of the scores. computed: maps that
    are computed already, by method, with the seconds per image. A map that is not finite counts as
    constant and is flagged. advance: called with 1 for each check done, CHECKS times for each
    method and baseline.
    """
    known = dict[str, tuple[Maps, float]]()
    given = (model, images, targets)
    for name, method in methods.items():
        known[name] = computed[name] if computed else _timed(method, *given)
    known |= {
        name: (maps, 0.0) for name, maps in baselines(model, len(images), settings.seed).items()
    }
    advance(len(known))
    faults = {name: map_faults(maps) for name, (maps, _) in known.items()}
    sound = {
        name: torch.where(faults[name].not_finite[:, None, None], 0.0, maps.float()).to(
            images.device
        )
        for name, (maps, _) in known.items()
    }
    every = list(sound.values())
    count = len(sound)
    common: dict[str, Any] = {"seed": settings.seed, "batch_size": settings.batch_size}
    curves = faithfulness(
        *given, every, substrate=settings.substrate, steps=settings.steps, **common
    )
    advance(count)
    imputed = faithfulness(*given, every, substrate="imputed", **common)
    advance(count)
    turned: Any = [None] * count
    if settings.counterfactuals:
        known_points = [each.deletion for each in curves]
        turned = along_map(
            model, images, every, known=known_points, substrate=settings.substrate, **common
        )
    advance(count)
    usable = torch.zeros(len(images), dtype=torch.bool) if masks is None else has_edge(masks).cpu()
    objects = (
        masks[usable.to(masks.device)].cpu() if masks is not None and bool(usable.any()) else None
    )
    kept = predictions_kept(model, images[:RANDOMISED], seed=settings.seed)
    results = []
    for place, (name, maps) in enumerate(sound.items()):
        forwards = None
        changed = None
        scores = {}
        if name in methods:
            forwards = forward_equivalents(
                model, images[:1], targets[:1], methods[name]
            )  # the same for every image
            some = min(len(images), randomised_images(forwards))
            before = known[name][0][:some]
            if bool(before.isfinite().all()):
                shown = model, images[:some], targets[:some], methods[name], kept[:, :some]
                changed = randomisation(*shown, before=before, seed=settings.seed)
        if objects is not None:
            scores = {key: score(maps.cpu()[usable], objects) for key, score in SCORES.items()}
        results.append(
            MethodChecks(
                name,
                maps.cpu(),
                faults[name],
                curves[place].values | {"road": imputed[place].gaps},
                scores,
                curves[place],
                turned[place],
                changed,
                known[name][1],
                forwards,
            )
        )
        advance(1)
    return tuple(results)


def _timed(method: Explain, model: Model, images: Images, targets: Labels) -> tuple[Maps, float]:
    """Return the maps of a method, and the seconds per image."""
    start = _now(images)
    with evaluating(model):
        maps = method(model, images, targets)
    return maps, (_now(images) - start) / len(images)


def _now(images: Images) -> float:
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def explained(
    model: Model,
    methods: Mapping[str, Explain],
    images: Images,
    targets: Labels,
    *,
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> dict[str, Maps]:
    """Return the maps of every method, then of the baselines, on the CPU; values that are not
    finite count as 0.
    """
    found = {}
    for name, explain in methods.items():
        with evaluating(model):
            maps = explain(model, images, targets.to(model.device))
        found[name] = maps.detach().cpu().float().nan_to_num(0.0, 0.0, 0.0)
        advance(1)
    return found | baselines(model, len(images), seed)


def baselines(model: Model, count: int, seed: int) -> dict[str, Maps]:
    """Return the maps of the baselines, which ignore the image, on the grid of the removed
    patches."""
    grid = removal_grid(model)
    return {RANDOM: random_maps(count, grid, seed=seed), CENTRE: centre_maps(count, grid)}


def randomised_images(forwards: float) -> int:
    """On how many images at most a method is checked with randomised weights, by its cost in
    forward passes.
    """
    return RANDOMISED if forwards <= COSTLY else RANDOMISED_COSTLY


def rank_agreement(
    first: Mapping[str, PerImage],
    second: Mapping[str, PerImage],
    *,
    groups: Tensor | None = None,
    seed: int = 0,
) -> tuple[Estimate, list[tuple[str, str, Estimate, Estimate]]]:
    """Return how far two checks agree about the ranking of methods: Kendall's tau-b of the mean
    results, 1 for the same order and -1 for the reverse, 0 where one ranks nothing; and the pairs
    of methods (better, worse) that change places, with the mean paired differences by either check:
    their intervals, as wide as all pairs require, lie above and below 0.

    first, second: the result of the same two methods or more for each image (n,), greater is
    better.
    """
    from scipy import stats  # takes half a second to import

    names = list(first)
    pairs = list(combinations(names, 2))
    sides = []
    differences = []
    for results in (first, second):
        own = torch.stack([results[one].double() - results[other].double() for one, other in pairs])
        means = estimates(
            own, groups=groups, seed=seed, unit="", least=-MOST_APART, most=MOST_APART
        )
        differences.append(
            [widened(each, len(pairs), least=-MOST_APART, most=MOST_APART) for each in means]
        )
        sides.append([beyond(each, 0.0) for each in differences[-1]])
    swapped = []
    for (one, other), own, changed, *both in zip(pairs, *differences, *sides):
        if both == [Side.ABOVE, Side.BELOW]:
            swapped.append((one, other, own, changed))
        elif both == [Side.BELOW, Side.ABOVE]:
            swapped.append((other, one, _negative(own), _negative(changed)))
    ranked = (
        [float(results[name].double().mean()) for name in names] for results in (first, second)
    )
    tau = float(stats.kendalltau(*ranked).statistic)
    return Estimate(tau if tau == tau else 0.0, n=len(first[names[0]]), unit=""), swapped


def _negative(estimate: Estimate) -> Estimate:
    low, high = (None if end is None else -end for end in (estimate.high, estimate.low))
    return replace(estimate, value=-estimate.value, low=low, high=high)


def forward_equivalents(model: Model, images: Images, targets: Labels, explain: Explain) -> float:
    """Return the cost of a method's matrix products and convolutions, in forward passes of these
    images.

    Backward passes are counted by their operations. Other operations of a method (a blur, say) are
    counted only if they are matrix products or convolutions.
    """

    def forward() -> None:
        with torch.no_grad(), evaluating(model):
            model(images)

    return _flops(lambda: explain(model, images, targets)) / max(1, _flops(forward))


def _flops(work: Callable[[], object]) -> int:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused kernel cannot be counted
    try:
        with _Count() as counter:
            work()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return int(counter.total)


class _Count(TorchDispatchMode):
    """Counts the floating-point operations of everything computed inside, by torch's own formulas.

    torch's FlopCounterMode also tracks modules, with hooks that do not work with
    torch.autograd.grad. torch has no formulas for fused attention on the CPU, nor for oneDNN's
    linear layer (lens/quick_passes.py).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.formulas = dict(flop_registry)
        attention = "_scaled_dot_product_flash_attention_for_cpu"
        own: dict[tuple[Any, str], Callable[..., int]] = {
            (torch.ops.aten, attention): lambda query, key, value, *_, **__: _products(
                query, key, value, 1.0
            ),
            (torch.ops.aten, f"{attention}_backward"): lambda _, query, key, value, *__, **___: (
                _products(
                    query,
                    key,
                    value,
                    2.5,  # five products where the forward has two
                )
            ),
            (torch.ops.mkldnn, "_linear_pointwise"): lambda tokens, weight, *_, **__: (
                2 * tokens.numel() * weight.shape[0]
            ),
        }
        self.formulas |= {
            getattr(place, name): of for (place, name), of in own.items() if hasattr(place, name)
        }

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count a call, by its formula or decomposed, and execute it."""
        kwargs = kwargs or {}
        formula = self.formulas.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out


def _products(query: Any, key: Any, value: Any, times: float) -> int:
    *leading, queries, head_dim = query.shape
    return int(times * 2 * prod(leading) * queries * key.shape[-2] * (head_dim + value.shape[-1]))
