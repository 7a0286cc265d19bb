"""The chapters of a whole study: one command after another on its models, each with its own run
folder.

`Depth` says on how many images and how thoroughly. `Chapters.analyse` goes through the chapters
twice: first to plan them and to estimate their time, then to run them.
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

PROFILED: Final = 32  # the one batch size at which the speed is measured without --full
# methods whose maps are checked, without and with --full
_STUDIED: Final = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.studied)
_QUICK: Final = tuple(
    name for name, entry in ATTRIBUTIONS.items() if entry.studied or not entry.slow
)


@dataclass(frozen=True)
class Depth:
    """The extent of a study.

    explained: methods whose maps are checked.
    ablated: number of images on which every unit is ablated.
    checked: number of images on which maps are checked.
    compared: number of images whose maps are compared.
    paired: number of images whose errors are compared.
    disturbed: number of images on which the reliance of models is measured.
    panels: number of images shown side by side.
    attention_images: number of images whose attention is shown over all layers.
    featured: number of images whose features are read.
    bank: number of training images of the classifiers of features.
    encoded: number of images on which the latents of a dictionary are tested.
    attacks: the names of the attacks.
    single_epsilons: the epsilon, in 1/255, of attacks that are run at one epsilon only.
    attacked: number of images attacked by every attack.
    searched: number of images on which C&W searches for the smallest perturbation; 0 leaves it out.
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
    attention_images: int = 24
    featured: int = 450
    bank: int = 2500
    encoded: int = 300
    attacks: tuple[str, ...] = ("fgsm", "pgd", "low-frequency")
    single_epsilons: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"low-frequency": 8.0})
    )
    attacked: int = 50
    searched: int = 0
    search_steps: int = 100
    thorough: bool = False


USUAL: Final = Depth()  # minutes on a laptop
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
    single_epsilons=MappingProxyType({}),
    attacked=500,
    searched=100,
    thorough=True,
)


