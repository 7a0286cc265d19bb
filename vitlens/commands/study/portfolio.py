"""The portfolio report of a whole study: introduction, methods, results, failure analysis,
insights, limits and future work.

It is written from the record only. Every sentence that claims something is a sentence of a chapter,
with its numbers; the sentences here only say what was run, on what and by which method.

The structure of the results is in `RESULTS` and `FAILURES`, the writing in `_Writer`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.run.chapters import Chapter
from vitlens.commands.run.consistency import reconciled
from vitlens.commands.study import choice, works
from vitlens.commands.study.choice import claims_of_chapters
from vitlens.commands.study.findings import findings
from vitlens.commands.study.record import StudyRecord
from vitlens.commands.study.report import WHOLE
from vitlens.record import Data
from vitlens.report.document import (
    Cell,
    Document,
    FigureSpec,
    FirstPage,
    Section,
    Sentence,
    Table,
)
from vitlens.report.escape import as_code, without_machine_paths
from vitlens.report.literature import Work
from vitlens.report.literature import works as literature
from vitlens.report.markdown import provenance, repeated_words
from vitlens.report.numbers import in_time
from vitlens.report.prose import Marked, listed, names, say

_EFFECTS: Final = 12  # rows of the table of the largest effects
_ROWS: Final = 5  # rows of a table of results; the chapter's report has all


@dataclass(frozen=True)
class Topic:
    """A part of the results.

    charts: command and chart of each section, in their order.
    asked: command and question of claims that no chart shows. The question "" stands for the answer
        to what the command was asked.
    """

    title: str
    charts: tuple[tuple[str, str], ...]
    asked: tuple[tuple[str, str], ...] = ()


RESULTS: Final = (
    Topic(
        "Accuracy and confidence",
        (("evaluate", "per_class"), ("evaluate", "calibration")),
        (("evaluate", ""), ("evaluate", "top-1 accuracy")),
    ),
    Topic(
        "Where attention lies",
        (
            ("attention", "layers"),
            ("attention", "object"),
            ("rollout", "pointing"),
            ("stats", "distance"),
        ),
        (("attention", "position embeddings"),),
    ),
    Topic(
        "What heads and layers do",
        (("stats", "specialisation"), ("ablate", "ranking")),
        (("ablate", "most important head"), ("ablate", "removable heads")),
    ),
    Topic(
        "Which maps can be trusted",
        (("explain", "checks"), ("explain", "localisation")),
    ),
    Topic(
        "What the models rely on",
        (("compare", "reliance"), ("compare", "robustness"), ("compare", "shape_bias")),
    ),
    Topic(
        "Robustness",
        (
            ("attack", "curves"),
            ("attack", "robustness_candidates"),
            ("attack", "corruptions"),
        ),
    ),
    Topic("Features", (("features", "depth"),)),
    Topic("Latents of a dictionary", (("sae", "dictionaries"), ("sae", "latents"))),
    Topic(
        "Cost",
        (("profile", "speed"),),
        (("profile", "operations"), ("profile", "why cost grows")),
    ),
)
FAILURES: Final = Topic(
    "Failure analysis",
    (
        ("evaluate", "surest_errors"),
        ("compare", "cue_examples"),
        ("compare", "failure_properties"),
        ("compare", "interventions"),
        ("compare", "attention_on_errors"),
    ),
    (("compare", "heads of the shortcut"), ("compare", "map of the shortcut")),
)
# what a chapter measures, by its command
_METHODS: Final[Mapping[str, str]] = {
    "train": "The preset was trained with one budget for all models.",
    "evaluate": "All models classify the same images; accuracy, confusions and calibration "
    "(Guo 2017) follow.",
    "attention": "Attention weights of every layer and head are read from the model and placed on "
    "the image (Vaswani 2017).",
    "rollout": "Attention is followed through all layers by rollout (Abnar 2020) and by relevance "
    "(Chefer 2021).",
    "stats": "For each head, attention distance (Dosovitskiy 2021, Raghu 2021), entropy "
    "(Shannon 1948) and sparsity (Hoyer 2004) are averaged over the images.",
    "ablate": "Each head is removed in turn (Michel 2019) by a replacement of its output; the "
    "logit lens (nostalgebraist 2020) reads the class after each layer.",
    "explain": "Maps are checked by removing patches in their order (Petsiuk 2018, Rong 2022), by "
    "randomizing the weights (Adebayo 2018) and by the pointing game (Zhang 2018).",
    "compare": "Both models are compared on the same images: errors, cues that are changed with a "
    "control of matched strength, and properties that errors have in common.",
    "attack": "Adversarial images are searched for with each attack, and common corruptions "
    "(Hendrycks 2019) are applied at several severities.",
    "features": "Features of every layer are read by nearest neighbours and by a linear probe, and "
    "compared by CKA (Kornblith 2019).",
    "sae": "A sparse autoencoder describes the tokens of a layer by few latents, which are tested "
    "by removing them.",
    "profile": "Parameters and floating-point operations are counted, and passes are timed.",
}
_STATISTICS: Final = (
    "Intervals hold with 95 % confidence: of rates those of Wilson 1927, of means bootstrap or "
    "Student intervals with the correction of Hesterberg 2015 for few images. Images that share a "
    "source are resampled together.",
    "Two models on the same images are compared by the exact test of McNemar 1947. Several tests "
    "of one kind are corrected by the method of Holm 1979.",
    "A claim is observed, attributed (read off gradients or maps) or intervened (measured after a "
    "change with a control). Only intervened claims name causes.",
)
# titles of pictures of a chapter's first page, which have none there
_TITLES: Final[Mapping[str, str]] = {
    "surest_errors": "Which errors are made with the highest confidence?",
    "layers": "What does attention look like, layer by layer?",
    "specialisation": "Which pattern does each head follow?",
}
# the only sentences with numbers that no chapter states: constants of the methods
METHOD_TEXTS: Final = (*_METHODS.values(), *_STATISTICS)


def portfolio(record: StudyRecord) -> Document:
    """Return the portfolio report of a whole study."""
    writer = _Writer(record)
    # "chapters" are otherwise those of the study: the runs of other commands
    report_chapters = (
        ("Introduction", writer.introduction()),
        ("Methods", writer.methods()),
        ("Results", writer.results()),
        (FAILURES.title, writer.failures()),
        ("Insights", writer.insights()),
        ("Limits", writer.limits()),
        ("Future work", writer.future_work()),
    )
    sections: list[Section] = []
    for number, (title, subsections) in enumerate(report_chapters, start=1):
        sections += _numbered(number, title, subsections)
    sections += _references(sections)
    sections.append(_reproduction(record))
    models = listed([say("{{ name }}", name=name) for name in record.studied])
    title = say("{{ models }} on {{ data }}", models=models, data=writer.data_name)
    preface = Sentence("A portfolio report, written from the record of a study by vitlens.")
    return Document(title, tuple(sections), FirstPage(()), preface=(preface,))


def _numbered(number: int, title: str, subsections: Iterable[Section]) -> Iterator[Section]:
    """Yield the heading of a chapter of the report, then its subsections.

    Those of level 3 are numbered, as "2.1"; those of level 4 belong to the one before them.
    """
    yield Section(f"{number} {title}")
    count = 0
    for subsection in subsections:
        if subsection.level == 3:
            count += 1
            yield replace(subsection, title=f"{number}.{count} {subsection.title}")
        else:
            yield subsection


class _Writer:
    """Writes the parts of one report, and no sentence and no figure twice.

    The methods must therefore be exhausted in the order of the report.
    """

    def __init__(self, record: StudyRecord) -> None:
        self.record = record
        self._said: set[str] = set()
        self._drawn: set[str] = set()  # names of figures

    @property
    def data(self) -> Data | None:
        """Return the images of the first chapter that has some."""
        for chapter in self.record.parts:
            if chapter.record.config.data is not None:
                data: Data = chapter.record.config.data
                return data
        return None

    @property
    def data_name(self) -> str:
        """Return the name of the images."""
        return "its images" if self.data is None else say("{{ title }}", title=self.data.title)

    def new(self, texts: Iterable[str]) -> tuple[Sentence, ...]:
        """Return the texts that were not said before."""
        fresh = []
        for text in texts:
            if text and text not in self._said:
                self._said.add(text)
                fresh.append(Sentence(text))
        return tuple(fresh)

    def new_figures(self, figures: Iterable[FigureSpec]) -> tuple[FigureSpec, ...]:
        """Return the figures that were not drawn before."""
        fresh = [figure for figure in figures if figure.name not in self._drawn]
        self._drawn |= {figure.name for figure in fresh}
        return tuple(fresh)

    def introduction(self) -> Iterator[Section]:
        """Yield the question, the data and the findings in brief."""
        titles = [topic.title for topic in RESULTS if self._has(topic)]
        question = say(
            "This report analyses {{ models }} on {{ data }}. Its topics are: {{ topics }}. It "
            "then asks why predictions fail, and which model to choose for what.",
            models=names(self.record.studied),
            data=self.data_name,
            topics=listed([title[0].lower() + title[1:] for title in titles]),
        )
        yield Section("The question", (Sentence(question),), level=3)
        yield Section("The data", self._data_sentences(), tables=self._image_table(), level=3)
        first_page = WHOLE(self.record).first
        yield Section(
            "Findings in brief",
            tuple(first_page.answer),
            tables=() if first_page.glance is None else (first_page.glance,),
            figures=() if first_page.picture is None else self.new_figures([first_page.picture]),
            level=3,
        )

    def _has(self, topic: Topic) -> bool:
        return any(self.record.of(word) for word, _ in topic.charts)

    def _data_sentences(self) -> tuple[Sentence, ...]:
        if self.data is None:
            return (Sentence("The images of the study are not recorded."),)
        height, width = self.data.size
        says = say(
            "{{ title }}: {{ n }} images{% if part %} of the part “{{ part }}”{% endif %}"
            "{% if classes %}, {{ classes }} classes{% endif %}"
            "{% if height %}, {{ height }} x {{ width }} pixels{% endif %}.",
            title=self.data.title,
            n=self.data.images,
            part=self.data.part,
            classes=self.data.classes,
            height=height,
            width=width,
        )
        notes = [say("{{ note|whole }}.", note=note.rstrip(".")) for note in self.data.notes]
        return tuple(map(Sentence, (says, *notes)))

    def _image_table(self) -> tuple[Table, ...]:
        rows: list[tuple[Cell, ...]] = []
        for chapter in self.record.parts:
            images = None
            if chapter.record.config.data is not None:
                images = chapter.record.config.data.images
            model = "all"
            if chapter.row.alias:
                model = say("{{ alias }}", alias=chapter.row.alias)
            time = None
            if chapter.row.seconds:
                time = in_time(chapter.row.seconds)
            rows.append((chapter.name, model, images, time))
        caption = "Chapters of the study with their numbers of images"
        return (Table(caption, ("chapter", "model", "images", "time"), tuple(rows)),)

    def methods(self) -> Iterator[Section]:
        """Yield the models, their training, the analyses and the statistics."""
        yield Section("Models", self._model_sentences(), tables=self._model_table(), level=3)
        yield Section("Training", self._training_sentences(), self._training_table(), level=3)
        commands = dict.fromkeys(
            row.word for row in self.record.chapters
        )  # each once, in their order
        texts = [_METHODS[command] for command in commands]
        texts += [*_sources_of_maps(self.record), *_sources_of_attacks(self.record)]
        yield Section("Analyses", tuple(map(Sentence, texts)), level=3)
        yield Section("Statistics", tuple(map(Sentence, _STATISTICS)), level=3)

    def _model_sentences(self) -> tuple[Sentence, ...]:
        texts = []
        families = {entry.family for entry in self._entries()}
        if "vit" in families or self.record.vits:
            texts.append(
                "A vision transformer (Dosovitskiy 2021) cuts an image into patches, which attend "
                "to each other in every layer (Vaswani 2017)."
            )
        if "cnn" in families:
            texts.append(
                "A convolutional network combines neighbouring pixels, layer by layer, and has no "
                "attention."
            )
        if "swin" in families:
            texts.append("Swin (Liu 2021) restricts attention to shifted windows.")
        return tuple(map(Sentence, texts))

    def _entries(self) -> Sequence[Any]:
        """Return what the config.json of a chapter about all models says of each model.

        Without such a chapter it is the study's, which is written before presets are trained.
        """
        for chapter in self.record.parts:
            if len(chapter.record.config.models) == len(self.record.studied):
                entries: Sequence[Any] = chapter.record.config.models
                return entries
        return self.record.config.models

    def _model_table(self) -> tuple[Table, ...]:
        rows: list[tuple[Cell, ...]] = []
        for entry in self._entries():
            alias = say("{{ alias }}", alias=entry.alias)
            name = say("{{ name }}", name=entry.name)
            rows.append((alias, name, entry.family or None, entry.parameters))
        return (Table("Models", ("model", "name", "family", "parameters"), tuple(rows)),)

    def _training_sentences(self) -> tuple[Sentence, ...]:
        if not any(row.steps for row in self.record.training):
            return (Sentence("How the models were trained is not recorded in this study."),)
        return (
            Sentence(
                "What is known of each training; a dash stands for what is not. Each model was "
                "trained once."
            ),
        )

    def _training_table(self) -> tuple[Table, ...]:
        columns = ("model", "start", "data", "images", "epochs", "steps", "batch_size", "seed")
        rows = []
        for row in self.record.training:
            cells = []
            for column in columns:
                value = getattr(row, column)
                cells.append(say("{{ v }}", v=value) if isinstance(value, str) else value)
            rows.append(tuple(cells))
        if not rows:
            return ()
        titles = tuple(column.replace("_", " ") for column in columns)
        return (Table("Training", titles, tuple(rows)),)

    def results(self) -> Iterator[Section]:
        """Yield every topic with its sections."""
        for topic in RESULTS:
            parts = list(self._topic(topic))  # before _asked: a claim stands at its chart
            if topic.title == "What heads and layers do":
                parts = [*self._how_it_works(), *parts]
            if parts:
                yield Section(topic.title, self._asked(topic), level=3)
                yield from parts

    def failures(self) -> Iterator[Section]:
        """Yield what the errors have in common, and what happens if that is changed."""
        yield Section("Errors and their causes", self._asked(FAILURES), level=3)
        yield from self._topic(FAILURES)

    def _asked(self, topic: Topic) -> tuple[Sentence, ...]:
        """Return the sentences of claims that no chart shows."""
        texts = []
        for word, question in topic.asked:
            for chapter in self.record.of(word):
                for claim in chapter.claims:
                    is_asked = claim.question == question
                    if not question:
                        is_asked = claim.kind == "answer"
                    if is_asked and claim.says:
                        texts.append(claim.says)
        return self.new(texts)

    def _topic(self, topic: Topic) -> Iterator[Section]:
        """Yield a section for each chart of a topic and each chapter that has the chart."""
        for word, chart in topic.charts:
            chapters = self.record.of(word)
            for chapter in chapters:
                section = self._section(chapter, chart, several=len(chapters) > 1)
                if section is not None:
                    yield section

    def _section(self, chapter: Chapter, chart: str, *, several: bool) -> Section | None:
        """Return the section of a chapter that holds a chart, with the claims about the chart.

        several: True if several chapters of the command have one, so that the title names the
            model.
        """
        section = chapter.section(chart)
        if section is None:
            return None
        # the place of a claim is "layers", or "layers_ALIAS" in a report on several models
        texts = [claim.says for claim in chapter.claims if claim.place.startswith(chart)]
        texts += [sentence.text for sentence in section.sentences]
        title = section.title or _TITLES.get(chart, "What do the pictures show?")
        if several:
            title = say("{{ t|whole }} ({{ a }})", t=title, a=chapter.row.alias)
        tables: tuple[Table, ...] = ()
        # a section without a title is a first page, whose table the introduction has
        if section.title and section.tables:
            tables = (_shortened(section.tables[0]),)
        return Section(
            title,
            self.new(texts),
            tables=tables,
            figures=self.new_figures(section.figures[:1]),
            status=section.status,
            level=4,
        )

    def _how_it_works(self) -> Iterator[Section]:
        for section in works.sections(self.record):
            texts = [sentence.text for sentence in section.sentences]
            yield Section(section.title, self.new(texts), figures=section.figures, level=4)

    def insights(self) -> Iterator[Section]:
        """Yield the largest effects and which model to choose for what."""
        effects = findings(self.record)[:_EFFECTS]
        if effects:
            says = say(
                "Of all effects that were measured, these {{ n }} are the largest that survive "
                "correction over everything that was measured; the largest stand first.",
                n=len(effects),
            )
            rows = tuple((Marked(effect.brief or effect.says), effect.effect) for effect in effects)
            table = Table("Largest effects", ("finding", "effect"), rows)
            yield Section("Largest effects", (Sentence(says),), (table,), level=3)
        differing = list(reconciled(self.record))
        if differing:
            yield Section("Where the analyses differ", self.new(differing), level=3)
        for section in choice.sections(self.record):
            yield replace(section, level=3)

    def limits(self) -> Iterator[Section]:
        """Yield what could overturn the findings, for the study and for its chapters."""
        of_study = WHOLE(self.record).first.unknown
        yield Section("Of the whole study", tuple(of_study), level=3)
        texts = []
        for chapter in self.record.parts:
            for sentence in chapter.document.first.unknown:
                texts.append(sentence.whole)
        yield Section("Of single analyses", self.new(texts), level=3)
        undecided = []
        for claim in claims_of_chapters(self.record):
            if claim.state in ("inconclusive", "not tested"):
                undecided.append(
                    say(
                        "{{ question }}, {{ subject }}: {{ reason|whole }}.",
                        question=claim.question,
                        subject=claim.subject,
                        reason=claim.because,
                    )
                )
        if undecided:
            yield Section("What stayed undecided", self.new(undecided), level=3)

    def future_work(self) -> Iterator[Section]:
        """Yield each hypothesis with the command that tests it."""
        questions_by_step: dict[str, list[str]] = {}
        for claim in claims_of_chapters(self.record):
            if claim.next_step:
                questions = questions_by_step.setdefault(claim.next_step, [])
                if claim.question not in questions:
                    questions.append(claim.question)
        rows = []
        for step, questions in questions_by_step.items():
            rows.append((listed(questions), Marked(step)))
        says = "No claim failed or surprised, so none leads to a hypothesis."
        tables: tuple[Table, ...] = ()
        if rows:
            says = (
                "Each claim that failed or surprised leads to a hypothesis and the command that "
                "tests it."
            )
            tables = (Table("Hypotheses", ("follows from", "hypothesis and test"), tuple(rows)),)
        yield Section("Hypotheses to test", (Sentence(says),), tables, level=3)


# the beginning of a caption of a table that shows only some of its rows: "20 of 144 rows"
_COUNT: Final = re.compile(r"^\d+ of(?= [\d,]+ rows)")


def _shortened(table: Table) -> Table:
    """Return the first rows of a table, with their number in the caption."""
    if len(table.rows) <= _ROWS:
        return table
    caption = f"{_ROWS} of {len(table.rows)} rows"
    if table.caption:
        caption = _COUNT.sub(f"{_ROWS} of", table.caption)
    return Table(caption, table.columns, table.rows[:_ROWS])


def _sources_of_maps(record: StudyRecord) -> Iterator[str]:
    """Yield the attribution methods with their papers."""
    methods: dict[str, None] = {}  # each once, in order
    for chapter in record.of("explain"):
        for row in chapter.record.checks:
            methods[row.method] = None
    sources = []
    for method in methods:
        entry = ATTRIBUTIONS.get(method)
        if entry is not None:
            sources.append(say("{{ t }} ({{ p }})", t=entry.title, p=entry.paper))
    if sources:
        yield say("Attribution methods: {{ s }}.", s=listed(sources))


def _sources_of_attacks(record: StudyRecord) -> Iterator[str]:
    """Yield the attacks with their papers and numbers of steps."""
    sources: dict[str, None] = {}  # each once, in order
    for chapter in record.of("attack"):
        for row in chapter.record.attacks:
            text = say("{{ r.title }} ({{ r.source }}, {{ r.steps }} step{{ r.steps|s }})", r=row)
            sources[text] = None
    if sources:
        yield say("Attacks: {{ s }}.", s=listed(list(sources)))


def _references(sections: Sequence[Section]) -> Iterator[Section]:
    """Yield the works that the report cites."""
    texts = []
    for section in sections:
        texts += [sentence.text for sentence in section.sentences]
    text = "\n".join(texts)
    cited = [work for work in literature() if _is_cited(work, text)]
    cited.sort(key=lambda work: (work.surnames[0].lower(), work.year))
    entries = [say("**{{ w.cited|whole }}**: {{ w.entry|whole }}", w=work) for work in cited]
    yield Section("References", tuple(map(Sentence, entries)))


def _is_cited(work: Work, text: str) -> bool:
    surname, year = work.key
    return f"{surname} {year}" in text or work.cited in text


def _reproduction(record: StudyRecord) -> Section:
    """Return the command that repeats the study, with versions and weights."""
    sentences = []
    if record.config.command_line:
        line = as_code(without_machine_paths(record.config.command_line))
        sentences.append(Sentence(f"Command: {line}"))
    facts = repeated_words(record)
    if facts:
        sentences.append(Sentence(facts))
    evaluations = record.of("evaluate")
    if evaluations:
        for model in evaluations[0].record.config.models:
            sentences.append(Sentence(provenance(model)))
    sentences.append(
        Sentence("All numbers are in `results.json` of the study and of its chapters.")
    )
    return Section("Appendix: how to repeat it", tuple(sentences))
