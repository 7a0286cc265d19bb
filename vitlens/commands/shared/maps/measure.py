"""Measures the checks of maps: of the methods of a model, where maps lie on objects, and how much they tell."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from vitlens.analysis.attention.map_checks import FEWEST, fixed_share, map_bits
from vitlens.analysis.evaluation.intervals import estimates
from vitlens.analysis.faithfulness.checks import STEADY_IMAGES, Judgement
from vitlens.analysis.faithfulness.defaults import BASELINES, OTHER_IMAGES, OTHER_STEPS
from vitlens.analysis.faithfulness.league import MOST_APART, MethodChecks, Settings
from vitlens.analysis.faithfulness.localisation import (
    baseline_scores,
    has_edge,
    mass_inside,
    other_images,
    pointing_hits,
    pointing_rate,
    roc_auc,
)
from vitlens.analysis.faithfulness.maps import AnyMaps, Explain
from vitlens.analysis.faithfulness.removal import faithfulness, has_substrate
from vitlens.analysis.faithfulness.sanity import Stability, stability
from vitlens.commands.run.progress import progress
from vitlens.commands.shared.maps import record as kept
from vitlens.commands.shared.maps.record import IMPUTED, MapCheckRow, MapRow, OnObjectRow, judged_by
from vitlens.data.identity import sources as same_photograph
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps, Masks
from vitlens.uncertainty import Estimate, difference_of, in_points, student_mean, widened

_BESIDE: Final = ("baseline", "of_baseline", "difference")  # columns of a score beside that of a baseline
_UNRANKED: Final = Judgement("inconclusive", lack="not finite")  # maps whose weights were not randomised
Gaps = Mapping[str, Tensor]  # insertion minus deletion of each method, or baseline, image by image


@dataclass(frozen=True)
class CheckedMaps:
    """The methods of one model, checked on the same images. model, images, targets, functions: what was explained, on
    the model's device; results: of `league`; groups, sources (n,): of the images, and which photograph each is;
    substrates: other replacements of removed patches, as far as the model has them; steadiness: whether the images are
    shifted. Patches are removed, and images shifted, when the results are first read."""

    model: Model
    images: Images
    targets: Labels
    functions: Mapping[str, Explain]
    results: Sequence[MethodChecks]
    settings: Settings
    groups: Tensor | None = None
    sources: Tensor | None = None
    substrates: Sequence[str] = ("mean",)
    steadiness: bool = True
    quiet: bool = False

    @cached_property
    def removals(self) -> tuple[dict[str, Gaps], dict[str, Gaps]]:
        """By replacement of removed patches, insertion minus deletion of each method and baseline; and, with those that
        judge, of the methods' maps of other images."""
        names = [checks.name for checks in self.results]
        maps = [checks.maps[: self.count] for checks in self.results]
        own = self.settings.substrate
        others = [name for name in dict.fromkeys(self.substrates) if name != own and has_substrate(self.model, name)]
        judging = judged_by({own, *others, IMPUTED})
        where = self.other_images()
        moved = [] if where is None else [each[where] for name, each in zip(names, maps) if name not in BASELINES]
        gaps: dict[str, Gaps] = {own: {checks.name: checks.values["gap"] for checks in self.results}}
        total = self.count * (len(others) + (len(judging) if moved else 0))
        with progress("Checking on other substrates", total, quiet=self.quiet) as advance:
            for name in others:
                gaps[name] = dict(zip(names, self._removed(name, maps, advance)))
            shuffled = {name: dict(zip(self.methods, self._removed(name, moved, advance))) for name in judging if moved}
        gaps[IMPUTED] = {checks.name: checks.values["road"] for checks in self.results}
        return gaps, dict(shuffled)

    @cached_property
    def steady(self) -> dict[str, Stability]:
        """Return the maps of images that are shifted, or flipped, by method."""
        images = self.images[:STEADY_IMAGES]
        targets = self.targets[:STEADY_IMAGES]
        known = {checks.name: checks for checks in self.results}
        found = {}
        with progress("Disturbing images", len(self.functions), unit="methods", quiet=self.quiet) as advance:
            for name, explain in self.functions.items():
                sound = not bool(known[name].faults.not_finite.any())
                maps = known[name].maps[: len(images)] if sound else None  # broken ones are zeros in the results
                found[name] = stability(self.model, images, targets, explain, maps=maps)
                advance(1)
        return found

    @property
    def count(self) -> int:
        """Return the images on which other replacements, and maps of other images, are tried."""
        return min(OTHER_IMAGES, len(self.images))

    @property
    def methods(self) -> list[str]:
        """Return the methods without the baselines."""
        return [checks.name for checks in self.results if checks.name not in BASELINES]

    def means(
        self, values: Tensor, *, unit: str = "", seed: int = 0, least: float = -1.0, most: float = 1.0
    ) -> list[Estimate]:
        """Return the mean of each row (cases, n) over the first n images, within the possible values."""
        groups = None if self.groups is None else self.groups[: values.shape[1]]
        return estimates(values, groups=groups, seed=seed, unit=unit, least=least, most=most)

    def _removed(self, substrate: Any, maps: Sequence[AnyMaps], advance: Any) -> list[Tensor]:
        """Return insertion minus deletion of maps of the first images with one replacement."""
        settings = self.settings
        count = self.count
        given = (self.model, self.images[:count], self.targets[:count], maps)
        common: dict[str, Any] = {"seed": settings.seed, "batch_size": settings.batch_size, "advance": advance}
        steps = settings.steps if substrate == settings.substrate else OTHER_STEPS
        return [each.gaps for each in faithfulness(*given, substrate=substrate, steps=steps, **common)]

    def other_images(self) -> Tensor | None:
        """For each of the first images one of another source, drawn with the seed; None where all are of one."""
        own = torch.arange(self.count) if self.sources is None else self.sources[: self.count].cpu()
        return other_images(own, seed=self.settings.seed)

    def rows(self, on_object: Sequence[OnObjectRow] = ()) -> Iterator[MapCheckRow]:
        """Yield the row of each method in each check. on_object: where its maps lie, where masks are known."""
        alias = self.model.alias
        seed = self.settings.seed
        looks = len(self.methods)
        by_name = {checks.name: checks for checks in self.results}
        found = {name: by_name[name].randomisation for name in self.methods}
        weights = {
            name: _UNRANKED if each is None else each.judged(groups=self.groups, seed=seed)
            for name, each in found.items()
        }
        passing = [name for name, judged in weights.items() if judged.state == "pass"]
        every, shuffled = self.removals

        def margin(own: Tensor, other: Tensor) -> Estimate:
            """Return the paired difference on the images of both, as wide as so many methods require."""
            count = min(len(own), len(other))
            (difference,) = self.means((own[:count] - other[:count])[None], least=-MOST_APART, most=MOST_APART)
            return widened(replace(difference, n=count), looks, least=-MOST_APART, most=MOST_APART)

        for substrate in judged_by(every):
            gaps = every[substrate]
            moved = shuffled.get(substrate, {})
            leader = max(passing or self.methods, key=lambda name: float(gaps[name].mean()))
            for name, value in zip(self.methods, self.means(torch.stack([gaps[name] for name in self.methods]))):
                margins = {base: margin(gaps[name], gaps[base]) for base in BASELINES}
                if name in moved:
                    margins[kept.SHUFFLED] = margin(gaps[name], moved[name])
                behind = None if name == leader else margin(gaps[leader], gaps[name])
                usable = int(by_name[name].faults.sound.sum())
                yield kept.removal_check(alias, name, substrate, value, margins, usable=usable, behind=behind)
        for name in self.methods:
            yield kept.map_check(alias, name, kept.WEIGHTS, weights[name])
        for name, steady in self.steady.items() if self.steadiness else ():
            yield kept.map_check(alias, name, kept.SHIFTS, steady.judged(groups=self.groups, seed=seed))
        yield from (kept.object_check(row) for row in on_object if row.score == "roc_auc")


