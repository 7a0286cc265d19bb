"""The checks of the maps of one model, their scores on objects, and the information that they hold.

`CheckedMaps` has the checks of attribution methods, which remove patches and shift images.
`map_rows` and `on_object_rows` only read maps.
"""

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
from vitlens.analysis.faithfulness.maps import AnyMaps, Explain, is_one_map
from vitlens.analysis.faithfulness.removal import faithfulness, has_substrate
from vitlens.analysis.faithfulness.sanity import Stability, stability
from vitlens.commands.run.progress import Advance, progress
from vitlens.commands.shared.maps.record import (
    IMPUTED,
    SHIFTS,
    SHUFFLED,
    WEIGHTS,
    MapCheckRow,
    MapRow,
    OnObjectRow,
    judged_by,
    map_check,
    object_check,
    removal_check,
)
from vitlens.data.identity import sources as same_photograph
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps, Masks
from vitlens.uncertainty import Estimate, difference_of, in_points, student_mean, widened

# the judgement on maps for which the weights were not randomised, as one of them is not finite
_NOT_RANDOMISED: Final = Judgement("inconclusive", lack="not finite")
# the judgement on maps without a function that would make them again
_FIXED: Final = Judgement("inconclusive", lack="fixed maps")
# scores of maps on objects, by name: functions of maps and masks, which return a score an image
_SCORES: Final = {"pointing": pointing_hits, "mass": mass_inside, "roc_auc": roc_auc}
Gaps = Mapping[str, Tensor]  # by method or baseline, (n,), insertion minus deletion


@dataclass(frozen=True)
class Removals:
    """Insertion minus deletion by replacement of removed patches.

    gaps: of each method and baseline.
    shuffled: of each method's maps of other images, with the replacements that judge; empty if all
        images are of one source.
    """

    gaps: Mapping[str, Gaps]
    shuffled: Mapping[str, Gaps]


