"""The report of `vitlens train`: accuracy on held-out images, convergence, features and
settings."""

from dataclasses import replace
from shlex import quote
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.charts import Picture, images, intervals, lines
from vitlens.commands.shared.comparison import SECTION as COMPARED
from vitlens.commands.shared.worst_class import class_sections
from vitlens.commands.train.claims import claims, commands, epoch_span, has_enough_images, unknown
from vitlens.commands.train.record import FineTunedRow, SetupRow, TrainRecord
from vitlens.report.escape import as_code
from vitlens.report.prose import say
from vitlens.report.sections import Chart, Overview, Report, Section, drawn
from vitlens.training.metrics import KEPT_FOLDER
from vitlens.training.recipe import LEAST_STEPS

_PICTURED: Final = 6  # images of the first batch
_LEAST: Final = 0.005  # a class with a smaller share of a target is not named: it rounds to 0.00
_NAMED: Final = 2  # classes of a target, as many as are mixed
# the command that shows the log of a tracker, by the tracker's folder in the run's folder
_TRACKERS: Final = {
    "tensorboard": "tensorboard --logdir {folder}",
    "wandb": "wandb sync {folder}/wandb/*",
}


def _settings(record: TrainRecord) -> str:
    """Return sentences on images and batches, on fine-tuning, and on logs."""
    sentences = [_on_setup(row, record) for row in record.setup]
    sentences += [_on_fine_tuning(row) for row in record.started]
    for folder, command in _TRACKERS.items():
        if (record.folder / folder).is_dir():
            line = as_code(command.format(folder=quote(str(record.folder))))
            sentences.append(f"The log of the training is in `{folder}/`; {line} shows it.")
    return " ".join(sentences)


def _on_setup(row: SetupRow, record: TrainRecord) -> str:
    sentences = [
        "It was trained on {{ row.training }} images and tested on {{ row.test }} "
        "others{% if row.computed %}, with {{ row.computed|join(', ')|whole }}{% endif %}."
    ]
    if row.batch_size < row.usual_batch_size and not row.chosen:
        sentences.append(
            "An epoch would have fewer than {{ least }} batches of {{ row.usual_batch_size }}, "
            "the recipe's batch size. So batches of {{ row.batch_size }} are used, with a "
            "learning rate of {{ row.learning_rate|number }} instead of "
            "{{ row.usual_learning_rate|number }}; `--batch-size` and `--learning-rate` set "
            "others."
        )
    if row.keep_every:
        sentences.append(
            "Copies of the weights, from before training and after every {{ every }}, are in "
            "`{{ kept }}/`{% if has_attention %}; {{ stats }} reads them{% endif %}."
        )
    return say(
        " ".join(sentences),
        row=row,
        least=LEAST_STEPS,
        kept=KEPT_FOLDER,
        every=epoch_span(row.keep_every or 0),
        stats=commands(record)["stats"],
        # the trained model is the first; of a training that was stopped there may be none
        has_attention=any(model.family != "cnn" for model in record.config.models[:1]),
    )


def _on_fine_tuning(row: FineTunedRow) -> str:
    part = f"its last {row.last} blocks and its head"
    if row.last is None:
        part = "all weights"
    elif row.last == 0:
        part = "only its head"
    elif row.last == 1:
        part = "its last block and its head"
    return say(
        "**{{ row.model }}** (weights: {{ row.weights }}) was fine-tuned, {{ part }}: "
        "{{ row.trained }} of {{ row.parameters }} parameters{% if row.notes %}; "
        "{{ row.notes|whole }}{% endif %}.",
        row=row,
        part=part,
    )


def _reconstruction_pictures(record: TrainRecord) -> list[Picture]:
    """Return test images, the same with masked patches in grey, and with these reconstructed."""
    arrays = record.reconstructions
    if arrays is None:
        return []
    images_by_row = {
        "image": arrays.given,
        "masked": arrays.masked,
        "reconstructed": arrays.filled,
    }
    pictures = []
    for row, row_images in images_by_row.items():
        for pixels in row_images:
            pictures.append(Picture(pixels / np.float32(255), row=row))
    return pictures


