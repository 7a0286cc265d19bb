"""All checks of explanation methods and of two model-free baselines, on the same images and targets."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.faithfulness.counterfactual import Counterfactuals, along_map
from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.analysis.faithfulness.deletion import STEPS, Faithfulness, faithfulness
from vitlens.analysis.faithfulness.forwards import forward_equivalents
from vitlens.analysis.faithfulness.localisation import (
    average_precision,
    centre_maps,
    has_edge,
    mask_iou,
    mass_inside,
    pixel_accuracy,
    pointing_hits,
    roc_auc,
)
from vitlens.analysis.faithfulness.map_shares import MapFaults, map_faults
from vitlens.analysis.faithfulness.masking import Cells
from vitlens.analysis.faithfulness.randomisation import Explain, Randomisation, predictions_kept, randomisation
from vitlens.analysis.faithfulness.resampled import removal_grid
from vitlens.analysis.faithfulness.road import road
from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.names import Substrate
from vitlens.shapes import Images, Labels, Maps, Masks

RANDOM, CENTRE = "random", "centre"  # the baselines' names
BASELINES: Final = (RANDOM, CENTRE)
RANDOMISED = 32  # images of the randomisation check, which needs a map of each at every stage
RANDOMISED_COSTLY = 12  # of a method of more than COSTLY forward passes: enough to be judged (cascade.ENOUGH)
COSTLY = 100
COST_IMAGES = 1  # on which the cost in forward passes is counted: it is the same for every image

SCORES: Final[Mapping[str, Callable[[Maps, Masks], Float[Tensor, " batch"]]]] = {
    "roc_auc": roc_auc,
    "average_precision": average_precision,
    "iou": mask_iou,
    "pixel_accuracy": pixel_accuracy,
    "mass": mass_inside,
    "pointing": pointing_hits,
}


@dataclass(frozen=True)
class Settings:
    """substrate: what replaces a removed patch; steps: of the removal curves; road: whether to run ROAD;
    counterfactuals: whether to search sets that change the prediction; seed: of ties, baselines, randomised weights.
    """

    substrate: Substrate = SUBSTRATE
    steps: int | None = STEPS
    road: bool = True
    counterfactuals: bool = True
    seed: int = 0
    batch_size: int | None = None


@dataclass(frozen=True)
class MethodChecks:
    """The results of every check on one method, image by image.

    maps (batch, rows, columns), raw, with zeros where they were not finite (see faults); scores: by name, (images with
    a mask,); seconds: per image; forwards: the cost in forward passes of the model, None for a baseline.
    """

    name: str
    maps: Maps
    faults: MapFaults
    fidelity: Faithfulness
    road: Faithfulness | None
    counterfactuals: Counterfactuals | None
    scores: Mapping[str, Float[Tensor, " masked"]]
    randomisation: Randomisation | None
    seconds: float
    forwards: float | None

    @property
    def judged(self) -> Float[Tensor, " batch"]:
        """The score by which methods are judged, image by image: ROAD's LeRF minus MoRF, else insertion minus deletion.

        No method chooses by ROAD; `best` chooses by insertion on a blurred image.
        """
        return (self.fidelity if self.road is None else self.road).gaps


def league(
    model: Model,
    images: Images,
    targets: Labels,
    methods: Mapping[str, Explain],
    *,
    masks: Masks | None = None,
    computed: Mapping[str, tuple[Maps, float]] | None = None,
    settings: Settings | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[MethodChecks, ...]:
    """The results of all checks for every method, followed by the baselines random and centre.

    images, targets: on the model's device, all at once; masks: of the images, None if not known; images without an
    object or without background are left out of the scores. computed: maps that are computed already, by method, with
    the seconds per image. A map that is not finite counts as constant and is flagged. advance: called with 1 for each
    check done, `checks_in` times.
    """
    settings = settings or Settings()
    grid = removal_grid(model)
    known = {
        name: (computed or {}).get(name) or _explained(model, images, targets, explain)
        for name, explain in methods.items()
    }
    known |= {name: (maps, 0.0) for name, maps in _baselines(len(images), grid, settings.seed)}
    advance(len(known))
    faults = {name: map_faults(maps) for name, (maps, _) in known.items()}
    sound = {name: _without_broken(maps, faults[name]).to(images.device) for name, (maps, _) in known.items()}
    common = {"grid": grid, "seed": settings.seed, "batch_size": settings.batch_size}
    kinds = {"substrate": settings.substrate, **common}
    every = list(sound.values())
    fidelity = faithfulness(model, images, targets, every, steps=settings.steps, **kinds)  # type: ignore[arg-type]
    advance(len(every))
    imputed = road(model, images, targets, every, **common) if settings.road else [None] * len(every)  # type: ignore[arg-type]
    advance(len(every))
    curves = [each.deletion for each in fidelity]
    turned = along_map(model, images, every, known=curves, **kinds) if settings.counterfactuals else [None] * len(every)  # type: ignore[arg-type]
    advance(len(every))
    kept = predictions_kept(model, images[:RANDOMISED], seed=settings.seed)
    results = []
    for place, name in enumerate(sound):
        explain, cost_batch = methods.get(name), (images[:COST_IMAGES], targets[:COST_IMAGES])
        forwards = None if explain is None else forward_equivalents(model, *cost_batch, explain)
        results.append(
            MethodChecks(
                name,
                sound[name].cpu(),
                faults[name],
                fidelity[place],
                imputed[place],
                turned[place],
                _scores(sound[name], masks),
                None
                if explain is None or forwards is None
                else _randomised(
                    model, images, targets, explain, known[name][0], settings, kept[:, : randomised_images(forwards)]
                ),
                known[name][1],
                forwards,
            )
        )
        advance(1)
    return tuple(results)


def explained(
    model: Model,
    methods: Mapping[str, Explain],
    images: Images,
    targets: Labels,
    *,
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> dict[str, Maps]:
    """The maps of every method, then of the baselines, on the CPU; values that are not finite count as 0."""
    found = {}
    for name, explain in methods.items():
        with evaluating(model):
            maps = explain(model, images, targets.to(model.device))
        found[name] = maps.detach().cpu().float().nan_to_num(0.0, 0.0, 0.0)
        advance(1)
    return found | dict(_baselines(len(images), removal_grid(model), seed))


def checks_in(methods: int) -> int:
    """The number of times that `league` calls advance for this many methods."""
    return 5 * (methods + len(BASELINES))


def randomised_images(forwards: float) -> int:
    """On how many images at most a method is checked with randomised weights, by its cost in forward passes."""
    return RANDOMISED if forwards <= COSTLY else RANDOMISED_COSTLY


def _explained(model: Model, images: Images, targets: Labels, explain: Explain) -> tuple[Maps, float]:
    """A method's maps of all images, and the seconds per image."""
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    with evaluating(model):
        maps = explain(model, images, targets)
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    return maps, (time.perf_counter() - start) / len(images)


