"""The chapters of a whole study: one command after another on its models, each with its own run folder."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from vitlens.analysis.answers.classes import label_columns
from vitlens.analysis.faithfulness.defaults import OTHER_SUBSTRATES
from vitlens.attribution.registry import ATTRIBUTIONS
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
from vitlens.commands.run.chapter_runs import ChapterCache, ChapterImages, ChapterRunner, as_typed, cache_folder
from vitlens.commands.run.load import load_models, load_splits
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.publish import read
from vitlens.commands.run.resume import content_digest
from vitlens.commands.shared.maps.record import judged_maps
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.train.options import RecipeChanges, TrainOptions
from vitlens.files import read_run
from vitlens.models.model import Model
from vitlens.models.naming import ModelName
from vitlens.models.support import meets
from vitlens.names import FEWEST_FOR_MEAN, PRESETS, Replacement, SelfChecks

PROFILED: Final = 32  # batch size
_STUDIED: Final = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.studied)
_QUICK: Final = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.studied or not entry.slow)


@dataclass(frozen=True)
class Depth:
    """Numbers of images unless said otherwise.

    explained: methods whose maps are checked; ablated: on which every unit is ablated; checked: on which maps are;
    compared: whose maps are compared; disturbed: filtered, shuffled and occluded; panels: shown side by side;
    developed: whose attention is shown over all layers; featured: whose features are read; bank: training images of
    their classifiers; attacks: by name, on attacked images, some at one epsilon alone (singles, 1/255); searched: on
    which C&W searches for the smallest perturbation (0: it is left out), with so many steps in each of its searches;
    thorough: whether maps and attacks are checked in every way, and speed is measured at every batch size.
    """

    explained: tuple[str, ...] = _STUDIED
    ablated: int = 200
    checked: int = 30
    compared: int = 40
    disturbed: int = 200
    panels: int = 24
    developed: int = 24
    featured: int = 1000
    bank: int = 2500
    attacks: tuple[str, ...] = ("fgsm", "pgd", "low-frequency")
    singles: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({"low-frequency": 8.0}))
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
    disturbed=500,
    panels=50,
    featured=10_000,
    bank=50_000,
    attacks=("fgsm", "pgd", "low-frequency", "auto"),
    singles=MappingProxyType({}),
    attacked=500,
    searched=100,
    thorough=True,
)


def supported_methods(model: Model, methods: tuple[str, ...]) -> tuple[str, ...]:
    """The methods of these that a model supports."""
    entries = [ATTRIBUTIONS[name] for name in methods]
    return tuple(
        entry.name
        for entry in entries
        if model.anatomy.family in entry.families and (entry.needs is None or meets(model, entry.needs))
    )


def trained_first(model: ModelName, model_options: ModelOptions) -> bool:
    """Whether a name is that of a preset without weights, which is trained first."""
    has_weights = model.weights or model_options.weights or model_options.random_weights
    return model.name in PRESETS and not has_weights


class Chapters(ChapterRunner):
    """Runs the chapters of a study."""

    def __init__(
        self,
        path: Path,
        images: ChapterImages,
        model_options: ModelOptions,
        run: RunOptions,
        *,
        cache: bool,
        full: bool,
    ) -> None:
        super().__init__(path, run, ChapterCache(cache_folder(), {}, images.digest) if cache else None)
        self.images, self.model_options, self.depth = images, model_options, FULL if full else USUAL
        self.replacements: tuple[Replacement, ...] = ()  # the default of the command

    def trained(self, model: ModelName, budget: Mapping[str, object]) -> ModelName:
        """A preset's name as that of the run folder of the chapter that trains it; budget: changes to its recipe."""
        changed = "".join(f" --set {name}={value}" for name, value in budget.items())
        line = f"train {model.name} --data {self.images.data}{changed}"
        recipe = RecipeChanges(other=budget)
        self.run(
            "train", model.alias, line, lambda run: TrainOptions(model.name, self.images.data, recipe=recipe, run=run)
        )
        return ModelName(str(self.path / self.done[-1].folder), model.alias)

    def load(self, names: Sequence[ModelName]) -> Sequence[Model]:
        """The models, whose anatomy and classes decide what the chapters do."""
        models = load_models(names, model_options=self.model_options, options=self.run_options)
        if self.cache is not None:
            self.cache.names |= {as_typed(name): content_digest(model) for name, model in zip(names, models)}
        return models

    def check_ahead(self, models: Sequence[Model]) -> None:
        """Raise InputError where a model does not know the data's classes, before a later chapter does; choose the
        replacements of the ablation by the number of images."""
        splits = load_splits(models, options=replace(self.run_options, quiet=True), **self.images.options)
        for model, split in zip(models, splits):
            if split.labels is not None and not self.images.predicted:
                label_columns(model.classes, split)
        if min(map(len, splits)) >= FEWEST_FOR_MEAN:
            self.replacements = ("mean", "resample")  # what a mean hides, another image's output shows

    def analyse(
        self, models: Sequence[ModelName], loaded: Sequence[Model], vits: Sequence[ModelName], *, labelled: bool
    ) -> None:
        """All chapters of analysis: of each model, of a ViT compared with another model, and of all models together."""
        names = tuple(map(as_typed, models))
        if labelled:
            self.run(
                "evaluate", "", self._line("evaluate", names),
                lambda run: EvaluateOptions(names, self.images.data, self.model_options, run),
            )  # fmt: skip
        for vit in vits:
            self._analyse_vit(vit)
        for name, model in zip(models, loaded):
            self._explain(name, supported_methods(model, self.depth.explained))
        others = [model for model in models if model not in vits] or [model for model in models if model != vits[0]]
        if others and labelled:
            self._compare(as_typed(vits[0]), as_typed(others[0]))
        self._attack(names, self.depth.attacks, self.depth.attacked, "")
        if self.depth.searched:
            self._attack(names, ("cw",), self.depth.searched, "cw", "--steps", str(self.depth.search_steps))
        if labelled:
            self._features(names)
        self._profile(names)

    def _analyse_vit(self, model: ModelName) -> None:
        """Attention, rollout, statistics and ablation of one model."""
        common: dict[str, Any] = {**self.images.options, "model_options": self.model_options}
        name, alias = as_typed(model), model.alias
        template = self._line("{}", [name])
        predicted = self.images.predicted
        limit = self.at_most(self.depth.developed)
        self.run(
            "attention", alias, f"{template.format('attention')} --limit {limit}",
            lambda run: AttentionOptions(name, run=replace(run, limit=limit), **common),
        )  # fmt: skip
        self.run("rollout", alias, template.format("rollout"), lambda run: RolloutOptions(name, run=run, **common))
        self.run("stats", alias, template.format("stats"), lambda run: StatsOptions((name,), run=run, **common))
        kinds = self.replacements
        ablated = self.at_most(self.depth.ablated)
        replaced = f" --replace {','.join(kinds)}" if kinds else ""
        line = f"ablate {name} {self.images.typed_with_labels}{replaced} --limit {ablated}"
        self.run(
            "ablate", alias, line,
            lambda run: AblateOptions(
                name, predicted=predicted, replace=kinds, run=replace(run, limit=ablated), **common
            ),
        )  # fmt: skip

    def _explain(self, model: ModelName, methods: tuple[str, ...]) -> None:
        """The maps of one model, checked."""
        if not methods:
            return
        name, limit = as_typed(model), self.at_most(self.depth.checked)
        whole = self.depth.thorough
        others = OTHER_SUBSTRATES if whole else (NONE,)
        quick = "" if whole else f" --other-substrates {NONE} --no-counterfactuals"
        line = f"{self._line('explain', [name])} --method {','.join(methods)} --verify{quick} --limit {limit}"
        self.run(
            "explain", model.alias, line,
            lambda run: ExplainOptions(
                (name,), method=methods, verify=True, run=replace(run, limit=limit), model_options=self.model_options,
                other_substrates=others, counterfactuals=whole, **self.images.options,
            ),
        )  # fmt: skip

    def _compare(self, first: str, second: str) -> None:
        """Two models side by side, by the maps whose checks went best, which are not checked again."""
        depth = self.depth
        best = dict(self._best_maps())
        method = tuple(best[name] for name in (first.partition("=")[0], second.partition("=")[0]) if name in best)
        named = f"--method {','.join(method)} " if len(method) == 2 else ""
        checked = 0 if named else depth.checked
        line = (
            f"compare {first} {second} --data {self.images.data} {named}--panels {depth.panels} "
            f"--maps {depth.compared} --checked {checked} --disturbed {depth.disturbed}"
        )
        self.run(
            "compare", "", line,
            lambda run: CompareOptions(
                (first, second), self.images.data, method=method if named else (), panels=depth.panels,
                maps=depth.compared, checked=checked, disturbed=depth.disturbed, model_options=self.model_options,
                run=run,
            ),
        )  # fmt: skip

    def _best_maps(self) -> Iterator[tuple[str, str]]:
        """The method of each model whose checks went best."""
        for row in self.done:
            if row.word == "explain":
                judged = judged_maps(read(read_run(self.path / row.folder)).checks)
                yield from [(row.alias, judged[0].method)] if judged else []

    def _attack(self, names: Sequence[str], attacks: tuple[str, ...], images: int, part: str, *more: str) -> None:
        """The robustness of all models on a part of the images; C&W alone, without what the first run measures."""
        limit, alone = self.at_most(images), bool(part)
        checks: SelfChecks = "all" if self.depth.thorough else "few"
        words = (*more, *(("--no-corruptions", "--no-transfer", "--no-inside") if alone else ()))
        singles = {name: epsilon for name, epsilon in self.depth.singles.items() if name in attacks}
        named = ",".join(f"{name}={epsilon:g}" for name, epsilon in singles.items())
        single = f"--single-epsilon {named} " if named else ""
        line = (
            f"attack {' '.join(names)} {self.images.typed_with_labels} --attack {','.join(attacks)} "
            f"{''.join(f'{word} ' for word in words)}{single}--self-checks {checks} --limit {limit}"
        )
        self.run(
            "attack", "", line,
            lambda run: AttackOptions(
                tuple(names), **self.images.options, attacks=attacks, steps=int(more[1]) if more else None,
                corruptions=not alone, transfer=not alone, inside=not alone, predicted=self.images.predicted,
                self_checks=checks, single_epsilons=singles or None,
                model_options=self.model_options, run=replace(run, limit=limit),
            ),
            part=part,
        )  # fmt: skip

    def _features(self, names: Sequence[str]) -> None:
        """The features of all models, layer by layer."""
        limit = self.at_most(self.depth.featured)
        bank = min(self.depth.bank, default_bank(limit))
        line = f"features {' '.join(names)} --data {self.images.data} --limit {limit} --bank {bank} --no-cache"
        self.run(
            "features", "", line,
            lambda run: FeaturesOptions(
                tuple(names), self.images.data, bank=bank, cache=False, model_options=self.model_options,
                run=replace(run, limit=limit),
            ),
        )  # fmt: skip

    def _profile(self, names: Sequence[str]) -> None:
        """The costs of all models."""
        sizes = () if self.depth.thorough else (PROFILED,)
        line = f"profile {' '.join(names)}{''.join(f' --batch-sizes {size}' for size in sizes)}"
        self.run(
            "profile", "", line,
            lambda run: ProfileOptions(
                tuple(names), batch_sizes=sizes, model_options=self.model_options, run=replace(run, limit=None)
            ),
        )  # fmt: skip

    def _line(self, word: str, names: Sequence[str]) -> str:
        return f"{word} {' '.join(names)} {self.images.typed}"
