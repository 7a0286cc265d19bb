"""A training with a teacher: who teaches and how, from what was typed; what the report says of it."""

from dataclasses import asdict, dataclass

from vitlens.analysis.answers.classes import match_classes
from vitlens.analysis.answers.evaluate import Evaluation
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.models.assembly import Overrides
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.runs.train_beside import Beside, answers_of, keep_beside
from vitlens.runs.train_options import Teaching
from vitlens.training.distill import (
    TEMPERATURE,
    WEIGHTS,
    Distillation,
    Distilled,
    Student,
    has_distillation_token,
)
from vitlens.training.recipe import Recipe
from vitlens.training.remembered import Remembered, forms_of
from vitlens.training.speed import choose
from vitlens.training.teacher import Teacher


def completed(teaching: Teaching, *, able: bool) -> Distillation:
    """The distillation with all its numbers; able: whether the student has a distillation token.

    Raises InputError for a number that cannot be.
    """
    kind = teaching.kind or "hard"
    weight = WEIGHTS[kind] if teaching.weight is None else teaching.weight
    temperature = TEMPERATURE if teaching.temperature is None else teaching.temperature
    return Distillation(kind, weight, temperature, able if teaching.token is None else teaching.token)


def shape_with_token(model: str, shape: Overrides, teaching: Teaching) -> Overrides:
    """A preset's shape with the token that its teacher speaks to; ViTs that read CLS have one unless asked not to."""
    able = model in VIT_PRESETS and shape.get("pooling", "cls") == "cls"
    wanted = teaching.teacher is not None and teaching.token is not False and able
    return {**shape, "distillation": True} if wanted else shape


@dataclass(frozen=True)
class Lesson:
    """A teacher at work.

    teacher: the model; objective: of the student; plain: a model to compare with, or None; forms: of each training
    image that the teacher looks at once and remembers (0: it looks at what the student sees in every step).
    """

    teacher: Model
    objective: Distilled
    plain: Model | None
    forms: int


def lesson_of(teaching: Teaching, student: Model, recipe: Recipe, train: Split, options: RunOptions) -> Lesson | None:
    """The lesson that was asked for, or None where there is no teacher.

    Raises InputError where teacher, or the model to compare with, knows other classes than the student.
    """
    if teaching.teacher is None:
        return None
    how = completed(teaching, able=has_distillation_token(student))
    Student(student, token=how.token)  # refuses a token that it has not
    model = load(teaching.teacher, device=student.device)
    precision = choose(student.device, precision=options.precision, compiling="off", steps=1).precision
    teacher = Teacher(model, classes=student.classes, precision=precision)
    plain = None if teaching.beside is None else load(teaching.beside, device=student.device)
    if plain is not None:
        plain.require_classifier()
        match_classes(plain.classes, student.classes)
    identity = {**asdict(how), "teacher": teacher.identity()}
    forms = forms_of(recipe, train)
    return Lesson(model, Distilled(Remembered(teacher) if forms else teacher, how, identity=identity), plain, forms)


def look_ahead(lesson: Lesson | None, train: Split, *, quiet: bool) -> None:
    """Let a teacher that remembers look at the training images."""
    if lesson is None or not isinstance(lesson.objective.teacher, Remembered):
        return
    count, device = lesson.forms * len(train), lesson.teacher.device
    with progress(f"{lesson.teacher.alias} looks at each image once", count, quiet=quiet) as advance:
        lesson.objective.teacher.look(train, mirrored=lesson.forms == 2, device=device, advance=advance)


def taking_part(lesson: Lesson | None) -> tuple[Model, ...]:
    """The models of a run besides the one that is trained."""
    if lesson is None:
        return ()
    return (lesson.teacher,) if lesson.plain is None else (lesson.teacher, lesson.plain)


def keep_lesson(folder: RunFolder, lesson: Lesson, student: Evaluation, data: str, options: RunOptions) -> None:
    """Write how it was taught, and the student beside its teacher and the one that had none."""
    others = [Beside("teacher", answers_of(lesson.teacher, data, options))]
    if lesson.plain is not None:
        others.append(Beside("plain", answers_of(lesson.plain, data, options)))
    keep_beside(folder, student, others, seed=options.seed)
    folder.table("taught", [{"how": taught_words(lesson)}])


def taught_words(lesson: Lesson) -> str:
    """How the student was taught, in words for the report."""
    how = lesson.objective.how
    learns = "by a token and head of its own" if how.token else "by the head that learns the labels too"
    what = (
        "the teacher's choice as a second label"
        if how.kind == "hard"
        else f"the teacher's probabilities at temperature {how.temperature:g}"
    )
    once = {1: "each training image", 2: "each training image and its mirror image"}
    when = (
        f"The teacher looked once at {once[lesson.forms]} and its answers were kept."
        if lesson.forms
        else "The teacher looked at the same augmented pixels as the student, in every step."
    )
    return f"`{lesson.teacher.alias}` taught it: {what}, {how.weight:g} of the loss, learned {learns}. {when}"