def _baselines(count: int, grid: Cells, seed: int) -> Iterator[tuple[str, Maps]]:
    yield RANDOM, random_maps(count, grid, seed=seed)
    yield CENTRE, centre_maps(count, grid)


def _without_broken(maps: Maps, faults: MapFaults) -> Maps:
    return torch.where(faults.not_finite[:, None, None], 0.0, maps.float())


def _scores(maps: Maps, masks: Masks | None) -> dict[str, Float[Tensor, " masked"]]:
    if masks is None:
        return {}
    usable = has_edge(masks)
    if not bool(usable.any()):
        return {}
    usable_pairs = maps.cpu()[usable.cpu()], masks[usable].cpu()
    return {name: score(*usable_pairs) for name, score in SCORES.items()}


def _randomised(
    model: Model,
    images: Images,
    targets: Labels,
    explain: Explain,
    maps: Maps,
    settings: Settings,
    kept: Bool[Tensor, "stages randomised"],
) -> Randomisation | None:
    """The randomisation check of the first images, as many as `kept` has, whose maps are known; None where they are not
    finite."""
    count = kept.shape[1]
    batch, before = (images[:count], targets[:count]), maps[:count]
    if not bool(before.isfinite().all()):
        return None
    return randomisation(model, *batch, explain, seed=settings.seed, kept=kept, before=before)


def random_maps(count: int, grid: tuple[int, int], *, seed: int = 0) -> Maps:
    """A map of uniform noise for each of count images; a map does not depend on count."""
    return torch.rand(count, *grid, generator=torch.Generator().manual_seed(seed))
