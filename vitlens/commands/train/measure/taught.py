"""A training with a teacher: the objective that was asked for, and the student compared with its teacher."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from jaxtyping import Bool
from torch import Tensor

from vitlens.analysis.answers.classes import match_classes
from vitlens.analysis.answers.evaluate import Evaluation, accuracy, evaluate
from vitlens.analysis.answers.pairs import pairs
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.pairs import PAIRS, PairRow
from vitlens.commands.scaffold.progress import progress
from vitlens.commands.train.options import Teaching
from vitlens.commands.train.record import ACCURACY, AGREEMENT, BESIDE, TAUGHT, BesideRow, TaughtRow
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
from vitlens.training.recipe import Recipe
from vitlens.training.speed import choose
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Lesson:
    """A teacher at work.

    teacher: the model; objective: of the student; plain: a model to compare with, or None; forms: of each training
    image whose teacher's outputs are computed once and kept (0: anew for what the student sees in every step).
    """

    teacher: Model
    objective: DistillationObjective
    plain: Model | None
    forms: int


def lesson_of(teaching: Teaching, student: Model, recipe: Recipe, train: Split, run: RunOptions) -> Lesson | None:
    """The lesson that was asked for, or None where there is no teacher.

    Raises InputError where teacher, or the model to compare with, knows other classes than the student.
    """
    if teaching.teacher is None:
        return None
    how = _completed(teaching, able=has_distillation_token(student))
    Student(student, token=how.token)  # refuses a token that it has not
    model = load(teaching.teacher, device=student.device)
    precision = choose(student.device, precision=run.precision, compiling="off", steps=1).precision
    teacher = Teacher(model, classes=student.classes, precision=precision)
    plain = None if teaching.beside is None else load(teaching.beside, device=student.device)
    if plain is not None:
        plain.require_classifier()
        match_classes(plain.classes, student.classes)
    identity = {**asdict(how), "teacher": teacher.identity()}
    forms = cacheable_views(recipe, train)
    return Lesson(
        model, DistillationObjective(CachedTeacher(teacher) if forms else teacher, how, identity=identity), plain, forms
    )


def _completed(teaching: Teaching, *, able: bool) -> Distillation:
    """The distillation with all its numbers; able: whether the student has a distillation token.

    Raises InputError for a number that cannot be.
    """
    kind = teaching.kind or "hard"
    weight = WEIGHTS[kind] if teaching.weight is None else teaching.weight
    temperature = TEMPERATURE if teaching.temperature is None else teaching.temperature
    return Distillation(kind, weight, temperature, able if teaching.token is None else teaching.token)


def recall_images(lesson: Lesson | None, train: Split, *, quiet: bool) -> None:
    """Compute the teacher's outputs on the training images where they are kept."""
    if lesson is None or not isinstance(lesson.objective.teacher, CachedTeacher):
        return
    count, device = lesson.forms * len(train), lesson.teacher.device
    with progress(f"{lesson.teacher.alias}: outputs on each image, once", count, quiet=quiet) as advance:
        lesson.objective.teacher.remember(train, mirrored=lesson.forms == 2, device=device, advance=advance)


def taking_part(lesson: Lesson | None) -> tuple[Model, ...]:
    """The models of a run besides the one that is trained."""
    if lesson is None:
        return ()
    return (lesson.teacher,) if lesson.plain is None else (lesson.teacher, lesson.plain)


def predictions_of(model: Model, data: str, run: RunOptions) -> Evaluation:
    """What a model predicts on the test part of a training's data, read at its own size."""
    split = load_data(data, part="test", preprocessing=model.preprocessing, data_dir=run.data_dir, seed=run.seed)
    return evaluate(model, split.limit(run.limit, seed=run.seed), batch_size=run.batch_size)


def write_lesson(folder: RunFolder, lesson: Lesson, student: Evaluation, data: str, run: RunOptions) -> None:
    """Write how it was taught, and the student beside its teacher and the one that had none."""
    how = lesson.objective.how
    taught = TaughtRow(lesson.teacher.alias, how.kind, how.weight, how.temperature, how.token, lesson.forms)
    folder.write(TAUGHT, [taught])
    compared = [("student", student), ("teacher", predictions_of(lesson.teacher, data, run))]
    if lesson.plain is not None:
        compared.append(("plain", predictions_of(lesson.plain, data, run)))
    aliases = [one.alias for _, one in compared]
    named = [
        (role, replace(one, alias=f"{one.alias}-{role}" if aliases.count(one.alias) > 1 else one.alias))
        for role, one in compared
    ]
    folder.write(BESIDE, _beside_rows(folder, named, seed=run.seed))
    folder.write(PAIRS, [PairRow(**asdict(pair)) for pair in pairs([one for _, one in named])])


def _beside_rows(folder: RunFolder, named: Sequence[tuple[str, Evaluation]], *, seed: int) -> list[BesideRow]:
    """Accuracy of each, agreement with the teacher; metrics beside."""
    teacher = next(one for role, one in named if role == "teacher")
    rows = []
    for role, one in named:
        right, same = accuracy(one.correct, groups=one.groups, seed=seed), Estimate(1.0)
        folder.metric(ACCURACY(model=one.alias), right)
        if role != "teacher":
            same = accuracy(_same_class(one, teacher), groups=one.groups, seed=seed)
            folder.metric(AGREEMENT(model=one.alias), same)
        agreement = (None, None, None) if role == "teacher" else (same.value, same.low, same.high)
        rows.append(BesideRow(one.alias, role, len(one.labels), right.value, right.low, right.high, *agreement))
    return rows


def _same_class(one: Evaluation, other: Evaluation) -> Bool[Tensor, " batch"]:
    """Whether both predict the same class; the data's classes come first in both, in the same order."""
    same: Tensor = one.predictions == other.predictions
    return same
