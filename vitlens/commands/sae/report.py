"""The report of `vitlens sae`: how a dictionary reconstructs, and what its latents are."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.dictionary.rows import CONFIRMED, DictionaryRow, LatentRow
from vitlens.analysis.naming.words import CORRELATES
from vitlens.charts import Picture, images, intervals, pixels
from vitlens.commands.sae.record import ExemplarRow, SaeRecord
from vitlens.commands.shared.label_rows import note_sentences
from vitlens.report.claims import Claim, found
from vitlens.report.document import ImagePanel, Tags
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Overview, Report, Section

LEADING: Final = 3  # latents in the picture of the first page
_IMAGES_A_ROW: Final = 5  # of a latent on the first page, as many as fit into one row
_MOST_DRAWN: Final = 12  # latents in the chart of effects


def claims(record: SaeRecord) -> Iterator[Claim]:
    """Yield what the latents are, how well the dictionary reconstructs, and what it preserves."""
    if record.latents:
        yield _latents_claim(record)
    row, *baselines = record.dictionaries
    yield _reconstruction_claim(record, row, baselines)
    if row.recovered_loss is not None:
        yield found(
            "fidelity",
            row.model,
            "With the reconstruction in the place of the tokens, the loss is "
            "{{ row.recovered_loss|value }} of the way from mean ablation to the unchanged "
            "model.",
            row.recovered_loss,
            given={"row": row},
            kind="answer",
            evidence="intervened",
            place="dictionaries",
        )
    if row.stability is not None:
        yield found(
            "stability",
            row.model,
            "The directions of a second training, matched one to one, have a mean cosine of "
            "{{ row.stability|number }}.",
            given={"row": row},
            kind="answer",
            evidence="observed",
            place="dictionaries",
        )


def _reconstruction_claim(
    record: SaeRecord, row: DictionaryRow, baselines: Sequence[DictionaryRow]
) -> Claim:
    """Return how much variance the dictionary explains, compared with PCA if it was measured."""
    (setup,) = record.setup
    baseline_by_name = {baseline.dictionary: baseline for baseline in baselines}
    pca = baseline_by_name.get("PCA")
    return found(
        "reconstruction",
        row.model,
        "With {{ row.l0|value }} of {{ row.latents }} latents in a token, the dictionary of "
        "`{{ setup.place }}` explains {{ row.variance|value }} of the variance on held-out "
        "images{% if pca %}; PCA with as many explains {{ pca.variance|value }}{% endif %}. "
        "{{ row.dead|value }} of its latents are active in none of their tokens.",
        row.variance,
        given={"row": row, "setup": setup, "pca": pca},
        headline="{% if pca and pca.variance.value > row.variance.value %}PCA explains more "
        "variance than {{ row.latents }} latents{% else %}{{ row.latents }} latents explain "
        "{{ row.variance|value }} of the variance{% endif %}",
        kind="answer",
        evidence="observed",
        place="dictionaries",
    )


def _latents_claim(record: SaeRecord) -> Claim:
    """Return how many latents stand for a class, and the first of them."""
    confirmed = [row for row in record.latents if row.state == CONFIRMED]
    correlating = [row for row in record.latents if row.state == CORRELATES]
    lead = record.latents[0]
    headline = ""
    if confirmed:
        lead = confirmed[0]
        headline = "Latent {{ lead.latent }} stands for {{ lead.word }}"
    return found(
        "latents",
        lead.model,
        "{{ confirmed|length or 'None' }} of {{ n }} tested latents stand"
        "{{ 's' if confirmed|length < 2 }} for a class or attribute: without the "
        "latent, its images lose more than others.{% if correlating %} "
        "{{ correlating|length }} only correlate{{ 's' if correlating|length == 1 }} "
        "with one.{% endif %}{% if rest %} {{ rest }} stand{{ 's' if rest == 1 }} for "
        "no single one.{% endif %}{% if confirmed %} **Latent {{ lead.latent }}** "
        "stands for **{{ lead.word }}**: without it, its images lose {{ effect|alone }} "
        "more log-odds than others.{% endif %}",
        lead.margin,
        given={
            "n": len(record.latents),
            "confirmed": confirmed,
            "correlating": correlating,
            "rest": len(record.latents) - len(confirmed) - len(correlating),
            "lead": lead,
        },
        headline=headline,
        kind="answer",
        evidence="intervened",
        p=lead.p,
        place="latents",
    )


def unknown(record: SaeRecord) -> Iterator[str]:
    """Yield what the report does not show."""
    yield from note_sentences(record.notes)
    for row in record.setup:
        if row.left_out:
            yield say(
                "{{ row.left_out|percent(1) }} of the patch tokens have an exceptional "
                "norm and were left out.",
                row=row,
            )
        yield say("Monosemanticity is judged by {{ row.encoder }}.", row=row)
    yield "A latent need not be a unit of the model: another training finds other directions."


def _panels(record: SaeRecord) -> Iterator[ImagePanel]:
    """Yield the latents with their images, for a page that can search them."""
    row_of_latent = {row.latent: row for row in record.latents}
    for latent, indices in _exemplars_by_latent(record).items():
        row = row_of_latent.get(latent)
        tags = Tags()
        if row is not None:
            tags = Tags(outcome=row.state, class_name=row.word or "")
        captions = [_caption(record.exemplars[index]) for index in indices]
        yield ImagePanel(
            _title(latent, row),
            tuple(captions),
            partial(_pixels, record, indices),  # drawn when the page is written
            tags,
        )


def _exemplars_by_latent(record: SaeRecord) -> dict[int, list[int]]:
    """Return the exemplars of each latent as indices of rows; latents in the gallery's order."""
    indices: dict[int, list[int]] = {}
    for index, row in enumerate(record.exemplars):
        indices.setdefault(row.latent, []).append(index)
    return indices