def map_rows(alias: str, maps: Sequence[tuple[str, Maps]], split: Split) -> list[MapRow]:
    """Return the row of each kind of map of the split's images, by its name; the pointing game where masks are
    known."""
    groups = None if split.groups is None else split.groups.numpy()
    hits = list[OnObjectRow]()
    if split.masks is not None:
        sources = same_photograph(split)
        masks = split.masks.cpu()
        hits = on_object_rows(alias, maps, "pointing", masks, groups=split.groups, sources=sources)
    rows = []
    for at, (name, own) in enumerate(maps):
        bits = student_mean(map_bits(own).numpy(), groups=groups, unit="bits", least=0.0)
        few = len(own) < FEWEST
        fixed = None if few else student_mean(fixed_share(own).numpy(), groups=groups, least=0.0, most=1.0)
        row = MapRow(model=alias, maps=name, information=bits, by_place=fixed)
        if hits:
            hit = hits[at]
            row = replace(row, pointing=hit.estimate, **{each: getattr(hit, each) for each in _BESIDE})
        rows.append(row)
    return rows


def on_object_rows(
    model: str,
    maps: Sequence[tuple[str, AnyMaps]],
    score: str,
    masks: Masks,
    *,
    groups: Tensor | None = None,
    sources: Tensor | None = None,
    seed: int = 0,
) -> list[OnObjectRow]:
    """Return the row of each kind of map, with its name, of one model in one score on the same images.

    Images without an object, and but for pointing those without background, are left out. All tensors on the CPU;
    groups (n,): of the images; sources (n,): which photograph each image is (None: its group), as no baseline is to be
    of the same one.
    """
    sources = groups if sources is None else sources
    known = masks.flatten(1).any(1) if score == "pointing" else has_edge(masks)
    if not bool(known.any()):
        return []
    masks = masks[known]
    groups, sources = (None if each is None else each[known] for each in (groups, sources))
    judge = _ON_OBJECT[score]
    values = []
    chances = []
    names = []
    for _, every in maps:
        own = every[known].float()
        baselines = baseline_scores(judge, own, masks, groups=sources, seed=seed)
        names.append(max(baselines, key=lambda name: float(baselines[name].mean())))
        values.append(judge(own, masks).double())
        chances.append(baselines[names[-1]].double())
    unit = "" if score == "roc_auc" else "fraction"
    scored = torch.stack(values)
    means = (
        [pointing_rate(hits, groups=groups, seed=seed) for hits in scored]
        if score == "pointing"
        else estimates(scored, groups=groups, seed=seed, unit=unit, least=0.0, most=1.0)
    )
    gains = estimates(scored - torch.stack(chances), groups=groups, seed=seed, unit=unit, least=-1.0, most=1.0)
    if score == "pointing":  # of hits that are all 0, or all 1, the bootstrap would have no width
        apart = [
            difference_of(hits, pointing_rate(each, groups=groups, seed=seed)) for hits, each in zip(means, chances)
        ]
        gains = [_wider(*pair) for pair in zip(gains, apart)]
    return [
        OnObjectRow(
            model,
            name,
            score,
            replace(mean, n=len(masks), unit=unit),
            baseline,
            Estimate(float(chance.mean()), unit=unit),
            in_points(replace(gain, n=len(masks), unit=unit)),
        )
        for (name, _), mean, baseline, chance, gain in zip(maps, means, names, chances, gains)
    ]


def _wider(paired: Estimate, apart: Estimate) -> Estimate:
    """Return the paired difference, at each end with the wider of its interval and that of independent rates, in
    points."""
    if paired.low is None or paired.high is None or apart.low is None or apart.high is None:
        return paired
    return replace(paired, low=min(paired.low, apart.low / 100), high=max(paired.high, apart.high / 100))


_ON_OBJECT: Final = {"pointing": pointing_hits, "mass": mass_inside, "roc_auc": roc_auc}