def _batch_pictures(record: TrainRecord) -> list[Picture]:
    """Return the first images of the first batch, before and after augmentation, with their
    targets.
    """
    arrays = record.first_batch
    names = [row.class_name for row in record.per_class]
    if arrays is None or not names:
        return []
    pictures = []
    for image, label in zip(arrays.given[:_PICTURED], arrays.labels):
        pictures.append(Picture(image / np.float32(255), row="as given", below=names[label]))
    for image, shares in zip(arrays.trained[:_PICTURED], arrays.targets):
        below = _target_words(shares, names)
        pictures.append(Picture(image / np.float32(255), row="trained on", below=below))
    return pictures


def _target_words(shares: NDArray[np.floating[Any]], names: list[str]) -> str:
    """Return the class of a target, or its classes with their shares, one a line."""
    largest_first: list[int] = shares.argsort()[::-1].tolist()
    classes = [index for index in largest_first if shares[index] >= _LEAST][:_NAMED]
    if len(classes) == 1:
        return names[classes[0]]
    return "\n".join(f"{names[index]}: {shares[index]:.2f}" for index in classes)


def _on_loss(record: TrainRecord) -> str:
    if record.pretraining:
        return (
            "The test loss is that of the objective, with the same random numbers after every "
            "epoch."
        )
    if not record.scores:
        return "The training has not ended."
    gap = record.scores[0].gap
    if gap:
        return say(
            "Training accuracy in the last epoch, on images as the model saw them, minus test "
            "accuracy is {{ gap }}, a lower bound of overfitting.",
            gap=gap,
        )
    return "Training images were mixed, so accuracy on them does not show overfitting."