def _title(latent: int, row: LatentRow | None) -> str:
    if row is None:
        return say("Latent {{ latent }}", latent=latent)
    return say(
        "Latent {{ row.latent }}: {{ row.word or 'no single class' }} ({{ row.state }}); active in "
        "{{ row.images|percent }} of the images{% if row.effect %}; log-odds lost without it "
        "{{ row.effect|value }}{% endif %}{% if row.pushes %}; pushes "
        "{{ row.pushes|join(', ') }}{% endif %}",
        row=row,
    )


def _caption(row: ExemplarRow) -> str:
    return say("{{ row.label or row.image }}: {{ row.value|number }}", row=row)


def _picture(record: SaeRecord, index: int, *, row: str = "", column: str = "") -> Picture:
    """Return the picture of an exemplar with its map.

    index: the index of the exemplar.
    row, column: the place in a figure.
    """
    drawn = record.gallery[record.aliases[0]]
    exemplar = record.exemplars[index]
    return Picture(
        drawn.images[index] / np.float32(255),
        drawn.maps[index],
        row=row,
        column=column,
        below=exemplar.label or "",
        signed=True,
    )


def _pixels(record: SaeRecord, indices: list[int]) -> tuple[NDArray[np.uint8], ...]:
    return tuple(pixels(_picture(record, index)) for index in indices)


def _leading_pictures(record: SaeRecord) -> Iterator[Picture]:
    """Yield the images of the latents with the largest effects, a row for each."""
    if not record.gallery:
        return
    words = {row.latent: row.word for row in record.latents}
    exemplars_of_latents = list(_exemplars_by_latent(record).items())
    for latent, indices in exemplars_of_latents[:LEADING]:
        name = f"latent {latent}"
        if words.get(latent):
            name += f"\n{words[latent]}"
        for rank, index in enumerate(indices[:_IMAGES_A_ROW]):
            yield _picture(record, index, row=name, column=f"{rank + 1}")


def _largest_effects(record: SaeRecord) -> list[LatentRow]:
    rows = [row for row in record.latents if row.effect is not None]
    return rows[:_MOST_DRAWN]


def _exemplars_without_tests(record: SaeRecord) -> list[ExemplarRow]:
    """Return the images of latents if there are no labels, without which none is tested."""
    return [] if record.latents else list(record.exemplars)


REPORT: Final = Report(
    SaeRecord,
    claims=claims,
    unknown=unknown,
    picture=Chart(
        "exemplars",
        images(largest=0.6),
        "Images of {% if record.latents %}the latents with the largest effects{% else %}latents "
        "that were not tested{% endif %}, from the largest activation to the smallest, with what "
        "the pixels of each patch add to it.",
        title="Images of {% if record.latents %}the latents that matter most{% else %}latents that "
        "were not tested{% endif %}",
        rows=_leading_pictures,
    ),
    glance=Overview(
        "dictionaries",
        ("dictionary", "l0", "variance", "dead", "recovered_loss", "monosemanticity"),
    ),
    sections=(
        Section(
            "How well does it reconstruct the layer?",
            "dictionaries",
            says="{{ dictionary }}: {{ variance|value }} of the variance with {{ l0|value }} "
            "latents in a token.",
            columns=("dictionary", "latents", "accuracy", "recovered_accuracy", "stability"),
            charts=(
                Chart(
                    "dictionaries",
                    intervals("dictionary", "variance"),
                    "Explained variance on held-out images, with 95 % intervals: the dictionary "
                    "and its baselines.",
                    title="Explained variance",
                ),
            ),
        ),
        Section(
            "What do its latents stand for?",
            "latents",
            columns=("latent", "word", "state", "auc", "effect", "margin"),
            charts=(
                Chart(
                    "latents",
                    intervals("latent", "effect"),
                    "Log-odds of the label lost without each latent, in the images where it is "
                    "active, with 95 % intervals.",
                    title="Log-odds lost without a latent",
                    rows=_largest_effects,
                ),
            ),
            panels=_panels,
        ),
        Section(
            "What do they look like?",
            _exemplars_without_tests,
            columns=("latent", "rank", "image", "value"),
            panels=_panels,
        ),
        Section(
            "Which latents matter most for a class?",
            # the first latent of each class, then the second of each
            lambda record: sorted(record.classes, key=lambda row: row.rank),
            opening="The ten latents with the largest estimated effects on the images of a "
            "class, by the gradient; not all of them were removed.",
            columns=("name", "rank", "latent", "effect"),
        ),
        Section(
            "Of which tokens is it made?",
            "setup",
            says="{{ place }} of {{ model }}: {{ latents }} latents for {{ dim }} components. "
            "{% if trained %}Trained on {{ tokens }} patch tokens of {{ images }} images, "
            "{{ seen }} with repetitions.{% else %}Read from a file.{% endif %}",
            columns=("place", "latents", "k", "kind", "left_out", "prefix"),
        ),
    ),
)