@dataclass(frozen=True)
class CheckedMaps:
    """The methods of one model, checked on the same images.

    Patches are removed, and images shifted, when the results are first read.

    images, targets: the images that were explained, and their classes, on the model's device.
    functions: by method, the function that makes its maps; fixed maps have none.
    results: the results of `league` for the methods and the baselines.
    settings: the settings of `league`.
    groups: (n,), the source of each image, for intervals.
    sources: (n,), the photograph of each image, for maps of other images.
    substrates: other replacements of removed patches; those that the model does not have are
        skipped.
    steadiness: True to shift the images.
    """

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

    @property
    def count(self) -> int:
        """Return the number of images for other replacements, and for maps of other images."""
        return min(OTHER_IMAGES, len(self.images))

    @property
    def methods(self) -> list[str]:
        """Return the methods without the baselines."""
        return [checks.name for checks in self.results if checks.name not in BASELINES]

    @property
    def by_name(self) -> dict[str, MethodChecks]:
        """Return the results by method and baseline."""
        return {checks.name: checks for checks in self.results}

    @cached_property
    def removals(self) -> Removals:
        """Return insertion minus deletion with every replacement of removed patches."""
        main = self.settings.substrate  # of which `league` has the gaps
        alternatives = []
        for name in dict.fromkeys(self.substrates):
            if name != main and has_substrate(self.model, name):
                alternatives.append(name)
        judging = judged_by({main, *alternatives, IMPUTED})
        maps = {checks.name: checks.maps[: self.count] for checks in self.results}
        shuffled_maps = self._shuffled(maps)
        gaps: dict[str, Gaps] = {main: self._values("gap")}
        shuffled: dict[str, Gaps] = {}
        # gaps of the main replacement and of IMPUTED come from `league`; those of the alternatives,
        # and of shuffled maps with every replacement that judges, are measured here
        measurements = len(alternatives)
        if shuffled_maps:
            measurements += len(judging)
        total = measurements * self.count
        with progress("Checking on other substrates", total, quiet=self.quiet) as advance:
            for name in alternatives:
                gaps[name] = self._gaps(name, maps, advance)
            if shuffled_maps:
                for name in judging:
                    shuffled[name] = self._gaps(name, shuffled_maps, advance)
        gaps[IMPUTED] = self._values("road")
        return Removals(gaps, shuffled)

    @cached_property
    def steady(self) -> dict[str, Stability]:
        """Return the stability of the maps under shifts and a flip of the images, by method."""
        images = self.images[:STEADY_IMAGES]
        targets = self.targets[:STEADY_IMAGES]
        results = {}
        with progress(
            "Disturbing images", len(self.functions), unit="methods", quiet=self.quiet
        ) as advance:
            for name, explain in self.functions.items():
                checks = self.by_name[name]
                maps = None  # the results hold zeros in place of maps that are not finite
                if not bool(checks.faults.not_finite.any()):
                    maps = checks.maps[: len(images)]
                results[name] = stability(self.model, images, targets, explain, maps=maps)
                advance(1)
        return results

    def means(
        self,
        values: Tensor,
        *,
        unit: str = "",
        seed: int = 0,
        least: float = -1.0,
        most: float = 1.0,
    ) -> list[Estimate]:
        """Return the mean of each row of values (cases, n) of the first n images.

        least, most: the ends that an interval may have.
        """
        groups = self.groups
        if groups is not None:
            groups = groups[: values.shape[1]]
        return estimates(values, groups=groups, seed=seed, unit=unit, least=least, most=most)

    def other_images(self) -> Tensor | None:
        """Return, for each of the first images, the index of one of another source.

        They are drawn with the seed. Returns None if all images are of one source.
        """
        sources = torch.arange(self.count)
        if self.sources is not None:
            sources = self.sources[: self.count].cpu()
        return other_images(sources, seed=self.settings.seed)

    def rows(self, on_object: Sequence[OnObjectRow] = ()) -> Iterator[MapCheckRow]:
        """Yield the row of each method in each check.

        Of fixed maps, rows say that they cannot be tested with random weights and shifts.

        on_object: the scores of maps on objects, none without masks.
        """
        passing = []  # methods with maps that depend on the weights; the best of them leads
        weight_checks = []
        for name in self.methods:
            judged = self._weight_dependence(name)
            weight_checks.append(map_check(self.model.alias, name, WEIGHTS, judged))
            if judged.state == "pass":
                passing.append(name)
        yield from self._removal_rows(passing or self.methods)
        yield from weight_checks
        if self.steadiness:
            for name in self.methods:
                judged = _FIXED
                if name in self.steady:
                    judged = self.steady[name].judged(groups=self.groups, seed=self.settings.seed)
                yield map_check(self.model.alias, name, SHIFTS, judged)
        for row in on_object:
            if row.score == "roc_auc":
                yield object_check(row)

    def _values(self, name: str) -> dict[str, Tensor]:
        """Return the values of one check, image by image, of each method and baseline."""
        return {checks.name: checks.values[name] for checks in self.results}

    def _shuffled(self, maps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the methods' maps of other images; nothing if all images are of one source."""
        other_indices = self.other_images()
        if other_indices is None:
            return {}
        return {name: maps[name][other_indices] for name in self.methods}

    def _gaps(
        self, substrate: Any, maps: Mapping[str, AnyMaps], advance: Advance
    ) -> dict[str, Tensor]:
        """Return insertion minus deletion of maps of the first images, by name.

        substrate: the replacement of removed patches.
        """
        settings = self.settings
        steps = OTHER_STEPS  # imputed patches are removed by fixed shares, without steps
        if substrate == settings.substrate:
            steps = settings.steps  # as for the maps with which they are compared
        results = faithfulness(
            self.model,
            self.images[: self.count],
            self.targets[: self.count],
            list(maps.values()),
            substrate=substrate,
            steps=steps,
            seed=settings.seed,
            batch_size=settings.batch_size,
            advance=advance,
        )
        return {name: result.gaps for name, result in zip(maps, results)}

    def _weight_dependence(self, name: str) -> Judgement:
        """Return whether the maps of a method change when the weights are randomised."""
        if name not in self.functions:
            return _FIXED
        randomisation = self.by_name[name].randomisation
        if randomisation is None:
            return _NOT_RANDOMISED
        return randomisation.judged(groups=self.groups, seed=self.settings.seed)

    def _removal_rows(self, candidates: Sequence[str]) -> Iterator[MapCheckRow]:
        """Yield the removal checks of each method.

        candidates: the methods of which the best one leads.
        """
        removals = self.removals
        for substrate in judged_by(removals.gaps):
            gaps = removals.gaps[substrate]
            shuffled = removals.shuffled.get(substrate, {})
            leader = _highest({name: gaps[name] for name in candidates})
            values = self.means(torch.stack([gaps[name] for name in self.methods]))
            for name, value in zip(self.methods, values):
                margins = {}
                for baseline in BASELINES:
                    margins[baseline] = self._margin(gaps[name], gaps[baseline])
                if name in shuffled:
                    margins[SHUFFLED] = self._margin(gaps[name], shuffled[name])
                behind = None
                if name != leader:
                    behind = self._margin(gaps[leader], gaps[name])
                yield removal_check(
                    self.model.alias,
                    name,
                    substrate,
                    value,
                    margins,
                    usable=int(self.by_name[name].faults.sound.sum()),
                    one_map=is_one_map(self.by_name[name].maps),
                    behind=behind,
                )

    def _margin(self, gaps: Tensor, other: Tensor) -> Estimate:
        """Return the mean paired difference, corrected for the number of methods.

        gaps, other: of the first images, which may be more in one of them.
        """
        count = min(len(gaps), len(other))
        differences = gaps[:count] - other[:count]
        (mean,) = self.means(differences[None], least=-MOST_APART, most=MOST_APART)
        tests = len(self.methods)
        return widened(replace(mean, n=count), tests, least=-MOST_APART, most=MOST_APART)


def map_rows(alias: str, maps: Sequence[tuple[str, Maps]], split: Split) -> list[MapRow]:
    """Return the row of each kind of map of the split's images.

    If there are masks, rows have the pointing game.

    maps: the name and the maps of each kind.
    """
    groups = None
    if split.groups is not None:
        groups = split.groups.numpy()
    hits: list[OnObjectRow] = []
    if split.masks is not None:
        hits = on_object_rows(
            alias,
            maps,
            "pointing",
            split.masks.cpu(),
            groups=split.groups,
            sources=same_photograph(split),
        )
    rows = []
    for index, (name, values) in enumerate(maps):
        information = student_mean(map_bits(values).numpy(), groups=groups, unit="bits", least=0.0)
        by_place = None
        if len(values) >= FEWEST:
            by_place = student_mean(fixed_share(values).numpy(), groups=groups, least=0.0, most=1.0)
        row = MapRow(model=alias, maps=name, information=information, by_place=by_place)
        if hits:
            row = replace(
                row,
                pointing=hits[index].estimate,
                baseline=hits[index].baseline,
                of_baseline=hits[index].of_baseline,
                difference=hits[index].difference,
            )
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
    """Return one score of each kind of map of one model on the same images.

    Images without an object are left out, and, except for pointing, those without background. All
    tensors are on the CPU.

    maps: the name and the maps of each kind.
    score: a name of _SCORES.
    groups: (n,), the source of each image, for intervals.
    sources: (n,), the photograph of each image, None for its group. A baseline that shows other
        images shows none of the same photograph.
    """
    if sources is None:
        sources = groups
    is_scored = _scored_images(score, masks)
    if not bool(is_scored.any()):
        return []
    masks = masks[is_scored]
    if groups is not None:
        groups = groups[is_scored]
    if sources is not None:
        sources = sources[is_scored]
    score_of = _SCORES[score]
    scores = []  # of each kind of map, (n,)
    scores_of_baseline = []  # of the hardest baseline of each kind, (n,)
    baselines: list[str] = []
    for _, kind_maps in maps:
        scored_maps = kind_maps[is_scored].float()
        by_baseline = baseline_scores(score_of, scored_maps, masks, groups=sources, seed=seed)
        baseline = _highest(by_baseline)
        scores.append(score_of(scored_maps, masks).double())
        scores_of_baseline.append(by_baseline[baseline].double())
        baselines.append(baseline)
    unit = "" if score == "roc_auc" else "fraction"
    means = _means(score, torch.stack(scores), groups, seed)
    gains = _gains(score, torch.stack(scores), torch.stack(scores_of_baseline), groups, seed)
    rows = []
    for index, (name, _) in enumerate(maps):
        row = OnObjectRow(
            model=model,
            maps=name,
            score=score,
            estimate=replace(means[index], n=len(masks), unit=unit),
            baseline=baselines[index],
            of_baseline=Estimate(float(scores_of_baseline[index].mean()), unit=unit),
            difference=in_points(replace(gains[index], n=len(masks), unit=unit)),
        )
        rows.append(row)
    return rows


def _scored_images(score: str, masks: Masks) -> Tensor:
    """Return True for the images (n,) that have what a score needs: object, and background."""
    if score == "pointing":
        return masks.flatten(1).any(1)
    return has_edge(masks)


def _means(score: str, values: Tensor, groups: Tensor | None, seed: int) -> list[Estimate]:
    """Return the mean of each row of scores (kinds of maps, n)."""
    if score == "pointing":
        return [pointing_rate(hits, groups=groups, seed=seed) for hits in values]
    return estimates(values, groups=groups, seed=seed, least=0.0, most=1.0)


def _gains(
    score: str, scores: Tensor, scores_of_baseline: Tensor, groups: Tensor | None, seed: int
) -> list[Estimate]:
    """Return the mean paired difference of each row of scores from that of its baseline.

    scores, scores_of_baseline: (kinds of maps, n).
    """
    gains = estimates(scores - scores_of_baseline, groups=groups, seed=seed, least=-1.0, most=1.0)
    if score != "pointing":
        return gains
    # of hits that are all 0, or all 1, the interval by bootstrap has no width
    wider = []
    for gain, hits, baseline_hits in zip(gains, scores, scores_of_baseline):
        rate = pointing_rate(hits, groups=groups, seed=seed)
        baseline_rate = pointing_rate(baseline_hits, groups=groups, seed=seed)
        wider.append(_wider(gain, difference_of(rate, baseline_rate)))
    return wider


def _highest(scores: Mapping[str, Tensor]) -> str:
    """Return the name of the scores with the highest mean."""
    return max(scores, key=lambda name: float(scores[name].mean()))


def _wider(paired: Estimate, independent: Estimate) -> Estimate:
    """Return the paired difference with the wider of two intervals at each end.

    independent: the difference of both rates as if images were independent, in points.
    """
    if paired.low is None or paired.high is None:
        return paired
    if independent.low is None or independent.high is None:
        return paired
    low = min(paired.low, independent.low / 100)
    high = max(paired.high, independent.high / 100)
    return replace(paired, low=low, high=high)
