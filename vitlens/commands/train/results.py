"""The results of a training on the test images, as a record.

`training_results` is for a training with labels, with the comparisons of a distillation;
`pretraining_results` for a training without labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from vitlens.analysis.evaluation.evaluate import (
    Evaluation,
    accuracy,
    confusion_rows,
    evaluate,
    per_class,
)
from vitlens.commands.shared.comparison import PairRow, in_pairs
from vitlens.commands.train.record import (
    DistillationRow,
    FeatureRow,
    FineTunedRow,
    PretrainingRow,
    ReconstructionArrays,
    ScoreRow,
    SettingRow,
    TrainRecord,
    last_tenth,
)
from vitlens.commands.train.start import Start, base_recipe, part_of
from vitlens.data.split import Split
from vitlens.training.distill import Distillation, cacheable_views
from vitlens.training.finetune import trained_share
from vitlens.training.metrics import EpochMetrics, TrainingResult
from vitlens.training.objectives.pretraining import BANK, MAPS, NEIGHBOURS, QUERIES, Pretraining
from vitlens.uncertainty import Estimate, bootstrap_mean, difference_of, wilson

_RECONSTRUCTED: Final = 6  # test images in a picture
# of the models that a student is compared with, in the order of `Start.compared`
_ROLES: Final = ("teacher", "without a teacher")


def training_results(start: Start, result: TrainingResult) -> TrainRecord:
    """Return the accuracy of the trained model on the test images, as a whole and by class."""
    evaluation = evaluate(start.model, start.test, batch_size=start.run.batch_size)
    recipe = start.recipe
    record = TrainRecord(
        scores=(_score_of(evaluation, start, result),),
        history=result.history,
        per_class=tuple(per_class(evaluation, count=len(start.test.classes))),
        confusion=tuple(confusion_rows(evaluation)),
        recipe=_setting_rows(start, {**recipe.numbers(), "source": recipe.source}),
        started=() if start.options.fresh else (_fine_tuned(start),),
    )
    if start.objective is None:
        return record
    return _with_distillation(record, evaluation, start.objective.how, start)


def _score_of(evaluation: Evaluation, start: Start, result: TrainingResult) -> ScoreRow:
    """Return the trained model's accuracy with what the epochs say of overfitting and
    convergence."""
    recipe = start.recipe
    score = _score(evaluation)
    groups = None if evaluation.groups is None else evaluation.groups.numpy()
    confidence = bootstrap_mean(
        evaluation.confidence.double().numpy(),
        groups=groups,
        seed=start.run.seed,
        least=0.0,
        most=1.0,
    )
    gap = None
    mixes_images = recipe.mixup or recipe.cutmix
    if not mixes_images:  # accuracy on mixed images is not that on images of one class
        gap = generalisation_gap(
            result.history,
            score.accuracy,
            images=len(start.train),
            sources=_sources(start.train),
        )
    best = None
    if result.best_accuracy is not None:
        best = Estimate(result.best_accuracy, n=len(start.test))
    return replace(
        score,
        gap=gap,
        gain=accuracy_gain(result.history, images=len(start.test), sources=_sources(start.test)),
        confidence=confidence,
        best=best,
        seconds=Estimate(result.seconds, unit="s"),
        images_per_second=Estimate(result.history[-1].images_per_second, unit="images/s"),
    )


def _score(
    evaluation: Evaluation, role: str | None = None, agreement: Estimate | None = None
) -> ScoreRow:
    top1 = accuracy(evaluation.correct, groups=evaluation.groups)
    return ScoreRow(evaluation.alias, accuracy=top1, role=role, agreement=agreement)


def _setting_rows(start: Start, numbers: Mapping[str, object]) -> tuple[SettingRow, ...]:
    """Return the settings of the recipe. Those that differ from the named recipe are the first."""
    unchanged = base_recipe(start.options).numbers()

    def is_unchanged(name: str) -> bool:
        return name not in unchanged or numbers[name] == unchanged[name]

    changed_first = sorted(numbers, key=is_unchanged)
    return tuple(SettingRow(name, str(numbers[name])) for name in changed_first)


def _fine_tuned(start: Start) -> FineTunedRow:
    """Return the model that is fine-tuned, and which part of it."""
    last_blocks = start.options.tuning.trained
    origin = start.model.provenance
    trained, parameters = trained_share(start.model, last=last_blocks)
    return FineTunedRow(
        model=Path(origin.name).name,
        weights=Path(origin.weights).name,
        last=last_blocks,
        trained=trained,
        parameters=parameters,
        notes="; ".join(origin.notes),
    )


def _sources(split: Split) -> int:
    """Return the number of independent images: of groups if several images show one source."""
    return len(split) if split.groups is None else len(split.groups.unique())


def generalisation_gap(
    history: Sequence[EpochMetrics], test_accuracy: Estimate, *, images: int, sources: int
) -> Estimate | None:
    """Return training accuracy in the last epoch minus test accuracy, in points; None without
    epochs.

    Both have Wilson intervals, their difference Newcombe's.
    images: the number of training images.
    sources: the number of them that are independent.
    """
    if not history or not images:
        return None
    train_accuracy = history[-1].train_accuracy
    if train_accuracy is None:
        return None
    train_estimate = wilson(round(train_accuracy * images), images, independent=sources)
    return difference_of(train_estimate, test_accuracy)


def accuracy_gain(history: Sequence[EpochMetrics], *, images: int, sources: int) -> Estimate | None:
    """Return the rise of test accuracy over the last tenth of the epochs, in points; None without
    two evaluations.

    Both evaluations use the same images, so the interval is rather too wide than too narrow.
    images: the number of test images.
    sources: the number of them that are independent.
    """
    pair = last_tenth(history)
    if pair is None:
        return None
    estimates = []
    for row in pair:
        correct = round((row.test_accuracy or 0.0) * images)
        estimates.append(wilson(correct, images, independent=sources))
    earlier, last = estimates
    return difference_of(last, earlier)


def _with_distillation(
    record: TrainRecord, student: Evaluation, how: Distillation, start: Start
) -> TrainRecord:
    """Return a student's record with its distillation, and its comparison with its teacher and a
    model without a teacher.
    """
    compared = _evaluate_compared(start, student.alias)
    teacher = compared[0]
    student_score = record.scores[0]
    scores = [replace(student_score, role="student", agreement=_agreement(student, teacher))]
    for role, evaluation in zip(_ROLES, compared):
        agreement = None if evaluation is teacher else _agreement(evaluation, teacher)
        scores.append(_score(evaluation, role, agreement))
    distillation = DistillationRow(
        teacher=teacher.alias,
        kind=how.kind,
        weight=how.weight,
        temperature=how.temperature,
        token=how.token,
        forms=cacheable_views(start.recipe, start.train),
    )
    pairs = _pair_rows([student, *compared], start.run.seed)
    return replace(record, scores=tuple(scores), taught=(distillation,), pairs=pairs)


def _evaluate_compared(start: Start, student: str) -> list[Evaluation]:
    """Return the test predictions of the teacher, and of the model without a teacher, if any.

    student: the alias of the student. Aliases that occur twice get the role as an addition.
    """
    data = str(start.options.data)
    evaluations = []
    for model in start.compared:
        test = part_of(data, "test", model.preprocessing, start.run)
        evaluations.append(evaluate(model, test, batch_size=start.run.batch_size))
    aliases = [student, *(evaluation.alias for evaluation in evaluations)]
    unique = []
    for role, evaluation in zip(_ROLES, evaluations):
        if aliases.count(evaluation.alias) > 1:
            addition, _, _ = role.partition(" ")  # "teacher" or "without"
            evaluation = replace(evaluation, alias=f"{evaluation.alias}-{addition}")
        unique.append(evaluation)
    return unique


def _agreement(evaluation: Evaluation, teacher: Evaluation) -> Estimate:
    """Return the share of images for which a model predicts the class that the teacher predicts."""
    # predictions are class numbers; the data's classes come first in both, in the same order
    same = evaluation.predictions == teacher.predictions
    return accuracy(same, groups=evaluation.groups)


def _pair_rows(evaluations: Sequence[Evaluation], seed: int) -> tuple[PairRow, ...]:
    groups = None
    if evaluations[0].groups is not None:
        groups = evaluations[0].groups.numpy()
    correct = {evaluation.alias: evaluation.correct.numpy() for evaluation in evaluations}
    return in_pairs(correct, groups=groups, seed=seed)


def pretraining_results(
    pretraining: Pretraining,
    features_before: Mapping[str, float],
    start: Start,
    result: TrainingResult,
) -> TrainRecord:
    """Return the results of a training without labels: its features, and the accuracy of its
    classifier, if any.

    features_before: measures of the features with random weights.
    """
    alias = start.model.alias
    measures = [FeatureMeasures(0, features_before)]  # by epoch
    for row in result.history:
        if row.measures:
            measures.append(FeatureMeasures(row.epochs, row.measures))
    record = TrainRecord(
        history=result.history,
        pretraining=(_pretraining_row(pretraining, measures, start, result),),
        by_epoch=tuple(of_epoch.row(alias) for of_epoch in measures),
        reconstructions=_reconstructions(pretraining),
        recipe=_setting_rows(start, start.recipe.numbers()),
    )
    # a copy with a classifier made of words, where the objective learned words
    model = pretraining.exported(start.model)
    if not model.has_classifier or start.test.labels is None:
        return record
    zero_shot = training_results(replace(start, model=model), result)
    return replace(
        record,
        scores=(replace(zero_shot.scores[0], role="zero-shot"),),
        per_class=zero_shot.per_class,
        confusion=zero_shot.confusion,
    )


@dataclass(frozen=True)
class FeatureMeasures:
    """Measures of the features of test images after some epochs of a training without labels.

    values: by name, see training/objectives/pretraining.py.
    """

    epochs: int
    values: Mapping[str, float]

    def row(self, alias: str) -> FeatureRow:
        """Return the measures that the record has a column for."""
        columns = {field.name for field in fields(FeatureRow)}
        values = {name: value for name, value in self.values.items() if name in columns}
        return FeatureRow(alias, self.epochs, **values)

    def estimate(self, name: str, *, n: int, unit: str = "fraction") -> Estimate | None:
        """Return a measure without an interval, None if it was not measured."""
        if name not in self.values:
            return None
        return Estimate(self.values[name], n=n, unit=unit)

    def knn(self, *, images: int, sources: int) -> Estimate | None:
        """Return k-NN accuracy with its Wilson interval, None without labels.

        sources: the number of images that are independent.
        """
        if "knn" not in self.values:
            return None
        return wilson(round(self.values["knn"] * images), images, independent=sources)


def _pretraining_row(
    pretraining: Pretraining,
    measures: Sequence[FeatureMeasures],
    start: Start,
    result: TrainingResult,
) -> PretrainingRow:
    """Return the features after training, compared with those of random weights."""
    entry = pretraining.entry
    images = min(QUERIES, len(start.test))
    sources = min(images, _sources(start.test))
    last = measures[-1]
    knn = last.knn(images=images, sources=sources)
    knn_of_random_weights = measures[0].knn(images=images, sources=sources)
    gain = None
    if knn and knn_of_random_weights:
        gain = difference_of(knn, knn_of_random_weights)
    return PretrainingRow(
        start.model.alias,
        objective=entry.name,
        title=entry.title,
        meaning=entry.meaning,
        source=entry.source,
        learned_from=entry.needs or "images alone",
        settings=pretraining.settings,
        loss=result.history[-1].test_loss or 0.0,
        knn=knn,
        random=knn_of_random_weights,
        gain=gain,
        neighbours=NEIGHBOURS,
        bank=min(BANK, len(start.train)),
        information=last.estimate("teacher_information", n=images, unit="nats"),
        # half of the images: the other half chose the head
        objectness=last.estimate("objectness", n=min(MAPS, images) // 2),
    )


def _reconstructions(pretraining: Pretraining) -> ReconstructionArrays | None:
    """Return test images, masked and reconstructed; None for an objective that reconstructs
    none."""
    pictures = []
    # nothing, or images without a mask, masked and reconstructed
    for images in pretraining.pictures(_RECONSTRUCTED):
        pictures.append((255 * images).round().byte().cpu().numpy())
    if not pictures:
        return None
    unmasked, masked, reconstructed = pictures
    return ReconstructionArrays(given=unmasked, masked=masked, filled=reconstructed)
