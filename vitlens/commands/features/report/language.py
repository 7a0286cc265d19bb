"""Zero-shot classification by the names of the classes, and relevance for prompts."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.features.arrays import PROMPT_ARRAYS, PromptArrays
from vitlens.commands.features.record import NO_ZERO_SHOT, PROMPTS, TEMPLATES
from vitlens.commands.features.record.rows import PromptRow, TemplateRow
from vitlens.commands.features.report.classifiers import ROWS
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.figures.features.templates import TemplateAccuracy

_TEMPLATES_CAPTION: Final = (
    "The same images and class names in different prompts. Filled dots differ from the ensemble by McNemar's exact "
    "test after Holm's correction; the spread of the dots is due to the wording alone."
)
_PROMPTS_CAPTION: Final = (
    "Relevance (Chefer 2021) of the similarity of image and text. Regions that are bright for every prompt depend on "
    "the image more than on the text."
)


def template_sentences(rows: Sequence[TemplateRow]) -> Iterator[Sentence]:
    """How the wording of the prompt changes one model's accuracy; rows: the ensemble, then each template."""
    if not rows:
        return
    ensemble, single = rows[0], rows[1:]
    yield Sentence(
        f"Zero-shot accuracy of `{ensemble.model}`, given only the names of the classes: "
        f"{in_words(ensemble.estimate)} on the test images, with the ensemble of {len(single)} "
        f"template{'s' if len(single) > 1 else ''}.",
        tuple(rows),
    )
    if len(single) > 1:
        best, worst = max(single, key=lambda row: row.accuracy), min(single, key=lambda row: row.accuracy)
        differing = sum(row.p_holm is not None and row.p_holm <= LEVEL for row in single)
        gap = number(100 * (best.accuracy - worst.accuracy), 1)
        yield Sentence(
            f"Single templates range from {in_words(worst.estimate, with_n=False)} (“{worst.template}”) to "
            f"{in_words(best.estimate, with_n=False)} (“{best.template}”): {gap} points by the wording alone, best and "
            f"worst being selected from the results. {differing or 'None'} of the {len(single)} differ significantly "
            "from the ensemble (McNemar, Holm).",
            (*rows, Estimate(100 * (best.accuracy - worst.accuracy), unit="points")),
        )


def language_sections(record: Record, *, chance: float) -> Iterator[Section]:
    """Accuracy by template, and maps and similarities for the prompts."""
    figures: list[FigureSpec] = []
    tables: list[Table] = []
    if record.rows(TEMPLATES):
        tables.append(_template_table(record.rows(TEMPLATES)))
    for alias in record.aliases:
        templates = [row for row in record.rows(TEMPLATES) if row.model == alias]
        prompts = [row for row in record.rows(PROMPTS) if row.model == alias]
        if templates:
            draw = partial(_draw_templates, alias, templates, chance)
            figures.append(FigureSpec(f"templates_{alias}", _TEMPLATES_CAPTION, draw))
        if prompts:
            arrays = record.arrays(PROMPT_ARRAYS, model=alias)
            figures.append(
                FigureSpec(f"prompts_{alias}", _PROMPTS_CAPTION, partial(_draw_prompts, alias, arrays, prompts))
            )
            tables.append(_cosine_table(alias, prompts))
    sentences = [
        Sentence(f"`{row.model}` has no zero-shot accuracy: {row.reason}.", (row,)) for row in record.rows(NO_ZERO_SHOT)
    ]
    if figures or sentences:
        yield Section(
            "Zero-shot classification and prompts", tuple(sentences), tuple(tables), tuple(figures), leading=True
        )


def _template_table(rows: Sequence[TemplateRow]) -> Table:
    return Table.of(
        "Zero-shot accuracy by template",
        rows[:ROWS],
        {
            "model": lambda row: row.model,
            "template": lambda row: row.template,
            "accuracy": lambda row: row.estimate,
            "minus the ensemble": lambda row: row.gain_estimate,
            "p (Holm)": lambda row: row.p_holm,
        },
    )


def _cosine_table(alias: str, rows: Sequence[PromptRow]) -> Table:
    """The similarity of each image shown to each prompt."""
    names = {row.image: row.name for row in rows}
    lines = tuple(
        (f"{image + 1}: {name}", *(f"{row.cosine:.3f}" for row in rows if row.image == image))
        for image, name in names.items()
    )
    columns = ("image", *(f"“{prompt}”" for prompt in _prompts(rows)))
    return Table(
        f"Cosine similarity of image and prompt in `{alias}`; images from the top of the figure", columns, lines
    )


def _prompts(rows: Sequence[PromptRow]) -> list[str]:
    """The prompts, in the order of the maps."""
    return [row.prompt for row in rows if row.image == rows[0].image]


def _draw_templates(alias: str, rows: Sequence[TemplateRow], chance: float) -> "Figure":
    from vitlens.figures.features.templates import template_chart

    ensemble, *templates = map(_wording, rows)
    title = f"Zero-shot accuracy of {alias} by template"
    return template_chart(ensemble=ensemble, templates=templates, chance=chance, title=title)


def _wording(row: TemplateRow) -> "TemplateAccuracy":
    from vitlens.figures.features.templates import TemplateAccuracy

    return TemplateAccuracy(
        row.template, row.accuracy, row.low, row.high, row.p_holm is not None and row.p_holm <= LEVEL
    )


def _draw_prompts(alias: str, arrays: PromptArrays, rows: Sequence[PromptRow]) -> "Figure":
    from vitlens.figures.overlays import overlay_rows

    return overlay_rows(
        images=arrays.pixels / 255,
        maps=arrays.maps,
        titles=[prompt if len(prompt) < 24 else f"{prompt[:22]}…" for prompt in _prompts(rows)],
        title=f"Relevance of the patches of an image for a text, in {alias}",
        label="relevance",
    )