def supported_methods(model: Model, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the methods that a model supports."""
    return tuple(name for name in methods if ATTRIBUTIONS[name].is_supported_by(model))


def trained_first(model: ModelName, model_options: ModelOptions) -> bool:
    """Return True if a name is that of a preset without weights, which is trained first."""
    has_weights = model.weights or model_options.weights or model_options.random_weights
    return model.name in PRESETS and not has_weights


@dataclass(frozen=True)
class _Models:
    """The models of a study, each with its images.

    names: of all models; a trained preset has the name of its run folder.
    vits: the names of those that are analysed head by head.
    labelled: True if the images have labels.
    """

    names: Sequence[ModelName]
    vits: Sequence[ModelName]
    models: Sequence[Model]
    splits: Sequence[Split]
    labelled: bool

    @property
    def typed_names(self) -> tuple[str, ...]:
        """Return all names as the options of a command have them."""
        return tuple(map(as_typed, self.names))


class Chapters(ChapterRunner):
    """Runs the chapters of a study.

    dictionary_alias: the alias of the model of --dictionary, "" without one; set before `analyse`.
    """

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
        # keyword arguments for the options of chapters: of all, of those on images, and of those
        # that also need labels (--predicted: the models' predictions in their place)
        self.model_options: dict[str, Any] = {"model_options": options.model_options}
        self.image_options: dict[str, Any] = {**images.options, **self.model_options}
        self.label_options: dict[str, Any] = {**self.image_options, "predicted": images.predicted}
        # while it is a list, `run` adds chapters to it and runs none
        self.plan: list[PlannedChapter] | None = None
        self.clock: StudyClock | None = None
        self.dictionary = options.dictionary
        self.dictionary_alias = ""

    def train_preset(self, model: ModelName, budget: Mapping[str, object]) -> ModelName:
        """Train a preset in a chapter; return the name of its run folder as that of the model.

        budget: changes to the recipe.
        """
        recipe = RecipeChanges(settings=tuple(f"{name}={value}" for name, value in budget.items()))
        options = TrainOptions(model.name, self.images.data, recipe=recipe, run=self.run_options)
        row = self.run("train", model.alias, options)
        return ModelName(str(self.path / row.folder), model.alias)

    def run(self, word: str, alias: str, options: Any, *, part: str = "") -> ChapterRow:
        """Run one chapter and report the time left; while there is a plan, only add it to that."""
        if self.plan is not None:
            is_cached = False
            if self.cache is not None:
                is_cached = self.cache.holds(word, self.with_folder(word, options, self.path))
            self.plan.append(PlannedChapter(word, alias, options, is_cached))
            return ChapterRow(word, alias, folder="")
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
            seconds_left = self.clock.left
            if seconds_left:
                words = f"{words}, about {duration_words(seconds_left)} left"
            print(f"study: {words}", file=sys.stderr)  # noqa: T201

    def analyse(
        self, names: Sequence[ModelName], vits: Sequence[ModelName], *, labelled: bool
    ) -> tuple[Model, ...]:
        """Run all chapters of analysis, and return the models.

        They are on each model, on a ViT compared with another model, and on all models together.
        Raises InputError before the first chapter if a model does not know the data's classes.
        """
        run = self.run_options
        models = load_models(names, options=run, **self.model_options)
        if self.cache is not None:
            for name, model in zip(names, models):
                self.cache.digest_by_model[as_typed(name)] = content_digest(model)
        splits = load_splits(models, options=replace(run, quiet=True), **self.images.options)
        for model, split in zip(models, splits):
            if split.labels is not None and not self.images.predicted:
                label_columns(model.classes, split)  # raises InputError for other classes
        studied = _Models(names, vits, models, splits, labelled)
        plan: list[PlannedChapter] = []
        self.plan = plan
        self._run_chapters(studied)  # only adds the chapters to the plan
        self.plan = None
        with phase("Timing a forward pass, to estimate the study"):
            self.clock = clock_of(plan, models, splits)
        self._say(f"{len(plan)} chapters")
        self._run_chapters(studied)
        return models

    def _run_chapters(self, studied: _Models) -> None:
        """Run the chapters of analysis, or add them to the plan: see `run`."""
        names = studied.typed_names
        data = self.images.data
        run = self.run_options
        if studied.labelled:
            self.run("evaluate", "", EvaluateOptions(names, data, run=run, **self.model_options))
        replacements: tuple[Replacement, ...] = ()  # ablate chooses one for few images
        if min(map(len, studied.splits)) >= FEWEST_FOR_MEAN:
            replacements = ("mean", "resample")  # resampling shows what a mean hides
        for vit in studied.vits:
            self._analyse_vit(vit, replacements)
        for name, model in zip(studied.names, studied.models):
            methods = supported_methods(model, self.depth.explained)
            if methods:
                self._explain(name, methods)
        if studied.labelled:
            self._compare_vit(studied)
        self._attack(names)
        if studied.labelled:
            limited = self.limited_to(self.depth.featured)
            bank = min(self.depth.bank, default_bank(limited.limit or self.depth.featured))
            options = FeaturesOptions(
                names, data, bank=bank, cache=False, run=limited, **self.model_options
            )
            self.run("features", "", options)
        batch_sizes = () if self.depth.thorough else (PROFILED,)  # (): every batch size
        # profile measures on random pixels and refuses --limit
        unlimited = replace(run, limit=None)
        self.run(
            "profile",
            "",
            ProfileOptions(names, batch_sizes=batch_sizes, run=unlimited, **self.model_options),
        )

    def _analyse_vit(self, model: ModelName, replacements: tuple[Replacement, ...]) -> None:
        """Run attention, rollout, statistics, ablation and a dictionary of one model."""
        name = as_typed(model)
        alias = model.alias
        run = self.run_options
        limited = self.limited_to(self.depth.attention_images)
        ablated = self.limited_to(self.depth.ablated)
        self.run("attention", alias, AttentionOptions(name, run=limited, **self.image_options))
        self.run("rollout", alias, RolloutOptions(name, run=run, **self.image_options))
        self.run("stats", alias, StatsOptions(name, run=run, **self.image_options))
        self.run(
            "ablate",
            alias,
            AblateOptions(name, replace=replacements, run=ablated, **self.label_options),
        )
        if alias == self.dictionary_alias:
            options = SaeOptions(
                name,
                dictionary=self.dictionary,
                bank=self.depth.encoded,
                cache=False,
                run=self.limited_to(self.depth.encoded),
                **self.label_options,
            )
            self.run("sae", alias, options)

    def _explain(self, model: ModelName, methods: tuple[str, ...]) -> None:
        """Check the maps of one model by each of the methods."""
        options = ExplainOptions(
            (as_typed(model),),
            method=methods,
            verify=True,
            run=self.limited_to(self.depth.checked),
            other_substrates=OTHER_SUBSTRATES if self.depth.thorough else (NONE,),
            counterfactuals=self.depth.thorough,
            **self.image_options,
        )
        self.run("explain", model.alias, options)

    def _compare_vit(self, studied: _Models) -> None:
        """Compare the first ViT with a model of another kind, or with another ViT if all are."""
        vit = studied.vits[0]
        others = [name for name in studied.names if name not in studied.vits]
        if not others:
            others = [name for name in studied.names if name != vit]
        if others:
            self._compare((vit, others[0]))

    def _compare(self, pair: tuple[ModelName, ModelName]) -> None:
        """Compare two models by the maps whose checks went best, which are not checked again."""
        best_methods = self._best_methods()
        methods: tuple[str, ...] = ()  # compare chooses and checks them
        if all(model.alias in best_methods for model in pair):
            methods = tuple(best_methods[model.alias] for model in pair)
        depth = self.depth
        options = CompareOptions(
            tuple(map(as_typed, pair)),
            self.images.data,
            method=methods,
            panels=depth.panels,
            maps=depth.compared,
            checked=0 if methods else depth.checked,
            disturbed=depth.disturbed,
            every_cue=depth.thorough,
            run=self.limited_to(depth.paired),
            **self.model_options,
        )
        self.run("compare", "", options)

    def _best_methods(self) -> dict[str, str]:
        """Return the method whose maps passed the checks best, by the alias of its model.

        Models without an explain chapter have none; nor has any model while chapters are planned.
        """
        best = {}
        for row in self.done:
            if row.word == "explain":
                record = read(read_run(self.path / row.folder))
                judged = judged_maps(record.checks)  # the best first
                if judged:
                    best[row.alias] = judged[0].method
        return best

    def _attack(self, names: tuple[str, ...]) -> None:
        """Attack all models together; with --full, also search for the smallest perturbations."""
        depth = self.depth
        shared = AttackOptions(
            names, self_checks="all" if depth.thorough else "few", **self.label_options
        )
        single_epsilons = {}
        for name, epsilon in depth.single_epsilons.items():
            if name in depth.attacks:
                single_epsilons[name] = epsilon
        standard = replace(
            shared,
            attacks=depth.attacks,
            single_epsilons=single_epsilons or None,  # None: no --single-epsilons
            run=self.limited_to(depth.attacked),
        )
        self.run("attack", "", standard)
        if depth.searched:
            search = replace(
                shared,
                attacks=("cw",),
                steps=depth.search_steps,
                # the first run measures these
                corruptions=False,
                transfer=False,
                inside=False,
                run=self.limited_to(depth.searched),
            )
            self.run("attack", "", search, part="cw")
