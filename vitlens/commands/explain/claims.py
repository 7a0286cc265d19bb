"""The claims of `vitlens explain`: which method was chosen, which map you can trust; and what could
overturn them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from vitlens.commands.explain.options import ALL
from vitlens.commands.explain.record import ChoiceRow, ExplainRecord
from vitlens.commands.shared.explorer import without_explorer
from vitlens.commands.shared.maps.record import REPLACED, JudgedMap, judged_maps
from vitlens.commands.shared.maps.report import map_claims, uniform_claim
from vitlens.commands.shared.methods import notes_of
from vitlens.record import by
from vitlens.report.claims import FEWEST, Claim, few_images, found, unjudged
from vitlens.report.prose import Marked, say
from vitlens.uncertainty import Estimate

# titles of the data sets on which the method `best` was tuned: see benchmarks/best_map.md
_TUNED_ON: Final = ("Digits in scenes", "coco_masks")
_VERBS: Final = {"confirmed": "confirm", "contradicted": "contradict"}
_UNUSABLE: Final = 2  # methods with unusable maps that are named


def verdicts_of(record: ExplainRecord) -> dict[str, tuple[JudgedMap, ...]]:
    """Return the verdicts on the methods of each model, the best first.

    For fewer than FEWEST images every verdict is "inconclusive".
    """
    verdicts = {}
    for alias, rows in by(record.checks, "model").items():
        verdicts[alias] = judged_maps(rows)
        if record.images < FEWEST:
            verdicts[alias] = tuple(map(_without_judgement, verdicts[alias]))
    return verdicts


def _without_judgement(verdict: JudgedMap) -> JudgedMap:
    """Return the scores of a method without a verdict, which too few images cannot give."""
    return replace(verdict, state="inconclusive", fault="")


def claims(record: ExplainRecord) -> Iterator[Claim]:
    """Yield which method was chosen, which map you can trust, and what speaks against the other
    maps.
    """
    for row in record.chosen:
        yield _choice(record, row)
    checks = by(record.checks, "model")
    methods = by(record.methods, "model")
    for alias in record.aliases:
        yield from map_claims(alias, checks.get(alias, ()), images=record.images, place="checks")
        if alias not in checks and not record.options.get("verify"):
            yield unjudged("maps", alias, "no check was run; add --verify", state="not tested")
        unusable = {row.method: row.constant + row.not_finite for row in methods.get(alias, ())}
        yield from uniform_claim(alias, unusable, record.images, is_title=True)


def _choice(record: ExplainRecord, row: ChoiceRow) -> Claim:
    """Return the claim about the chosen method, with the result on the other half of the images."""
    values: dict[str, Any] = {
        "row": row,
        "verb": _VERBS.get(row.confirmation or "", "do not confirm"),
    }
    if row.reason:
        return found(
            "choice",
            row.model,
            "**{{ row.method }}** is the default method of **{{ row.model }}**, not chosen by "
            "evidence: {{ row.reason|whole }}.",
            given=values,
            kind="answer",
        )
    return found(
        "choice",
        row.model,
        "**{{ row.method }}** is chosen for **{{ row.model }}**: it has the highest score of "
        "{{ row.candidates|length }} methods on {{ row.selection }} images, and in "
        "{{ row.certainty|value }} of {{ row.draws }} bootstrap samples of them{% if effect %}; "
        "the other {{ row.report }} images {{ verb }} it: its score minus that of "
        "{{ row.runner_up }} is {{ effect|alone }}{% endif %}{% if row.alike %}; "
        "{{ row.alike|names }} give the same maps{% endif %}.",
        _lead(record, row),
        headline="{{ row.method }} is chosen for {{ row.model }}{% if effect %}; other images "
        "{{ verb }} it{% endif %}",
        given=values,
        evidence="intervened",
        place="choice",
        kind="answer",
    )


def _lead(record: ExplainRecord, row: ChoiceRow) -> Estimate | None:
    """Return the score of the chosen method minus that of the runner-up; None without one."""
    lead_over_runner_up = (row.model, "score", row.runner_up)
    for margin in record.choice_margins:
        if (margin.model, margin.check, margin.against) == lead_over_runner_up:
            return margin.difference
    return None


# sections that are left out where there are fewer than FEWEST images, by table
OF_MANY: Final[Mapping[str, str]] = {
    "league": "the comparison of methods",
    "agreement": "the agreement of methods",
    "orders": "the patches whose removal changes the prediction (counterfactuals)",
}


def _not_shown(record: ExplainRecord) -> Iterator[str]:
    """Yield what was measured on too few images to be shown, and the tables that have it."""
    names = [name for name in OF_MANY if getattr(record, name)]  # tables with rows
    if names and record.images < FEWEST:
        yield say(
            "Measured, but not shown for fewer than {{ few }} images: {{ what }}. The numbers are "
            "in {{ files }}.",
            few=FEWEST,
            what=Marked(", ".join(OF_MANY[name] for name in names)),
            files=Marked(", ".join(f"`tables/{name}.csv`" for name in names)),
        )


def unknown(record: ExplainRecord) -> Iterator[str]:
    """Yield what could overturn the verdicts, the most serious first."""
    if not record.checks:
        yield (
            "No map was checked: a map that looks right may be that of any model. `--verify` "
            "checks them."
        )
    yield from few_images(record.images)
    yield from _of_phrases(record)
    yield from _not_shown(record)
    yield from _fixed_maps(record)
    yield from _unusable_maps(record)
    yield from _tuned_on_these_images(record)
    yield from _changed_rankings(record)
    yield from _missed_differences(record)
    yield from _omissions(record)
    yield from _scaled_maps(record)
    for note in notes_of(row.method for row in record.methods):
        yield f"{note[:1].upper()}{note[1:]}."
    if record.stages:
        yield (
            "Images of another kind, and classes other than those explained here, may have "
            "another best map."
        )
        yield (
            "A map that changes with the weights need not be right: randomisation is necessary, "
            "not sufficient."
        )
    yield from without_explorer(record.explorer)


def _of_phrases(record: ExplainRecord) -> Iterator[str]:
    """Yield the limits of maps of phrases."""
    rows = [row for row in record.shown if row.similarity is not None]
    if not rows:
        return
    yield (
        "A map explains the similarity to its phrase, whether or not an image shows that; a mask "
        "marks the object of the image."
    )
    if any(row.target_probability is None for row in rows):
        yield (
            "With one phrase there is no probability: patches are removed to see how far the "
            "similarity falls, and no prediction can change. A second `--text` gives both."
        )


def _fixed_maps(record: ExplainRecord) -> Iterator[str]:
    """Yield what cannot be known of maps of files."""
    fixed = [row.method for row in record.methods if row.matched]
    if fixed and record.checks:
        yield say(
            "The maps of {{ names|names }} are fixed. Whether they depend on the weights, or jump "
            "when images are shifted, cannot be tested; `vitlens.verify` tests a function.",
            names=fixed,
        )
    by_order = [row.source for row in record.methods if row.matched == "order"]
    if by_order:
        yield say(
            "{{ names|names }} {{ names|are }} without names of images: the maps were matched by "
            "order.",
            names=by_order,
        )


def _scaled_maps(record: ExplainRecord) -> Iterator[str]:
    """Yield a note about maps that a library scales one by one."""
    if any(row.method.startswith("grad-cam:") for row in record.methods):
        yield (
            "In maps of the library grad-cam, negative values are 0, and each map has its own "
            "scale."
        )


def _unusable_maps(record: ExplainRecord) -> Iterator[str]:
    """Yield the first methods with uniform maps, or maps that are not finite."""
    sentences = []
    for row in record.methods:
        unusable = row.constant + row.not_finite
        if unusable:
            sentence = say(
                "{{ n }} of {{ row.maps }} maps of {{ row.method }} of {{ row.model }} "
                "{{ n|are }} uniform or not finite: nothing is drawn.",
                row=row,
                n=unusable,
            )
            sentences.append(sentence)
    yield from sentences[:_UNUSABLE]


def _tuned_on_these_images(record: ExplainRecord) -> Iterator[str]:
    """Yield a note if the method `best` was tuned on these images."""
    names = {row.method for row in record.methods}
    for row in record.chosen:
        names.update(row.candidates)
    data = record.config.data
    if data is not None and data.title in _TUNED_ON and "best" in names:
        yield say(
            "The settings of best were chosen on {{ title }}: a lead of best is optimistic here.",
            title=data.title,
        )


def _changed_rankings(record: ExplainRecord) -> Iterator[str]:
    """Yield, for each model, the two methods that change places most clearly between two
    replacements.
    """
    for alias, rows in by(record.swapped, "model").items():
        clearest = max(rows, key=lambda row: min(row.in_first.value, -row.in_second.value))
        yield say(
            "The ranking for {{ alias }} depends on the replacement of removed patches: "
            "{{ row.better }} is above {{ row.worse }} with patches {{ first }}, but "
            "below it with patches {{ second }}.",
            alias=alias,
            row=clearest,
            first=REPLACED[clearest.first],
            second=REPLACED[clearest.second],
        )


def _missed_differences(record: ExplainRecord) -> Iterator[str]:
    """Yield the difference of removal scores that is too small to be detected."""
    for row in record.power:
        if row.check in ("road", "gap"):
            yield say(
                "{% if row.detectable %}A true difference of the removal scores of two methods "
                "below {{ row.detectable.value|number }} is{% else %}Any difference of removal "
                "scores is{% endif %} likely missed with {{ n }} images.",
                row=row,
                n=record.images,
            )
            return


def _omissions(record: ExplainRecord) -> Iterator[str]:
    """Yield methods that are not defined for a model, models without a classifier, and checks left
    out of a choice.
    """
    methods = by(record.methods, "model")
    images = by(record.shown, "model")
    chosen = by(record.chosen, "model")
    for alias in record.aliases:
        defined = {row.method for row in methods.get(alias, ())}
        for row in chosen.get(alias, ()):
            defined.update(row.candidates)
        requested = record.options.get("method", ())
        missing = [name for name in requested if name not in {*defined, ALL}]
        if all(row.target is None for row in images.get(alias, ())):
            yield say(
                "{{ alias }} has no classifier: methods that explain a class are left out.",
                alias=alias,
            )
        elif missing:
            yield say(
                "{{ names|names }} {{ names|are }} not defined for {{ alias }}.",
                names=missing,
                alias=alias,
            )
    for row in record.chosen:
        for check, reason in row.left_out.items():
            yield say(
                "The choice for {{ row.model }} was not judged by {{ check }}: {{ why|whole }}.",
                row=row,
                check=check,
                why=reason,
            )
