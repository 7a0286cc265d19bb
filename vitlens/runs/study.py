"""`vitlens study`: a ViT and a CNN trained or taken, evaluated, and the ViT looked into, in one report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from vitlens.errors import InputError
from vitlens.figures.study import Estimate as Bar
from vitlens.figures.study import study_summary
from vitlens.files import RunRecord, read_run
from vitlens.models.naming import ModelName, parse_models
from vitlens.models.saved import WEIGHTS_FILE
from vitlens.names import PRESETS
from vitlens.report import Section, in_words, metrics
from vitlens.runs.ablate import ablate
from vitlens.runs.attention import attention
from vitlens.runs.describe import described
from vitlens.runs.evaluate import evaluate
from vitlens.runs.folder import RunFolder
from vitlens.runs.load import load_specimens
from vitlens.runs.options import ModelOptions, RunOptions
from vitlens.runs.report import Drawn, publish
from vitlens.runs.rollout import rollout
from vitlens.runs.stats import stats
from vitlens.runs.train import train
from vitlens.uncertainty import Estimate

DEFAULT_MODELS: Final = ("vit-micro", "resnet20")
CHAPTERS = "chapters"
FUSION = "mean"  # whose pointing game the summary tells

_TITLES: Final = {
    "train": "Training",
    "evaluate": "Accuracy",
    "attention": "Attention",
    "rollout": "Attention followed to the image",
    "stats": "What every head does",
    "ablate": "Which heads matter",
}


@dataclass(frozen=True)
class Chapter:
    """One run within the study: its command, the model it is about ("" for all), and its folder."""

    word: str
    alias: str
    folder: str


def study(
    models: Sequence[str],
    *,
    data: str = "digits",
    epochs: int | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path:
    """Train what is a preset, evaluate all models, look into the ViTs; each chapter is a run folder of its own.

    Returns the report's path. Raises InputError where none of the models is a ViT.
    """
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
        folder.table("chapters", [vars(chapter) for chapter in chapters.done])
        for name, estimate in _gathered(folder.path, chapters.done).items():
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

    def _options(self, word: str, alias: str, command: str) -> RunOptions:
        folder = f"{CHAPTERS}/{word}-{alias}" if alias else f"{CHAPTERS}/{word}"
        self.done.append(Chapter(word, alias, folder))
        return replace(self.options, out=self.path / folder, command=command)


def _gathered(path: Path, chapters: Sequence[Chapter]) -> Mapping[str, Estimate]:
    """The numbers of the chapters, under names that say whose they are."""
    found: dict[str, Estimate] = {}
    for chapter in chapters:
        for name, estimate in metrics(read_run(path / chapter.folder)).items():
            if chapter.word == "train":
                continue  # evaluate measures the same images again
            first, *rest = name.split("/")
            found["/".join((first, chapter.alias, *rest)) if chapter.alias else name] = estimate
    return found


def draw(record: RunRecord) -> Iterator[Drawn]:
    """The summary, and the figures of all chapters under names of their own."""
    yield Drawn(
        "summary", _summary(record), "Accuracy on the test images, and how often the map's peak is on the object."
    )
    for chapter in _chapters(record):
        module = import_module(f"vitlens.runs.{chapter.word}")
        for drawn in module.draw(read_run(record.folder / chapter.folder)):
            yield replace(drawn, name=_figure_name(chapter, drawn.name))


def _summary(record: RunRecord) -> Any:
    found = metrics(record)
    aliases = _aliases(record)
    accuracy = [_bar(alias, _accuracy(found, alias)) for alias in aliases]
    pointing = [
        _bar(f"{word}, {chapter.alias}", hits)
        for chapter in _chapters(record)
        if chapter.word == "rollout"
        for word, hits in _hits(found, chapter.alias)
    ]
    areas = [estimate for name, estimate in found.items() if name.endswith("pointing/mask-area")]
    return study_summary(
        accuracy=accuracy, pointing=pointing, mask_area=areas[0].value if areas else None, title="What was found"
    )


def _hits(found: Mapping[str, Estimate], alias: str) -> Iterator[tuple[str, Estimate]]:
    """How often the maps of one model point at the object, where that is known."""
    for word, name in (("rollout", f"rollout-{FUSION}"), ("relevance", "relevance")):
        hits = found.get(f"localisation/{alias}/pointing/{name}")
        if hits is not None:
            yield word, hits


def _bar(name: str, estimate: Estimate) -> Bar:
    low = estimate.value if estimate.low is None else estimate.low
    high = estimate.value if estimate.high is None else estimate.high
    return Bar(name, estimate.value, low, high, estimate.n or 0)


def tell(record: RunRecord) -> list[Section]:
    """The summary in words, then what each chapter says, then everybody's limits."""
    found = metrics(record)
    lines = [
        f"`{alias}` is right on {in_words(_accuracy(found, alias))} of the test images." for alias in _aliases(record)
    ]
    for chapter in _chapters(record):
        hits = list(_hits(found, chapter.alias)) if chapter.word == "rollout" else []
        if hits:
            area = found[f"localisation/{chapter.alias}/pointing/mask-area"]
            listed = ", of its ".join(f"{word} in {in_words(hit)}" for word, hit in hits)
            lines.append(
                f"The highest point of `{chapter.alias}`'s {listed} of the images is on the object; the mean mask "
                f"area, which a random point would hit, is {in_words(area, with_n=False)}."
            )
    sections = [Section("Summary", tuple(lines), figures=("summary",))]
    limits: dict[str, None] = {}
    for chapter in _chapters(record):
        module = import_module(f"vitlens.runs.{chapter.word}")
        for section in module.tell(read_run(record.folder / chapter.folder)):
            if section.title == "Limits":
                limits |= dict.fromkeys(section.paragraphs)
                continue
            of = f" of {chapter.alias}" if chapter.alias else ""
            figures = tuple(_figure_name(chapter, name) for name in section.figures)
            title = f"{_TITLES[chapter.word]}{of}: {section.title[0].lower()}{section.title[1:]}"
            sections.append(replace(section, title=title, figures=figures))
    where = f"Each chapter is a whole run in `{CHAPTERS}/`, with its own report, numbers and settings."
    trained = [chapter for chapter in _chapters(record) if chapter.word == "train"]
    if trained:
        first = trained[0]
        where += (
            f" The trained models are there too: `vitlens rollout {record.folder / first.folder}` takes one by its "
            f"folder (weights in {WEIGHTS_FILE})."
        )
    return [*sections, Section("Where things are", (where,)), Section("Limits", tuple(limits))]


def _chapters(record: RunRecord) -> list[Chapter]:
    return [Chapter(str(row["word"]), str(row["alias"]), str(row["folder"])) for row in record.table("chapters")]


def _aliases(record: RunRecord) -> list[str]:
    options: Any = record.config["options"]
    return [model.alias for model in parse_models(options["models"])]


def _accuracy(found: Mapping[str, Estimate], alias: str) -> Estimate:
    return found.get(f"accuracy/{alias}") or found["accuracy"]


def _figure_name(chapter: Chapter, name: str) -> str:
    return "_".join(part for part in (chapter.word, chapter.alias, name) if part)
