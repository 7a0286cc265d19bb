"""The chapters of a study: one command after another on its models, each into a run folder of its own."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vitlens.analysis.ablation.ablate import units_of
from vitlens.analysis.answers.classes import label_columns
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.ablate.measure import measure as ablate
from vitlens.commands.ablate.measure.expected import ablate_parts
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.attention.measure import measure as attention
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.compare.measure import measure as compare
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.evaluate.measure import measure as evaluate
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.explain.measure import measure as explain
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.parts import explain_parts
from vitlens.commands.features.measure import measure as features
from vitlens.commands.features.measure.images import bank_of, features_parts
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.profile.measure import measure as profile
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.rollout.measure import measure as rollout
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.scaffold.expected import Part, say_expected
from vitlens.commands.scaffold.load import load_models, load_splits
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.stats.measure import measure as stats
from vitlens.commands.stats.measure.expected import stats_parts
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.train.measure import measure as train
from vitlens.commands.train.options import RecipeChanges, TrainOptions
from vitlens.models.model import Model
from vitlens.models.naming import ModelName, parse_models
from vitlens.names import PRESETS
from vitlens.runs.attack import attack
from vitlens.runs.attack_choices import AttackChoices
from vitlens.runs.planned import attack_parts
from vitlens.runs.study_whole import CHAPTERS, Chapter

PROFILED: Final = (1, 8, 32)  # batch sizes
EXPLAINED: Final = tuple(name for name, entry in ATTRIBUTIONS.items() if entry.studied)  # whose maps are checked
CHECKED: Final = 50  # images on which they are
COMPARED: Final = 100  # images whose maps are compared
FEATURED: Final = 1000  # test images whose features are read
BANK: Final = 5000  # training images that answer for them
PANELS: Final = 12  # of those shown side by side
ATTACKS: Final = ("fgsm", "pgd")
ATTACKED: Final = 100  # images


def typed(model: ModelName) -> str:
    """A model's name as it is typed."""
    return f"{model.alias}={model.name}" + (f"@{model.weights}" if model.weights else "")


def trained_first(model: ModelName, model_options: ModelOptions) -> bool:
    """Whether a name is that of a preset, which has no weights yet."""
    has_weights = model.weights or model_options.weights or model_options.random_weights
    return model.name in PRESETS and not has_weights


@dataclass(frozen=True)
class Ground:
    """The images of a study: data, a name or a path, or images, files and folders without labels (data is "" then).

    predicted: whether ablation and attacks take the models' predictions for labels.
    """

    data: str = ""
    images: tuple[str, ...] = ()
    predicted: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """As the commands take it."""
        return {"images": list(self.images)} if self.images else {"data": self.data}

    @property
    def typed(self) -> str:
        """As it is typed."""
        return f"--images {shlex.join(self.images)}" if self.images else f"--data {self.data}"

    @property
    def typed_with_labels(self) -> str:
        """The same for a command that needs labels."""
        return f"{self.typed} --predicted" if self.predicted else self.typed


