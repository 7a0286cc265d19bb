"""The section on a distillation: the student compared with its teacher, and with the same model trained without one."""

from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.shared.pairs import PAIRS, pair_table
from vitlens.commands.train.record import DISTILLATION, STUDENT_AND_TEACHER, DistillationRow, StudentTeacherRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROLES: Final = {"student": "the student", "teacher": "its teacher", "plain": "without a teacher"}
_PAIRED: Final = (
    "p is McNemar's exact test on the images that only one of the two predicts correctly; p_holm corrects it for the "
    "number of pairs. The test compares these trained weights; another seed gives other weights."
)


def distillation_section(record: Record) -> Section:
    """The accuracies, the agreement with the teacher, and the paired tests."""
    figure = FigureSpec(
        "beside",
        "Accuracy of each model on the same test images, and its agreement with the teacher's predictions, correct or "
        "not. Overlapping intervals do not show that two models are equal: the paired test below has more power.",
        partial(_draw, record),
    )
    pairs = record.rows(PAIRS)
    sentences = (
        *(_accuracy(row) for row in record.rows(STUDENT_AND_TEACHER)),
        *(_settings(row) for row in record.rows(DISTILLATION)),
        Sentence(_PAIRED, says="method"),
    )
    return Section("Student and teacher", sentences, (pair_table(pairs),), (figure,), leading=True)


def _settings(row: DistillationRow) -> Sentence:
    """The settings of the distillation."""
    head = "through a distillation token with its own head" if row.token else "through the head of the labels"
    target = (
        "the teacher's prediction as a second label"
        if row.kind == "hard"
        else f"the teacher's probabilities at temperature {row.temperature:g}"
    )
    once = {1: "each training image", 2: "each training image and its mirror image"}
    seen = (
        f"The teacher's outputs on {once[row.forms]} were computed once and kept."
        if row.forms
        else "The teacher saw the same augmented images as the student, in every step."
    )
    return Sentence(
        f"`{row.teacher}` is the teacher: the student learns {target}, with weight {row.weight:g} in the loss, {head}. "
        f"{seen}",
        (row,),
    )


def _accuracy(row: StudentTeacherRow) -> Sentence:
    accuracy = in_words(Estimate(row.accuracy, row.low, row.high, row.n))
    agreement = ""
    if row.agreement is not None:
        same = in_words(Estimate(row.agreement, row.agreement_low, row.agreement_high))
        agreement = f"; agreement with the teacher's predictions {same}"
    return Sentence(f"`{row.model}` ({_ROLES[row.role]}): top-1 accuracy {accuracy}{agreement}.", (row,))


def _draw(record: Record) -> "Figure":
    from vitlens.figures.train.beside import Bar, side_by_side

    rows = record.rows(STUDENT_AND_TEACHER)
    accuracy = [
        Bar(row.model, _ROLES[row.role], row.accuracy, _end(row.low, row.accuracy), _end(row.high, row.accuracy))
        for row in rows
    ]
    agreement = [
        Bar(
            row.model,
            _ROLES[row.role],
            row.agreement,
            _end(row.agreement_low, row.agreement),
            _end(row.agreement_high, row.agreement),
        )
        for row in rows
        if row.agreement is not None
    ]
    return side_by_side(accuracy=accuracy, agreement=agreement, n=rows[0].n, title="Student and teacher")


def _end(end: float | None, value: float) -> float:
    """The end of an interval; the value where there is no interval."""
    return value if end is None else end