_ACCURACY: Final = Chart(
    "training",
    lines("epochs", "train_accuracy", "test_accuracy", y_title="accuracy (%)"),
    "Accuracy after each epoch. The result is that of the last epoch; the highest would be chosen "
    "on test images.",
    title="Training and test accuracy by epoch",
    rows="history",
)
_FEATURES: Final = Chart(
    "features",
    lines("epochs", "knn", "objectness", y_title="share (%)"),
    "k-NN accuracy of the features, and the overlap of one head's CLS attention with the "
    "object's mask, after each epoch. The first values are those of random weights.",
    title="k-NN accuracy and attention on the object, by epoch",
    rows="by_epoch",
)
REPORT: Final = Report(
    TrainRecord,
    claims=claims,
    unknown=unknown,
    picture=lambda record: drawn(_FEATURES if record.pretraining else _ACCURACY, record),
    glance=Overview("scores", ("model", "role", "accuracy", "agreement", "gain", "seconds")),
    sections=(
        Section(
            "How good are the features?",
            "pretraining",
            says="The training minimises {{ meaning|whole }} ({{ source }}). {% if row.knn %}The "
            "features of {{ model }} reach a k-NN accuracy of {{ knn }} on the test images, random "
            "weights {{ random|alone }}.{% else %}There are no labels, so the features of "
            "{{ model }} were not compared with classes.{% endif %}{% if row.objectness %} The "
            "attention of the last block's best head overlaps the object by {{ objectness|value }} "
            "(intersection over union, with an area of the same size).{% endif %}",
            columns=("model", "objective", "knn", "random", "gain", "objectness"),
            charts=(_FEATURES,),
        ),
        Section(
            "Do the features collapse?",
            "by_epoch",
            about=("collapse",),
            opening="{% set last = rows[-1] %}The effective rank of the features changed from "
            "{{ first.rank|number }} to {{ last.rank|number }}, and their spread from "
            "{{ first.spread|number }} to {{ last.spread|number }}. The spread is zero if all "
            "images have the same features.",
            columns=("epochs", "knn", "rank", "spread", "objectness", "teacher_information"),
            charts=(
                Chart(
                    "rank",
                    lines("epochs", "rank"),
                    "Effective rank of the features of test images: the number of directions they "
                    "use.",
                    title="Effective rank by epoch",
                ),
                Chart(
                    "teacher",
                    lines("epochs", "teacher_entropy", "teacher_information", y_title="nats"),
                    "Entropy of the teacher's output, and its information about the image: zero "
                    "if the output is the same for all images.",
                    title="The teacher's outputs by epoch",
                    only=lambda row: row.teacher_entropy is not None,
                ),
            ),
        ),
        Section(
            "What does it reconstruct?",
            lambda record: [record.reconstructions] if record.reconstructions else [],
            opening="The decoder sees only the patches that are not masked. The picture shows each "
            "reconstructed patch with the mean and contrast of the original.",
            charts=(
                Chart(
                    "reconstructions",
                    images(),
                    "Test images, the patches that the encoder sees, and the masked patches as "
                    "the decoder reconstructs them.",
                    title="Reconstructions of masked test images",
                    rows=_reconstruction_pictures,
                ),
            ),
        ),
        Section(
            "Did it converge, and does it overfit?",
            "history",
            opening=_on_loss,
            charts=(
                Chart(
                    "loss",
                    lines("epochs", "train_loss", "test_loss", y_title="loss"),
                    "Loss after each epoch. A test loss that rises while the training loss falls "
                    "shows overfitting; strong augmentation can lift the training loss above the "
                    "test loss.",
                    title="Training and test loss by epoch",
                ),
            ),
        ),
        Section(
            "What does the teacher change?",
            "taught",
            says="The student learns {% if row.hard %}the prediction of the teacher, "
            "**{{ teacher }}**, as a second label{% else %}the probabilities of the teacher, "
            "**{{ teacher }}**, at temperature {{ temperature }}{% endif %}, with weight "
            "{{ weight }} in the loss. It learns them through {% if token %}a distillation token "
            "with a separate head{% else %}the same head as the labels{% endif %}. "
            "{% if forms %}The teacher's outputs on each training image{% if forms > 1 %} and its "
            "mirror image{% endif %} were computed once.{% else %}In every step, the teacher saw "
            "the same augmented images as the student.{% endif %}",
            charts=(
                Chart(
                    "beside",
                    intervals("model", "accuracy", "agreement"),
                    "Accuracy on the same test images, and agreement with the teacher's "
                    "predictions, right or wrong, with intervals. The paired test below has more "
                    "power.",
                    title="Student and teacher",
                    rows="scores",
                ),
            ),
        ),
        replace(COMPARED, rows=lambda record: record.pairs if has_enough_images(record) else ()),
        *class_sections(),
        Section(
            "What does the model see in training?",
            lambda record: [row for row in record.setup if row.augmentation],
            opening="Every epoch draws a new augmentation of each image: "
            "{{ first.augmentation }}.{% if first.mixed %} Of the first {{ first.shown }} images "
            "of the first batch, {{ first.mixed }} {{ first.mixed|have }} a target with several "
            "classes.{% endif %}",
            charts=(
                Chart(
                    "first_batch",
                    images(),
                    "Images of the first batch before and after augmentation, with the shares of "
                    "the classes in their target before label smoothing.",
                    title="The first training batch",
                    rows=_batch_pictures,
                ),
            ),
        ),
        Section(
            "How was it trained?",
            "recipe",
            opening=_settings,
            columns=("setting", "value"),
            charts=(
                Chart(
                    "schedule",
                    lines("epochs", "learning_rate"),
                    "Learning rate of each update: it rises in the warm-up, if the recipe has one, "
                    "then falls as a cosine.",
                    title="The learning-rate schedule",
                    rows="schedule",
                ),
            ),
        ),
    ),
)
