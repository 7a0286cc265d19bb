"""Distillation: its objective, and the student compared with its teacher."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations

from jaxtyping import Bool
from torch import Tensor

from vitlens.analysis.answers.classes import match_classes
from vitlens.analysis.answers.evaluate import Evaluation, accuracy, evaluate
from vitlens.analysis.answers.pairs import pairs
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.shared.budgets import budget_of, budget_of_run
from vitlens.commands.shared.pairs import PAIRS, PairRow
from vitlens.commands.train.measure.start import Start
from vitlens.commands.train.options import TeacherOptions
from vitlens.commands.train.record import (
    ACCURACY,
    AGREEMENT,
    DIFFERENCE,
    DISTILLATION,
    STUDENT_AND_TEACHER,
    TRAININGS,
    DistillationRow,
    StudentTeacherRow,
)
from vitlens.data.catalogue import load_data
from vitlens.data.split import Split
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.training.distill import (
    TEMPERATURE,
    WEIGHTS,
    CachedTeacher,
    Distillation,
    DistillationObjective,
    Student,
    Teacher,
    cacheable_views,
    has_distillation_token,
)
from vitlens.training.speed import choose
from vitlens.uncertainty import Estimate, accuracy_difference


@dataclass(frozen=True)
class DistillationSetup:
    """The teacher and the objective of a distillation.

    teacher: the model; objective: of the student; plain: a model to compare with, or None; forms: how many versions
    of each training image the teacher's outputs are computed on, once (0: computed on the student's images in every
    step).
    """

    teacher: Model
    objective: DistillationObjective
    plain: Model | None
    forms: int


def distillation_of(
    teaching: TeacherOptions, start: Start, run: RunOptions, *, code_files: tuple[str, ...]
) -> DistillationSetup | None:
    """The distillation of the options, or None without a teacher; code_files: see `load`.

    Raises InputError where the teacher, or the model to compare with, has other classes than the student.
    """
    if teaching.teacher is None:
        return None
    student = start.model
    how = _completed(teaching, has_token=has_distillation_token(student))
    Student(student, token=how.token)  # refuses a token that the student does not have
    model = load(teaching.teacher, device=student.device, code_files=code_files)
    precision = choose(student.device, precision=run.precision, compiling="off", steps=1).precision
    teacher = Teacher(model, classes=student.classes, precision=precision)
    plain = None if teaching.beside is None else load(teaching.beside, device=student.device, code_files=code_files)
    if plain is not None:
        plain.require_classifier()
        match_classes(plain.classes, student.classes)
    identity = {**asdict(how), "teacher": teacher.identity()}
    forms = cacheable_views(start.recipe, start.train)
    objective = DistillationObjective(CachedTeacher(teacher) if forms else teacher, how, identity=identity)
    return DistillationSetup(model, objective, plain, forms)


def _completed(teaching: TeacherOptions, *, has_token: bool) -> Distillation:
    """The distillation with all its settings; has_token: whether the student has a distillation token.

    Raises InputError for a number out of range.
    """
    kind = teaching.kind or "hard"
    weight = WEIGHTS[kind] if teaching.weight is None else teaching.weight
    temperature = TEMPERATURE if teaching.temperature is None else teaching.temperature
    return Distillation(kind, weight, temperature, has_token if teaching.token is None else teaching.token)


def compute_teacher_outputs(distillation: DistillationSetup | None, train: Split, *, quiet: bool) -> None:
    """Compute the teacher's outputs on the training images, where they are computed once."""
    if distillation is None or not isinstance(distillation.objective.teacher, CachedTeacher):
        return
    count, device = distillation.forms * len(train), distillation.teacher.device
    with progress(f"{distillation.teacher.alias}: outputs on each image, once", count, quiet=quiet) as advance:
        distillation.objective.teacher.remember(train, mirrored=distillation.forms == 2, device=device, advance=advance)


def other_models(distillation: DistillationSetup | None) -> tuple[Model, ...]:
    """The models of the run other than the student."""
    if distillation is None:
        return ()
    return (distillation.teacher,) if distillation.plain is None else (distillation.teacher, distillation.plain)


def predictions_of(model: Model, data: str, run: RunOptions) -> Evaluation:
    """A model's predictions on the test part of the data, preprocessed for it."""
    split = load_data(data, part="test", preprocessing=model.preprocessing, data_dir=run.data_dir, seed=run.seed)
    return evaluate(model, split.limit(run.limit, seed=run.seed), batch_size=run.batch_size)


def write_distillation(
    folder: RunFolder, distillation: DistillationSetup, student: Evaluation, data: str, run: RunOptions
) -> None:
    """Write the settings, and the student compared with its teacher and the model trained without one."""
    how = distillation.objective.how
    row = DistillationRow(
        distillation.teacher.alias, how.kind, how.weight, how.temperature, how.token, distillation.forms
    )
    folder.write(DISTILLATION, [row])
    compared = [("student", student), ("teacher", predictions_of(distillation.teacher, data, run))]
    if distillation.plain is not None:
        compared.append(("plain", predictions_of(distillation.plain, data, run)))
    aliases = [answers.alias for _, answers in compared]
    named = [
        (role, replace(answers, alias=f"{answers.alias}-{role}") if aliases.count(answers.alias) > 1 else answers)
        for role, answers in compared
    ]
    folder.write(STUDENT_AND_TEACHER, _student_teacher_rows(folder, named, seed=run.seed))
    folder.write(PAIRS, [PairRow(**asdict(pair)) for pair in pairs([answers for _, answers in named])])
    for (_, first), (_, second) in combinations(named, 2):
        gap = accuracy_difference(first.correct, second.correct, groups=first.groups, seed=run.seed)
        folder.metric(DIFFERENCE(first=first.alias, second=second.alias), gap)
    if distillation.plain is not None:
        roles = {role: answers.alias for role, answers in named}
        plain = replace(budget_of(distillation.plain), model=roles["plain"])
        folder.write(TRAININGS, [budget_of_run(roles["student"], folder.record()), plain])


def _student_teacher_rows(
    folder: RunFolder, named: Sequence[tuple[str, Evaluation]], *, seed: int
) -> list[StudentTeacherRow]:
    """The accuracy of each model and its agreement with the teacher, as rows and metrics."""
    teacher = next(answers for role, answers in named if role == "teacher")
    rows = []
    for role, answers in named:
        correct, same = accuracy(answers.correct, groups=answers.groups, seed=seed), Estimate(1.0)
        folder.metric(ACCURACY(model=answers.alias), correct)
        if role != "teacher":
            same = accuracy(_same_class(answers, teacher), groups=answers.groups, seed=seed)
            folder.metric(AGREEMENT(model=answers.alias), same)
        agreement = (None, None, None) if role == "teacher" else (same.value, same.low, same.high)
        count = len(answers.labels)
        rows.append(StudentTeacherRow(answers.alias, role, count, correct.value, correct.low, correct.high, *agreement))
    return rows


def _same_class(first: Evaluation, second: Evaluation) -> Bool[Tensor, " batch"]:
    """Whether both predict the same class; the data's classes come first in both, in the same order."""
    same: Tensor = first.predictions == second.predictions
    return same