class Chapters:
    """Runs them, and keeps the list of what was done."""

    def __init__(self, path: Path, ground: Ground, model_options: ModelOptions, options: RunOptions) -> None:
        self.path, self.ground, self.model_options, self.options = path, ground, model_options, options
        self.data = ground.data
        self.done: list[Chapter] = []

    def trained(self, model: ModelName, epochs: int | None) -> str:
        """A name that can be loaded: a preset is trained first, in a chapter of its own."""
        if not trained_first(model, self.model_options):
            return typed(model)
        options = self._options("train", model.alias, f"vitlens train {model.name} --data {self.data}")
        train(TrainOptions(model.name, self.data, recipe=RecipeChanges(epochs=epochs), run=options))
        return f"{model.alias}={options.out}"

    def load(self, names: Sequence[str]) -> Any:
        """The models, to ask what they are."""
        return load_models(names, model_options=self.model_options, options=self.options)

    def look_ahead(self, models: Sequence[Model]) -> None:
        """Say how long the chapters that follow may take together. Raises InputError where a model does not know the
        data's classes, as a later chapter would after much work."""
        splits = load_splits(models, options=replace(self.options, quiet=True), **self.ground.asked)
        for model, split in zip(models, splits):
            if split.labels is not None and not self.ground.predicted:
                label_columns(model.classes, split)
        works = [(one, split, self._parts(one, len(split))) for one, split in zip(models, splits)]
        say_expected(works, self.options)

    def _parts(self, model: Model, images: int) -> list[Part]:
        """The parts of all chapters; the options that shorten them belong to commands of their own."""
        return [replace(part, shorter="") for part in self._all_parts(model, images)]

    def _all_parts(self, model: Model, images: int) -> Iterator[Part]:
        some = min(images, FEATURED)
        yield Part("answers", images)
        if model.anatomy.family == "vit":
            options, checked = AblateOptions(model.alias), min(images, CHECKED)
            yield from stats_parts(images, moments=0)
            yield from ablate_parts(units_of(model), images, options)
            yield from explain_parts(EXPLAINED, checked, verify=True, counterfactuals=True)
        yield from attack_parts(AttackChoices(attacks=ATTACKS, corruptions=False), min(images, ATTACKED))
        yield from features_parts(some, min(BANK, bank_of(some)))

    def run(self, word: str, alias: str, names: Sequence[str]) -> None:
        """One analysis command on these models."""
        typed = self.ground.typed_with_labels if word == "ablate" else self.ground.typed
        options = self._options(word, alias, f"vitlens {word} {' '.join(names)} {typed}")
        if word == "evaluate":
            evaluate(EvaluateOptions(tuple(names), self.data or None, model_options=self.model_options, run=options))
        elif word == "stats":
            stats(
                StatsOptions(
                    tuple(names),
                    self.ground.data or None,
                    self.ground.images,
                    model_options=self.model_options,
                    run=options,
                )
            )
        elif word == "ablate":
            ablate(
                AblateOptions(
                    names[0],
                    self.ground.data or None,
                    self.ground.images,
                    self.ground.predicted,
                    model_options=self.model_options,
                    run=options,
                )
            )
        elif word == "attention":
            attention(
                AttentionOptions(
                    names[0],
                    self.ground.images,
                    self.ground.data or None,
                    model_options=self.model_options,
                    run=options,
                )
            )
        else:
            rollout(
                RolloutOptions(
                    names[0],
                    self.ground.images,
                    self.ground.data or None,
                    model_options=self.model_options,
                    run=options,
                )
            )

    def explain(self, name: str) -> None:
        """Which map of a model can be trusted: a few methods of each kind in every check."""
        limit = self._at_most(CHECKED)
        options = self._options(
            "explain",
            parse_models([name])[0].alias,
            f"vitlens explain {name} {self.ground.typed} --method {','.join(EXPLAINED)} --verify --limit {limit}",
        )
        explain(
            ExplainOptions(
                (name,),
                self.ground.images,
                self.data or None,
                method=EXPLAINED,
                verify=True,
                model_options=self.model_options,
                run=replace(options, limit=limit),
            )
        )

    def compare(self, first: str, second: str) -> None:
        """Two models side by side."""
        options = self._options(
            "compare",
            "",
            f"vitlens compare {first} {second} --data {self.data} --panels {PANELS} --maps {COMPARED}",
        )
        compare(
            CompareOptions(
                (first, second),
                self.data,
                panels=PANELS,
                maps=COMPARED,
                model_options=self.model_options,
                run=options,
            )
        )

    def attack(self, names: Sequence[str]) -> None:
        """How all models break, on a part of the images; everyday damage is left to the command itself."""
        limit = self._at_most(ATTACKED)
        options = self._options(
            "attack",
            "",
            f"vitlens attack {' '.join(names)} {self.ground.typed_with_labels} --attack {','.join(ATTACKS)} "
            f"--no-corruptions --limit {limit}",
        )
        attack(
            names,
            **self.ground.asked,
            choices=AttackChoices(attacks=ATTACKS, corruptions=False, predicted=self.ground.predicted),
            model_options=self.model_options,
            options=replace(options, limit=limit),
        )

    def features(self, names: Sequence[str]) -> None:
        """What the features of all models know, layer by layer."""
        limit = self._at_most(FEATURED)
        bank = min(BANK, bank_of(limit))
        options = self._options(
            "features",
            "",
            f"vitlens features {' '.join(names)} --data {self.data} --limit {limit} --bank {bank} --no-cache",
        )
        features(
            FeaturesOptions(
                tuple(names),
                self.data,
                bank=bank,
                cache=False,
                model_options=self.model_options,
                run=replace(options, limit=limit),
            )
        )

    def profile(self, names: Sequence[str]) -> None:
        """What all models cost, on a few batch sizes."""
        sizes = ",".join(map(str, PROFILED))
        options = self._options("profile", "", f"vitlens profile {' '.join(names)} --batch-sizes {sizes}")
        profile(
            ProfileOptions(
                tuple(names),
                batch_sizes=PROFILED,
                model_options=self.model_options,
                run=replace(options, limit=None),  # of the images of other chapters
            )
        )

    def _at_most(self, images: int) -> int:
        """So many, or fewer where fewer were asked for."""
        return min(self.options.limit or images, images)

    def _options(self, word: str, alias: str, command: str) -> RunOptions:
        folder = f"{CHAPTERS}/{word}-{alias}" if alias else f"{CHAPTERS}/{word}"
        self.done.append(Chapter(word, alias, folder))
        return replace(self.options, out=self.path / folder, command=command)
