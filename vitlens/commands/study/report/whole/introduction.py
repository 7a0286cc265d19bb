"""The introduction of a study, its limitations, and its glossary."""

from collections.abc import Iterator
from typing import Final

from vitlens.commands.explain.conclusions import checks_of
from vitlens.commands.explain.record import LEAGUE
from vitlens.commands.run.describe import data_sentences
from vitlens.commands.shared.trainings import TRAINING, differences
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.report.document import Section, Sentence
from vitlens.report.glossary import GLOSSARY
from vitlens.report.numbers import in_words

_MOST: Final = 5  # limitations
_TERMS: Final = (
    "ablation", "attention weights", "calibration error (ECE)", "CKA", "CLS token", "deletion", "insertion", "epsilon",
    "GradCAM", "k-NN", "linear probe", "pointing game", "randomisation check", "relevance", "ROAD score",
    "robust accuracy", "rollout", "sink",
)  # fmt: skip


def introduction(study: Study) -> Section:
    """The models, the data and the questions."""
    sentences: list[Sentence] = []
    models = {model.alias: model for chapter in study.chapters for model in chapter.record.models}
    for alias, model in models.items():
        budget = next((row for row in study.record.rows(TRAINING) if row.model == alias), None)
        trained = "" if budget is None or budget.epochs is None else f", trained for {budget.epochs} epochs"
        rows = tuple(row for row in (model, budget) if row is not None)
        family = "vision transformer" if alias in study.vits else {"cnn": "CNN"}.get(model.family, model.family)
        sentences.append(Sentence(f"`{alias}`: a {family}, {model.parameters:,} parameters{trained}.", rows))
    chapter = next(study.of("evaluate"), None) or next(iter(study.chapters), None)
    if chapter is not None:
        sentences += data_sentences(chapter.record)
    asked = (
        "The questions: how good are the models and which is better; where does attention go and how does it develop; "
        "which heads matter and what do they do; which map can be trusted; why do the models fail and how do they "
        "break; what do their features know; what do they cost; which model for which need."
    )
    return Section("Introduction", (*sentences, Sentence(asked, says="setting")), leading=True)


def glossary() -> Section:
    """The terms of the report."""
    terms = (GLOSSARY[name] for name in _TERMS)
    return Section(
        "Glossary",
        tuple(Sentence(f"**{term.name}**: {term.sentence}.", says="setting") for term in terms),
        leading=True,
    )


def limits(study: Study) -> Iterator[Sentence]:
    """What could overturn the findings, the gravest first, at most five."""
    own = list(_own_limits(study))
    yield from own[:_MOST]
    seen = {sentence.text for sentence in own}
    room = _MOST - len(own)
    for chapter in (chapter for word in ("ablate", "compare", "stats", "features") for chapter in study.of(word)):
        for sentence in chapter.document.limits[:1]:
            if room > 0 and sentence.text not in seen:
                room -= 1
                yield sentence


def _own_limits(study: Study) -> Iterator[Sentence]:
    budgets = study.record.rows(TRAINING)
    trained = [budget for budget in budgets if budget.epochs]
    if trained:
        names = " and ".join(budget.model for budget in trained)
        yield Sentence(
            f"**One training each.** {names} were trained once; intervals cover the choice of images, not the seed of "
            "the training, which alone can move accuracies by points. `vitlens study --kind architecture` trains "
            "several seeds.",
            tuple(trained),
        )
    differing = differences(budgets)
    if differing:
        what = " and ".join(difference.what.replace("_", " ") for difference in differing)
        yield Sentence(
            f"**Unequal training.** The models differ in {what}, so no difference between them is due to their "
            "architectures alone.",
            tuple(differing),
        )
    attack = next(study.of("attack"), None)
    rows = () if attack is None else attack.record.curves
    if rows:
        titles = ", ".join(dict.fromkeys(row.title for row in rows))
        yield Sentence(
            f"**Attacks.** Robustness was tested on {rows[0].accuracy.n} images with {titles}; stronger attacks "
            "(`--attack auto`) can only lower these accuracies.",
            rows,
        )
    explain = next(study.of("explain"), None)
    league = () if explain is None else explain.record.rows(LEAGUE)
    if explain is not None and league:
        check = checks_of(explain.record, league[0].model)[0]
        yield Sentence(
            f"**Maps.** Which map is most faithful was measured by removing patches from a part of the images "
            f"({check.method}: {check.judged_by} {in_words(check.estimate)}); other images, or another way to remove "
            "patches, can change the order.",
            (check, check.estimate),
        )
