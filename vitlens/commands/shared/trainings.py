"""How compared models were trained, and the differences as sentences of a report; free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ArraysOf, Record, TableOf, UntrustedName
from vitlens.report.document import Sentence
from vitlens.report.numbers import in_words
from vitlens.report.prose import Marked, listed, say


@dataclass(frozen=True)
class Budget:
    """How a model was trained; None: not known.

    start: "random weights" or the model whose weights it began with; data: the name or folder of its images; images:
    how many; epochs: passes over them; steps: of the optimiser; batch_size: images a step; augmentation: in words;
    seed; teacher: the model it was distilled from ("none").
    """

    model: str
    start: UntrustedName | None = None
    data: UntrustedName | None = None
    images: int | None = None
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    augmentation: str | None = None
    seed: int | None = None
    teacher: UntrustedName | None = None

    @property
    def known(self) -> bool:
        """Whether anything but the name is known."""
        return any(value is not None for name, value in asdict(self).items() if name != "model")


@dataclass(frozen=True)
class Difference:
    """One thing in which trainings differ, and what it was for each model, in the models' order."""

    what: str
    values: tuple[str | int, ...]


@dataclass(frozen=True)
class TrainingImages:
    """numbers: of the images that a model was trained on, by their content (see run/unseen.py), sorted."""

    numbers: Annotated[NDArray[np.uint64], Form("u", (None,))]


TRAINING: Final = TableOf("training", Budget)
TRAINING_IMAGES: Final = ArraysOf("training_images", TrainingImages)


def differences(budgets: Sequence[Budget]) -> tuple[Difference, ...]:
    """The fields in which the trainings differ, of those known of all of them."""
    differing = []
    for field in fields(Budget):
        values = [getattr(budget, field.name) for budget in budgets]
        if field.name != "model" and None not in values and len(set(values)) > 1:
            differing.append(Difference(field.name, tuple(values)))
    return tuple(differing)


def trained(budgets: Sequence[Budget]) -> Iterator[str]:
    """That models were trained differently, or that one training is not known, where that is so."""
    differing, strange = differences(budgets), [budget.model for budget in budgets if not budget.known]
    if differing:
        parts = [
            say("{{ what }} {{ values }}", what=Marked(each.what.replace("_", " ")),
                values=listed([say("{{ v }} ({{ m }})", v=v, m=b.model) for v, b in zip(each.values, budgets)]))
            for each in differing
        ]  # fmt: skip
        yield (
            f"The models were trained differently: {'; '.join(parts)}. A difference between them can come from this as "
            "well as from their architectures."
        )
    if strange and len(budgets) > 1:
        yield say(
            "How {{ names|names }} {{ 'was' if names|length == 1 else 'were' }} trained is not known here, so "
            "trainings may differ as much as architectures.", names=strange,
        )  # fmt: skip


def training_sentences(record: Record) -> Iterator[Sentence]:
    """A warning where the models of a run were trained differently, or where one training is not known."""
    yield from budget_sentences(record.rows(TRAINING))


def budget_sentences(budgets: Sequence[Budget]) -> Iterator[Sentence]:
    """The same for any budgets."""
    names, differing = [budget.model for budget in budgets], differences(budgets)
    if differing:
        listed = "; ".join(
            f"{difference.what.replace('_', ' ')} "
            + ", ".join(f"{in_words(value)} ({name})" for name, value in zip(names, difference.values))
            for difference in differing
        )
        yield Sentence(
            f"**{' and '.join(names)} were trained differently**: {listed}. A difference between them can come "
            "from this as well as from their architectures.",
            tuple(budgets),
        )
    unknown = [budget.model for budget in budgets if not budget.known]
    if unknown and len(unknown) < len(budgets):
        yield Sentence(
            f"How {' and '.join(unknown)} was trained is not known here, so the trainings may differ as much as the "
            "architectures.",
            tuple(budgets),
        )
