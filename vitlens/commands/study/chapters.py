"""The chapters of a whole study: one command after another on its models, each with its own run
folder.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from vitlens.analysis.faithfulness.defaults import OTHER_SUBSTRATES
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.classes import label_columns
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.explain.options import NONE, ExplainOptions
from vitlens.commands.features.images import default_bank
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.run.chapter_runs import (
    ChapterCache,
    ChapterImages,
    ChapterRunner,
    PlannedChapter,
    as_typed,
    cache_folder,
)
from vitlens.commands.run.chapters import ChapterRow
from vitlens.commands.run.load import load_models, load_splits
from vitlens.commands.run.options import ModelOptions
from vitlens.commands.run.progress import duration_words, phase
from vitlens.commands.run.publish import read
from vitlens.commands.run.resume import content_digest
from vitlens.commands.sae.options import SaeOptions
from vitlens.commands.shared.maps.record import judged_maps
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.study.estimate import StudyClock, clock_of
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.train.options import RecipeChanges, TrainOptions
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.models.model_names import ModelName
from vitlens.names import FEWEST_FOR_MEAN, PRESETS, Replacement
from vitlens.record import read_run

PROFILED: Final = 32  # batch size
_STUDIED: Final = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.studied)
_QUICK: Final = tuple(
    name for name, entry in ATTRIBUTIONS.items() if entry.studied or not entry.slow
)


@dataclass(frozen=True)
class Depth:
    """The extent of a study.

    ablated: number of images on which every unit is ablated.
    checked: number of images on which maps are checked.
    compared: number of images whose maps are compared.
    paired: number of images whose errors are compared.
    disturbed: number of images on which the reliance of models is measured.
    panels: number of images shown side by side.
    developed: number of images whose attention is shown over all layers.
    featured: number of images whose features are read.
    bank: number of training images of the classifiers of features.
    encoded: number of images on which the latents of a dictionary are tested.
    attacked: number of images attacked by every attack.
    searched: number of images on which C&W searches for the smallest perturbation; 0 leaves it out.
    explained: methods whose maps are checked.
    attacks: by name.
    singles: attacks at one epsilon only, in 1/255.
    search_steps: the number of steps of each search of C&W.
    thorough: True to check maps and attacks in every way and to measure the speed at every batch
        size.
    """

    explained: tuple[str, ...] = _STUDIED
    ablated: int = 200
    checked: int = 30
    compared: int = 40
    paired: int = 450
    disturbed: int = 200
    panels: int = 24
    developed: int = 24
    featured: int = 450
    bank: int = 2500
    encoded: int = 300
    attacks: tuple[str, ...] = ("fgsm", "pgd", "low-frequency")
    singles: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"low-frequency": 8.0})
    )
    attacked: int = 50
    searched: int = 0
    search_steps: int = 100
    thorough: bool = False


USUAL: Final = Depth()
FULL: Final = Depth(  # --full
    explained=_QUICK,
    ablated=10_000,
    checked=200,
    compared=500,
    paired=10_000,
    disturbed=500,
    panels=50,
    featured=10_000,
    bank=50_000,
    encoded=2000,
    attacks=("fgsm", "pgd", "low-frequency", "auto"),
    singles=MappingProxyType({}),
    attacked=500,
    searched=100,
    thorough=True,
)


def supported_methods(model: Model, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Return the methods of these that a model supports."""
    return tuple(name for name in methods if ATTRIBUTIONS[name].is_supported_by(model))


def trained_first(model: ModelName, model_options: ModelOptions) -> bool:
    """Return True if a name is that of a preset without weights, which is trained first."""
    has_weights = model.weights or model_options.weights or model_options.random_weights
    return model.name in PRESETS and not has_weights


