"""The chapters of a whole study: one command after another on its models, each into a run folder of its own."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vitlens.analysis.ablation.ablate import units_of
from vitlens.analysis.answers.classes import label_columns
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.ablate.measure.expected import ablate_parts
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.attack.measure.expected import attack_parts
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.parts import explain_parts
from vitlens.commands.features.measure.images import bank_of, features_parts
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.registry import COMMANDS
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.scaffold.expected import Part, say_expected
from vitlens.commands.scaffold.load import load_models, load_splits
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.stats.measure.expected import stats_parts
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.study.record import CHAPTERS_FOLDER, ChapterRow
from vitlens.commands.train.options import RecipeChanges, TrainOptions
from vitlens.models.model import Model
from vitlens.models.naming import ModelName, parse_models
from vitlens.names import PRESETS

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
class StudyImages:
    """The images of a study: data, a name or a path, or images, files and folders without labels (data is None then).

    predicted: whether ablation and attacks take the models' predictions for labels.
    """

    data: str | None = None
    images: tuple[str, ...] = ()
    predicted: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """As the commands take it."""
        return {"data": self.data, "images": self.images}

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

    def __init__(self, path: Path, images: StudyImages, model_options: ModelOptions, run: RunOptions) -> None:
        self.path, self.images, self.model_options, self.run = path, images, model_options, run
        self.done: list[ChapterRow] = []

    def trained(self, model: ModelName, epochs: int | None) -> str:
        """A name that can be loaded: a preset is trained first, in a chapter of its own."""
        if not trained_first(model, self.model_options):
            return typed(model)
        line = f"train {model.name} --data {self.images.data}"
        recipe = RecipeChanges(epochs=epochs)
        self._run(
            "train", model.alias, line, lambda run: TrainOptions(model.name, self.images.data, recipe=recipe, run=run)
        )
        return f"{model.alias}={self.path / self.done[-1].folder}"

    def load(self, names: Sequence[str]) -> Sequence[Model]:
        """The models, to ask what they are."""
        return load_models(names, model_options=self.model_options, options=self.run)

    def look_ahead(self, models: Sequence[Model]) -> None:
        """Say how long the chapters that follow may take together. Raises InputError where a model does not know the
        data's classes, as a later chapter would after much work."""
        splits = load_splits(models, options=replace(self.run, quiet=True), **self.images.asked)
        for model, split in zip(models, splits):
            if split.labels is not None and not self.images.predicted:
                label_columns(model.classes, split)
        # the options that shorten a part belong to commands of their own
        parts = [[replace(part, shorter="") for part in _parts(one, len(split))] for one, split in zip(models, splits)]
        say_expected(list(zip(models, splits, parts)), self.run)

    def analyse(self, names: Sequence[str], vits: Sequence[str], *, labelled: bool) -> None:
        """All chapters of analysis: of each ViT, of a ViT beside another model, and of all models together.

        names: of all models; vits: of those that are looked into.
        """
        if labelled:
            self._run(
                "evaluate", "", self._line("evaluate", names),
                lambda run: EvaluateOptions(tuple(names), self.images.data, self.model_options, run),
            )  # fmt: skip
        for name in vits:
            self._look_into(name)
        others = [name for name in names if name not in vits] or [name for name in names if name != vits[0]]
        if others and labelled:
            self._compare(vits[0], others[0])
        self._attack(names)
        if labelled:
            self._features(names)
        self._profile(names)

    def _look_into(self, name: str) -> None:
        """Attention, rollout, statistics, ablation and explanations of one model."""
        shared: dict[str, Any] = {**self.images.asked, "model_options": self.model_options}
        alias = parse_models([name])[0].alias
        one, several = self._line("{}", [name]), (name,)
        predicted = self.images.predicted
        line = f"ablate {name} {self.images.typed_with_labels}"
        self._run("attention", alias, one.format("attention"), lambda run: AttentionOptions(name, run=run, **shared))
        self._run("rollout", alias, one.format("rollout"), lambda run: RolloutOptions(name, run=run, **shared))
        self._run("stats", alias, one.format("stats"), lambda run: StatsOptions(several, run=run, **shared))
        self._run("ablate", alias, line, lambda run: AblateOptions(name, predicted=predicted, run=run, **shared))
        limit = self._at_most(CHECKED)
        line = f"{one.format('explain')} --method {','.join(EXPLAINED)} --verify --limit {limit}"
        self._run(
            "explain", alias, line,
            lambda run: ExplainOptions(several, method=EXPLAINED, verify=True, run=replace(run, limit=limit), **shared),
        )  # fmt: skip

    def _compare(self, first: str, second: str) -> None:
        """Two models side by side."""
        line = f"compare {first} {second} --data {self.images.data} --panels {PANELS} --maps {COMPARED}"
        self._run(
            "compare", "", line,
            lambda run: CompareOptions(
                (first, second), self.images.data, panels=PANELS, maps=COMPARED, model_options=self.model_options,
                run=run,
            ),
        )  # fmt: skip

    def _attack(self, names: Sequence[str]) -> None:
        """The robustness of all models, on a part of the images; common corruptions are left to the command itself."""
        limit = self._at_most(ATTACKED)
        line = (
            f"attack {' '.join(names)} {self.images.typed_with_labels} --attack {','.join(ATTACKS)} --no-corruptions "
            f"--limit {limit}"
        )
        self._run(
            "attack", "", line,
            lambda run: AttackOptions(
                tuple(names), **self.images.asked, attacks=ATTACKS, corruptions=False, predicted=self.images.predicted,
                model_options=self.model_options, run=replace(run, limit=limit),
            ),
        )  # fmt: skip

    def _features(self, names: Sequence[str]) -> None:
        """The features of all models, layer by layer."""
        limit = self._at_most(FEATURED)
        bank = min(BANK, bank_of(limit))
        line = f"features {' '.join(names)} --data {self.images.data} --limit {limit} --bank {bank} --no-cache"
        self._run(
            "features", "", line,
            lambda run: FeaturesOptions(
                tuple(names), self.images.data, bank=bank, cache=False, model_options=self.model_options,
                run=replace(run, limit=limit),
            ),
        )  # fmt: skip

    def _profile(self, names: Sequence[str]) -> None:
        """The costs of all models, on a few batch sizes."""
        line = f"profile {' '.join(names)} --batch-sizes {','.join(map(str, PROFILED))}"
        self._run(
            "profile", "", line,
            lambda run: ProfileOptions(
                tuple(names), batch_sizes=PROFILED, model_options=self.model_options, run=replace(run, limit=None)
            ),
        )  # fmt: skip

    def _line(self, word: str, names: Sequence[str]) -> str:
        return f"{word} {' '.join(names)} {self.images.typed}"

    def _at_most(self, images: int) -> int:
        """So many, or fewer where fewer were asked for."""
        return min(self.run.limit or images, images)

    def _run(self, word: str, alias: str, line: str, options: Callable[[RunOptions], object]) -> None:
        """One command in a folder of its own; line: as it would be typed; options: from the run options."""
        folder = f"{CHAPTERS_FOLDER}/{word}-{alias}" if alias else f"{CHAPTERS_FOLDER}/{word}"
        self.done.append(ChapterRow(word, alias, folder))
        COMMANDS[word].measure(options(replace(self.run, out=self.path / folder, command=f"vitlens {line}")))


def _parts(model: Model, images: int) -> Iterator[Part]:
    """The parts of all chapters of one model."""
    some = min(images, FEATURED)
    yield Part("answers", images)
    if model.anatomy.family == "vit":
        yield from stats_parts(images, moments=0)
        yield from ablate_parts(units_of(model), images, AblateOptions(model.alias))
        yield from explain_parts(EXPLAINED, min(images, CHECKED), verify=True, counterfactuals=True)
    attacks = AttackOptions((model.alias,), attacks=ATTACKS, corruptions=False)
    yield from attack_parts(attacks, min(images, ATTACKED))
    yield from features_parts(some, min(BANK, bank_of(some)))
