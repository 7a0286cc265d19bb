"""`vitlens study`: a ViT and a CNN trained or taken, evaluated, and the ViT looked into, in one report."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vitlens.errors import InputError
from vitlens.files import RunRecord
from vitlens.models.naming import ModelName, parse_models
from vitlens.names import PRESETS
from vitlens.report import Section
from vitlens.runs.ablate import ablate
from vitlens.runs.attack import attack
from vitlens.runs.attack_choices import AttackChoices
from vitlens.runs.attention import attention
from vitlens.runs.compare import compare
from vitlens.runs.describe import described
from vitlens.runs.evaluate import evaluate
from vitlens.runs.explain import explain
from vitlens.runs.features import features
from vitlens.runs.features_choices import FeatureChoices
from vitlens.runs.features_load import bank_of
from vitlens.runs.folder import RunFolder
from vitlens.runs.load import load_specimens
from vitlens.runs.options import ModelOptions, RunOptions
from vitlens.runs.profile import profile
from vitlens.runs.report import Drawn, publish
from vitlens.runs.rollout import rollout
from vitlens.runs.stats import stats
from vitlens.runs.study_points import study_points
from vitlens.runs.study_points_draw import draw_points, kind_of
from vitlens.runs.study_points_tell import tell_points
from vitlens.runs.study_whole import CHAPTERS, Chapter, draw_whole, gathered, tell_whole
from vitlens.runs.train import train

DEFAULT_MODELS: Final = ("vit-micro", "resnet20")
WHOLE: Final = "whole"  # the kind that is all of this module
PROFILED: Final = (1, 8, 32)  # batch sizes
EXPLAINED: Final = ("relevance", "rollout", "gradcam", "occlusion")  # ways whose maps are checked
CHECKED: Final = 50  # images on which they are
COMPARED: Final = 100  # images whose maps are compared
FEATURED: Final = 1000  # test images whose features are read
BANK: Final = 5000  # training images that answer for them
PANELS: Final = 12  # of those shown side by side
ATTACKS: Final = ("fgsm", "pgd")
ATTACKED: Final = 100  # images


def study(
    models: Sequence[str],
    *,
    kind: str | None = None,
    data: str | None = None,
    epochs: int | None = None,
    seeds: int | None = None,
    resume: Path | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path:
    """Train what is a preset, evaluate all models, look into the ViTs; each chapter is a run folder of its own.

    kind: one question instead, about small models trained with several seeds, which alone can be resumed (see
    study_points); data: digits where nothing is said. Returns the report's path. Raises InputError where none of the
    models is a ViT.
    """
    if resume is not None or kind not in (None, WHOLE):
        return study_points(
            kind, models=models, data=data, epochs=epochs, seeds=seeds, resume=resume, model_options=model_options,
            options=options,
        )  # fmt: skip
    if seeds is not None:
        raise InputError(f"expected --kind with --seeds {seeds}, found a whole study; try --kind architecture")
    data = data or "digits"
    named = parse_models(models or DEFAULT_MODELS)
    folder = RunFolder.create(
        "study",
        name_parts=(*(model.alias for model in named), data),
        title=f"Study of {' and '.join(model.alias for model in named)} on {Path(data).name}",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, choices={"models": list(models or DEFAULT_MODELS), "data": data, "epochs": epochs}),
        formats=options.formats,
    )
    with folder:
        chapters = _Chapters(folder.path, data, model_options, replace(options, overwrite=True))
        ready = [chapters.trained(model, epochs) for model in named]
        vits = [name for name, specimen in zip(ready, chapters.load(ready)) if specimen.anatomy.family == "vit"]
        if not vits:
            raise InputError(f"expected a vision transformer among {', '.join(m.alias for m in named)}, found none")
        chapters.run("evaluate", "", ready)
        for name in vits:
            chapters.run("attention", parse_models([name])[0].alias, [name])
            chapters.run("rollout", parse_models([name])[0].alias, [name])
            chapters.run("stats", parse_models([name])[0].alias, [name])
            chapters.run("ablate", parse_models([name])[0].alias, [name])
            chapters.explain(name)
        others = [name for name in ready if name not in vits] or [name for name in ready if name != vits[0]]
        if others:
            chapters.compare(vits[0], others[0])
        chapters.attack(ready)
        chapters.features(ready)
        chapters.profile(ready)
        folder.table("chapters", [vars(chapter) for chapter in chapters.done])
        for name, estimate in gathered(folder.path, chapters.done).items():
            folder.metric(name, estimate)
        return publish(folder, draw, tell)


class _Chapters:
    """Runs the chapters one after another, each into a folder of its own."""

    def __init__(self, path: Path, data: str, model_options: ModelOptions, options: RunOptions) -> None:
        self.path, self.data, self.model_options, self.options = path, data, model_options, options
        self.done: list[Chapter] = []

    def trained(self, model: ModelName, epochs: int | None) -> str:
        """A name that can be loaded: a preset is trained first, in a chapter of its own."""
        typed = f"{model.alias}={model.name}" + (f"@{model.weights}" if model.weights else "")
        if (
            model.name not in PRESETS
            or model.weights
            or self.model_options.weights
            or self.model_options.random_weights
        ):
            return typed
        options = self._options("train", model.alias, f"vitlens train {model.name} --data {self.data}")
        recipe = {} if epochs is None else {"epochs": epochs}
        train(model.name, data=self.data, recipe=recipe, options=options)
        return f"{model.alias}={options.out}"

    def load(self, names: Sequence[str]) -> Any:
        """The specimens, to ask what they are."""
        return load_specimens(names, model_options=self.model_options, options=self.options)

    def run(self, word: str, alias: str, names: Sequence[str]) -> None:
        """One analysis command on these models."""
        options = self._options(word, alias, f"vitlens {word} {' '.join(names)} --data {self.data}")
        shared: dict[str, Any] = {"data": self.data, "model_options": self.model_options, "options": options}
        if word == "evaluate":
            evaluate(names, **shared)
        elif word == "stats":
            stats(names, **shared)
        elif word == "ablate":
            ablate(names[0], **shared)
        elif word == "attention":
            attention(names[0], **shared)
        else:
            rollout(names[0], **shared)

    def explain(self, name: str) -> None:
        """Which map of a model can be trusted: a few methods of each kind in every check."""
        limit = min(self.options.limit or CHECKED, CHECKED)
        options = self._options(
            "explain",
            parse_models([name])[0].alias,
            f"vitlens explain {name} --data {self.data} --method {','.join(EXPLAINED)} --verify --limit {limit}",
        )
        explain(
            [name],
            data=self.data,
            method=EXPLAINED,
            verify=True,
            model_options=self.model_options,
            options=replace(options, limit=limit),
        )

    def compare(self, first: str, second: str) -> None:
        """Two models side by side."""
        options = self._options(
            "compare",
            "",
            f"vitlens compare {first} {second} --data {self.data} --panels {PANELS} --maps {COMPARED}",
        )
        compare(
            [first, second],
            data=self.data,
            panels=PANELS,
            maps=COMPARED,
            model_options=self.model_options,
            options=options,
        )

    def attack(self, names: Sequence[str]) -> None:
        """How all models break, on a part of the images; everyday damage is left to the command itself."""
        limit = min(self.options.limit or ATTACKED, ATTACKED)
        options = self._options(
            "attack",
            "",
            f"vitlens attack {' '.join(names)} --data {self.data} --attack {','.join(ATTACKS)} --no-corruptions "
            f"--limit {limit}",
        )
        attack(
            names,
            data=self.data,
            choices=AttackChoices(attacks=ATTACKS, corruptions=False),
            model_options=self.model_options,
            options=replace(options, limit=limit),
        )

    def features(self, names: Sequence[str]) -> None:
        """What the features of all models know, layer by layer."""
        limit = min(self.options.limit or FEATURED, FEATURED)
        bank = min(BANK, bank_of(limit))
        options = self._options(
            "features",
            "",
            f"vitlens features {' '.join(names)} --data {self.data} --limit {limit} --bank {bank} --no-cache",
        )
        features(
            names,
            data=self.data,
            choices=FeatureChoices(bank=bank, cache=False),
            model_options=self.model_options,
            options=replace(options, limit=limit),
        )

    def profile(self, names: Sequence[str]) -> None:
        """What all models cost, on a few batch sizes."""
        sizes = ",".join(map(str, PROFILED))
        options = self._options("profile", "", f"vitlens profile {' '.join(names)} --batch-sizes {sizes}")
        profile(names, batch_sizes=PROFILED, model_options=self.model_options, options=options)

    def _options(self, word: str, alias: str, command: str) -> RunOptions:
        folder = f"{CHAPTERS}/{word}-{alias}" if alias else f"{CHAPTERS}/{word}"
        self.done.append(Chapter(word, alias, folder))
        return replace(self.options, out=self.path / folder, command=command)


def draw(record: RunRecord) -> Iterator[Drawn]:
    """The figures of a whole study or of one question."""
    return draw_whole(record) if kind_of(record) is None else draw_points(record)


def tell(record: RunRecord) -> list[Section]:
    """The report of a whole study or of one question."""
    return tell_whole(record) if kind_of(record) is None else tell_points(record)