class Chapters(ChapterRunner):
    """Runs the chapters of a study."""

    def __init__(
        self,
        path: Path,
        images: ChapterImages,
        options: StudyOptions,
        on_done: Callable[[Sequence[ChapterRow]], object] = lambda _: None,
    ) -> None:
        cache = ChapterCache(cache_folder(), {}, images.digest) if options.cache else None
        super().__init__(path, options.run, cache, on_done=on_done)
        self.images = images
        self.depth = FULL if options.full else USUAL
        self.common: dict[str, Any] = {**images.options, "model_options": options.model_options}
        self.labelled: dict[str, Any] = {**self.common, "predicted": images.predicted}
        # while it is a list, `run` adds chapters to it and runs none
        self.plan: list[PlannedChapter] | None = None
        self.clock: StudyClock | None = None
        self.dictionary = options.dictionary
        self.of_dictionary = ""  # alias of its model

    def trained(self, model: ModelName, budget: Mapping[str, object]) -> ModelName:
        """Train a preset in a chapter; return the name of its run folder as that of the model.

        budget: changes to the recipe.
        """
        recipe = RecipeChanges(settings=tuple(f"{name}={value}" for name, value in budget.items()))
        done = self.run(
            "train",
            model.alias,
            TrainOptions(model.name, self.images.data, recipe=recipe, run=self.run_options),
        )
        return ModelName(str(self.path / done.folder), model.alias)

    def run(self, word: str, alias: str, options: Any, *, part: str = "") -> ChapterRow:
        """Run one chapter and report the time left; only add it to the plan while there is one."""
        if self.plan is not None:
            is_cached = self.cache is not None and self.cache.holds(
                word, self.placed(word, options, self.path)
            )
            self.plan.append(PlannedChapter(word, alias, options, is_cached))
            return ChapterRow(word, alias, "")
        start = time.monotonic()
        with phase(f"Chapter {word}"):
            row = super().run(word, alias, options, part=part)
        if self.clock is not None:
            self.clock.finish(time.monotonic() - start)
            self._say(f"{len(self.clock.done)} of {len(self.clock.expected)} chapters done")
        return row

    def _say(self, words: str) -> None:
        """Write on stderr how far the study is, and about how long the rest takes."""
        if self.clock is not None and not self.run_options.quiet:
            left = self.clock.left
            rest = f", about {duration_words(left)} left" if left else ""
            print(f"study: {words}{rest}", file=sys.stderr)  # noqa: T201

    def analyse(
        self, names: Sequence[ModelName], vits: Sequence[ModelName], *, labelled: bool
    ) -> tuple[Model, ...]:
        """Run all chapters of analysis, and return the models.

        They are on each model, on a ViT compared with another model, and on all models together.
        Raises InputError before the first chapter if a model does not know the data's classes.
        """
        run = self.run_options
        models = load_models(names, model_options=self.common["model_options"], options=run)
        if self.cache is not None:
            self.cache.names |= {
                as_typed(name): content_digest(model) for name, model in zip(names, models)
            }
        splits = load_splits(models, options=replace(run, quiet=True), **self.images.options)
        for model, split in zip(models, splits):
            if split.labels is not None and not self.images.predicted:
                label_columns(model.classes, split)
        plan: list[PlannedChapter] = []
        self.plan = plan
        self._run_chapters(names, vits, models, splits, labelled=labelled)
        self.plan = None
        with phase("Timing a forward pass, to estimate the study"):
            self.clock = clock_of(plan, models, splits)
        self._say(f"{len(plan)} chapters")
        self._run_chapters(names, vits, models, splits, labelled=labelled)
        return models

    def _run_chapters(
        self,
        names: Sequence[ModelName],
        vits: Sequence[ModelName],
        models: Sequence[Model],
        splits: Sequence[Split],
        *,
        labelled: bool,
    ) -> None:
        """Run the chapters of analysis, or add them to the plan: see `run`."""
        depth = self.depth
        run = self.run_options
        data = self.images.data
        typed_names = tuple(map(as_typed, names))
        model_options = {"model_options": self.common["model_options"]}
        if labelled:
            self.run("evaluate", "", EvaluateOptions(typed_names, data, run=run, **model_options))
        replacements: tuple[Replacement, ...] = ()
        if min(map(len, splits)) >= FEWEST_FOR_MEAN:
            replacements = ("mean", "resample")  # resampling shows what a mean hides
        for vit in vits:
            self._analyse_vit(vit, replacements)
        for name, model in zip(names, models):
            methods = supported_methods(model, depth.explained)
            if methods:
                options = ExplainOptions(
                    (as_typed(name),),
                    method=methods,
                    verify=True,
                    run=self.at_most(depth.checked),
                    other_substrates=OTHER_SUBSTRATES if depth.thorough else (NONE,),
                    counterfactuals=depth.thorough,
                    **self.common,
                )
                self.run("explain", name.alias, options)
        # a ViT is compared with a model of another kind if there is one
        other_names = [name for name in names if name not in vits]
        if not other_names:
            other_names = [name for name in names if name != vits[0]]
        if other_names and labelled:
            self._compare(vits[0], other_names[0])
        attack = AttackOptions(
            typed_names, self_checks="all" if depth.thorough else "few", **self.labelled
        )
        singles = {
            name: epsilon for name, epsilon in depth.singles.items() if name in depth.attacks
        }
        standard = replace(
            attack,
            attacks=depth.attacks,
            single_epsilons=singles or None,
            run=self.at_most(depth.attacked),
        )
        self.run("attack", "", standard)
        if depth.searched:  # C&W alone, without what the first run measures
            search = replace(
                attack,
                attacks=("cw",),
                steps=depth.search_steps,
                corruptions=False,
                transfer=False,
                inside=False,
                run=self.at_most(depth.searched),
            )
            self.run("attack", "", search, part="cw")
        if labelled:
            limited = self.at_most(depth.featured)
            bank = min(depth.bank, default_bank(limited.limit or depth.featured))
            self.run(
                "features",
                "",
                FeaturesOptions(
                    typed_names, data, bank=bank, cache=False, run=limited, **model_options
                ),
            )
        sizes = () if depth.thorough else (PROFILED,)
        self.run(
            "profile",
            "",
            ProfileOptions(
                typed_names, batch_sizes=sizes, run=replace(run, limit=None), **model_options
            ),
        )

    def _analyse_vit(self, model: ModelName, replacements: tuple[Replacement, ...]) -> None:
        """Run attention, rollout, statistics, ablation and a dictionary of one model."""
        name = as_typed(model)
        alias = model.alias
        run = self.run_options
        self.run(
            "attention",
            alias,
            AttentionOptions(name, run=self.at_most(self.depth.developed), **self.common),
        )
        self.run("rollout", alias, RolloutOptions(name, run=run, **self.common))
        self.run("stats", alias, StatsOptions(name, run=run, **self.common))
        limited = self.at_most(self.depth.ablated)
        self.run(
            "ablate", alias, AblateOptions(name, replace=replacements, run=limited, **self.labelled)
        )

        if alias == self.of_dictionary:
            self.run(
                "sae",
                alias,
                SaeOptions(
                    name,
                    dictionary=self.dictionary,
                    bank=self.depth.encoded,
                    cache=False,
                    run=self.at_most(self.depth.encoded),
                    **self.labelled,
                ),
            )

    def _compare(self, *pair: ModelName) -> None:
        """Compare two models by the maps whose checks went best, which are not checked again."""
        best = dict[str, str]()
        for row in self.done:
            if row.word == "explain":
                judged = judged_maps(read(read_run(self.path / row.folder)).checks)
                if judged:
                    best[row.alias] = judged[0].method
        method = tuple(best[model.alias] for model in pair if model.alias in best)
        if len(method) < len(pair):
            method = ()
        depth = self.depth
        options = CompareOptions(
            tuple(map(as_typed, pair)),
            self.images.data,
            method=method,
            panels=depth.panels,
            maps=depth.compared,
            checked=0 if method else depth.checked,
            disturbed=depth.disturbed,
            every_cue=depth.thorough,
            model_options=self.common["model_options"],
            run=self.at_most(depth.paired),
        )
        self.run("compare", "", options)
