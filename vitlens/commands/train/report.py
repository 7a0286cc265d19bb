"""The report of `vitlens train`: how well the model does on held-out images, and whether it had converged."""

from collections.abc import Iterator
from dataclasses import replace
from shlex import quote
from typing import Any, Final

import numpy as np

from vitlens.charts import Picture, images, intervals, lines
from vitlens.commands.shared.comparison import SECTION as COMPARED
from vitlens.commands.shared.comparison import not_equal
from vitlens.commands.shared.trainings import trained
from vitlens.commands.shared.worst_class import class_sections, worst_class
from vitlens.commands.train.record import PretrainingRow, ScoreRow, TrainRecord, last_tenth
from vitlens.report.claims import FEWEST, SMALLEST, Claim, above, clear, found, judge
from vitlens.report.escape import as_code
from vitlens.report.prose import Marked, listed, say
from vitlens.report.sections import Chart, Overview, Report, Section, drawn
from vitlens.training.metrics import KEPT_FOLDER
from vitlens.training.recipe import LEAST_STEPS

RISING: Final = 1.0  # points in the last tenth of the epochs, from which on a training had not converged
_TENTH: Final = 10  # epochs from which on a tenth of them is one that can be compared
_SHORT: Final = 30  # epochs below which a training says little of an architecture
_PICTURED: Final = 6  # images of the first batch
_LEAST: Final = 0.005  # share of a class in a target that is named
_TRACKED: Final = (("tensorboard", "tensorboard --logdir {folder}"), ("wandb", "wandb sync {folder}/wandb/*"))
_FEW: Final = 500  # training images of a class, below which a model with random weights mostly learns these images
_PRETRAINED: Final = "timm:deit_tiny_patch16_224"  # small, and good features for photographs
_UNSURE: Final = 0.1  # by how much the mean confidence is below the accuracy of a model that is hardly trained
_LONGER: Final = "train longer, for example with `--epochs {{ more }}`."
_USE: Final = (
    "{{ evaluate }} shows errors and calibration, {{ explain }} what the model looks at; this folder is a MODEL for "
    "every command."
)
_STATES: Final = {  # how a training ended: the end of the title, the sentence, and what to do next
    "chance": (
        ", no better than chance",
        "This is not significantly better than always predicting the most frequent class, {{ chance|percent(1) }}.",
        "{{ check }} looks for what stands in the way of this training.",
    ),
    "rising": (
        " and was still improving",
        "It had not converged: in the last {{ span }} of {{ n }} its accuracy rose from "
        "{{ pair[0].test_accuracy|percent(1) }} to {{ pair[1].test_accuracy|percent(1) }}, by {{ effect }}.",
        _LONGER,
    ),
    "level": (
        " and had levelled off",
        "Over the last {{ span }} of {{ n }} its accuracy changed by {{ effect }}: it had levelled off.",
        _USE,
    ),
    "open": (
        "; whether it had converged is undecided",
        "Over the last {{ span }} of {{ n }} its accuracy changed by {{ effect }}: whether it had converged is "
        "undecided.",
        _LONGER,
    ),
    "": (" on held-out images", "", _USE),
}


def claims(record: TrainRecord) -> Iterator[Claim]:
    """Yield how accurate the model is and whether it had converged; of two models which is better; of a training
    without labels what its features tell, and whether they have collapsed."""
    for row in record.pretraining:
        yield from _of_features(row, record)
    if not _enough(record):
        return
    score = record.scores[0]
    setup = record.setup[0]
    state = _state(record)
    pair = last_tenth(record.history)
    n = len(record.history)
    end, words, advice = _STATES[state]
    yield found(
        "accuracy",
        score.model,
        "**{{ m }}** classifies {{ effect }} of the held-out images correctly, after {{ n }} epoch{{ n|s }} on "
        "{{ setup.training }} images in {{ time }}.",
        score.accuracy,
        headline="{{ m }} reaches {{ effect|value }} accuracy{{ end }}",
        given={"m": score.model, "time": score.seconds, "n": n, "setup": setup, "end": Marked(end)},
        kind="answer",
        place="training",
    )
    span = _span(pair[1].epoch - pair[0].epoch if pair else 0)
    yield found(
        "convergence",
        score.model,
        words,
        score.gain,
        kind="answer",
        place="training",
        given={"span": span, "n": n, "pair": pair, "chance": _chance(record)},
    )
    if score.gap is not None and _overfits(score):
        yield found(
            "overfitting",
            score.model,
            "**{{ m }}** overfits: in the last epoch it classifies {{ last.train_accuracy|percent(1) }} of the "
            "training images correctly, as it saw them, {{ effect }} more than of the held-out ones.{% if few %} "
            "{{ setup.training }} images of {{ classes }} classes are too few to train all its weights.{% endif %}",
            score.gap,
            given={
                "m": score.model,
                "last": record.history[-1],
                "few": _few_images(record),
                "setup": setup,
                "classes": len(record.per_class),
            },
            kind="answer",
            place="loss",
        )
        advice = _against_overfitting(record)
    elif score.confidence is not None and _hardly_trained(score):
        yield found(
            "hardly trained",
            score.model,
            "**{{ m }}** is hardly trained: its mean confidence is {{ effect }}, far below its accuracy, so its "
            "probabilities are too low.",
            score.confidence,
            given={"m": score.model},
            kind="answer",
            place="training",
        )
        advice = _LONGER + " {{ evaluate }} shows its calibration."
    yield from _pairs(record)
    yield found("next", score.model, f"Next: {advice}", given={"more": 2 * n, **_commands(record)}, kind="answer")
    yield from worst_class(score.model, record.per_class, score.accuracy)


def _overfits(score: ScoreRow) -> bool:
    """Return True if the training images are classified better than the test images by more than chance."""
    return score.gap is not None and (score.gap.low or 0.0) >= SMALLEST


def _hardly_trained(score: ScoreRow) -> bool:
    """Return True if the mean confidence is far below the accuracy, as early in a training."""
    if score.confidence is None or score.confidence.high is None or score.accuracy.low is None:
        return False
    return score.accuracy.low - score.confidence.high >= _UNSURE


def _few_images(record: TrainRecord) -> bool:
    """Return True if there are too few training images to train more than a head."""
    head_alone = any(row.last == 0 for row in record.started)
    return not head_alone and record.setup[0].training < _FEW * max(1, len(record.per_class))


def _against_overfitting(record: TrainRecord) -> str:
    """Return what to do about overfitting: more images, or fewer weights to train."""
    if not _few_images(record):
        return "add images, or augment them more (`--set randaugment=2`); a longer training overfits more."
    if record.started:
        return "train its head alone, {{ frozen }}, or add images; a longer training overfits more."
    return "train only the head of a pretrained model, {{ frozen }}, or add images; a longer training overfits more."


def _commands(record: TrainRecord) -> dict[str, Marked]:
    """Return the commands that are advised, as they can be typed."""
    folder = quote(str(record.folder))
    data = quote(str(record.options.get("data") or "digits"))
    model = quote(str(record.options.get("model")))
    start = model if record.started else _PRETRAINED
    lines = {
        "evaluate": f"vitlens evaluate {folder}",
        "explain": f"vitlens explain {folder}",
        "check": f"vitlens train {model} --data {data} --check",
        "frozen": f"vitlens train {start} --data {data} --freeze-backbone",
        "stats": f"vitlens stats {folder} --over-training",
    }
    if data != "digits":
        lines["evaluate"] += f" --data {data}"
        lines["explain"] += f" --data {data}"
    return {name: Marked(as_code(line)) for name, line in lines.items()}


def _of_features(row: PretrainingRow, record: TrainRecord) -> Iterator[Claim]:
    """k-NN accuracy beside random weights, and a teacher that says the same of every image."""
    if row.knn is not None and row.random is not None:
        better = above(row.gain, 0.0)
        given = {"row": row, "m": row.model, "better": better, "n": len(record.history)}
        yield found(
            "features",
            row.model,
            "Of the held-out images, {{ effect }} have the class of most of their {{ row.neighbours }} nearest of "
            "{{ row.bank }} training images by the features of **{{ m }}**, trained on {{ row.learned_from }} "
            "({{ row.title|lower }}) for {{ n }} epoch{{ n|s }}; with its random weights {{ row.random|alone }}, a "
            "difference of {{ row.gain|alone }}{% if not better %}, which is not significant{% endif %}.",
            row.knn,
            kind="answer",
            place="features",
            given=given,
            headline="{% if better %}{{ m }} learned classes from {{ row.learned_from }}: k-NN accuracy "
            "{{ effect|value }}, from {{ row.random|value }}{% else %}The features of {{ m }} are no better "
            "than those of random weights{% endif %}",
        )
    if row.information is not None:
        because = "information about the image in its teacher's outputs"
        claim = judge("collapse", row.model, row.information, "collapse", because=because)
        yield replace(
            claim,
            place="teacher",
            kind="answer",
            says=say(
                "{% if state == 'fail' %}**{{ m }}** has **collapsed**, or not begun to learn: its teacher says nearly "
                "the same of every image; its outputs hold {{ effect }} of information about the "
                "image{% if not centred %}. They were not centred (`centring=false`), which lets one of them win "
                "everywhere{% endif %}.{% else %}**{{ m }}** has not collapsed: its teacher's outputs hold "
                "{{ effect }} of information about the image.{% endif %}",
                state=claim.state,
                m=row.model,
                effect=row.information,
                centred=row.settings.get("centring", True),
            ),
        )


def _span(k: int) -> Marked:
    """ "epoch", "5 epochs": after "the last" and "every"."""
    return Marked("epoch") if k == 1 else Marked(say("{{ k }} epochs", k=k))


def _enough(record: TrainRecord) -> bool:
    """Return True if there are test images enough for a claim."""
    return bool(record.scores) and (record.scores[0].accuracy.n or 0) >= FEWEST


def _state(record: TrainRecord) -> str:
    """Return whether accuracy is at chance, or still rose when training ended: a key of _STATES."""
    score = record.scores[0]
    rise = record.scores[0].gain
    if not above(score.accuracy, _chance(record)):
        return "chance"
    if rise is None:
        return ""
    if rise.value >= RISING and clear(rise, 0.0):
        return "rising"
    full = 100 * (1 - score.accuracy.value) < RISING  # it cannot rise by as much
    return "level" if abs(rise.value) < RISING and (full or len(record.history) >= _TENTH) else "open"


def _chance(record: TrainRecord) -> float:
    """Return the share of the most frequent class among the test images."""
    return max(row.n for row in record.per_class) / sum(row.n for row in record.per_class)


def _pairs(record: TrainRecord) -> Iterator[Claim]:
    """Models that differ significantly, and by more than is too small to matter; with a teacher and without, always."""
    scores = {score.model: score for score in record.scores}
    for row in record.pairs:
        one = scores[row.first]
        other = scores[row.second]
        if row.gain(row.first).value < 0:
            one, other = other, one
        answer = {one.role, other.role} == {"student", "without a teacher"}
        if row.decided or answer:
            yield found(
                "comparison",
                f"{row.first} and {row.second}",
                "{% if row.decided %}{{ one }} classifies more held-out images correctly than {{ other }}: "
                "{{ a|value }} against {{ b|value }}, {{ effect }} more (McNemar's exact test, p = "
                "{{ row.p_holm|number }}).{% else %}The accuracies of {{ one }}, {{ a|value }}, and {{ other }}, "
                "{{ b|value }}, do not differ significantly: {{ effect }}, p = {{ row.p_holm|number }}.{% endif %}",
                row.gain(one.model),
                p=row.p_holm,
                kind="answer" if answer else "comparison",
                place="beside",
                given={"one": _named(one), "other": _named(other), "a": one.accuracy, "b": other.accuracy, "row": row},
            )


def _named(score: ScoreRow) -> Marked:
    """Return a model with what it is."""
    return Marked(say("**{{ s.model }}**{% if s.role %} ({{ s.role }}){% endif %}", s=score))


def unknown(record: TrainRecord) -> Iterator[str]:
    """Yield what could overturn the result, the most serious first."""
    if not record.scores:
        return
    own = record.scores[0]
    if not _enough(record):
        told = listed([say("{{ s.model }} {{ s.accuracy|alone }}", s=score) for score in record.scores])
        n = own.accuracy.n
        yield say("{{ n }} test image{{ n|s }} {{ n|are }} too few for a statement: {{ told }}.", n=n, told=told)
    yield say(
        "{{ own.model }} was trained once, with one seed: the interval covers the "
        "choice of {{ own.accuracy.n }} test images, and another seed may give an accuracy outside of it.",
        own=own,
    )
    yield from trained(record.training)
    yield from not_equal(record.pairs)
    if own.best is not None and own.best.value > own.accuracy.value:
        yield say(
            "The best epoch reached {{ best|value }}, but was chosen on the test images: that number is "
            "optimistic and not the result.",
            best=own.best,
        )
    n = len(record.history)
    if record.history and last_tenth(record.history) is None:
        yield "The test images were evaluated once, so it is not known whether accuracy still rose."
    elif 0 < n < _SHORT and _enough(record) and record.setup:
        yield say(
            "{% if level %}Accuracy levelled off as the learning rate fell to {{ end|number }}, from {{ peak|number }}"
            "{% else %}{{ n }} epochs are few{% endif %}; a longer training was not tried.",
            n=n,
            level=_state(record) == "level",
            end=record.history[-1].learning_rate,
            peak=max(row.learning_rate for row in record.history),
        )


def _reconstructed(record: TrainRecord) -> list[Picture]:
    """Test images, with their masked patches in grey, and with these as they are reconstructed."""
    arrays = record.reconstructions
    if arrays is None:
        return []
    rows = (("image", arrays.given), ("masked", arrays.masked), ("reconstructed", arrays.filled))
    return [Picture(pixels[at] / np.float32(255), row=row) for row, pixels in rows for at in range(len(pixels))]


def _how(record: TrainRecord) -> str:
    """Images, batches, what was fine-tuned, kept and logged."""
    parts = [
        say(
            "It was trained on {{ row.training }} images and tested on {{ row.test }} others{% if row.computed %}, "
            "with {{ row.computed|join(', ')|whole }}{% endif %}. {% if smaller %}As there are fewer than {{ least }} "
            "batches of {{ row.usual_batch_size }}, the recipe's size, batches of {{ row.batch_size }} are used, and "
            "the learning rate is {{ row.learning_rate|number }} in place of {{ row.usual_learning_rate|number }}; "
            "`--batch-size` and `--learning-rate` set others. {% endif %}{% if row.keep_every %}Copies of the weights, "
            "from before training and after every {{ every }}, are in `{{ kept }}/`{% if attends %}; {{ stats }} "
            "reads them{% endif %}.{% endif %}",
            row=row,
            smaller=row.batch_size < row.usual_batch_size and not row.chosen,
            least=LEAST_STEPS,
            kept=KEPT_FOLDER,
            every=_span(row.keep_every or 0),
            stats=_commands(record)["stats"],
            attends=any(model.family != "cnn" for model in record.config.models[:1]),
        )
        for row in record.setup
    ]
    named = {None: "all weights", 0: "its head alone", 1: "its last block and its head"}
    parts += [
        say(
            "**{{ row.model }}** (weights: {{ row.weights }}) was fine-tuned, {{ part }}: {{ row.trained }} of "
            "{{ row.parameters }} parameters{% if row.notes %}; {{ row.notes|whole }}{% endif %}.",
            row=row,
            part=named.get(row.last, f"its last {row.last} blocks and its head"),
        )
        for row in record.started
    ]
    for place, command in _TRACKED:
        if (record.folder / place).is_dir():
            line = as_code(command.format(folder=quote(str(record.folder))))
            parts.append(f"The log of the training is in `{place}/`; {line} shows it.")
    return " ".join(parts)


def _batch(record: TrainRecord) -> list[Picture]:
    """Return the first images of the first batch: as given, and as the model is trained on them, with their targets."""
    arrays = record.first_batch
    names = [row.class_name for row in record.per_class]
    if arrays is None or not names:
        return []

    def target(shares: Any) -> str:
        present = [int(index) for index in shares.argsort()[::-1] if shares[index] >= _LEAST][:2]
        mixed = len(present) > 1
        return "\n".join(f"{names[index]}: {shares[index]:.2f}" if mixed else names[index] for index in present)

    given = [names[label] for label in arrays.labels]
    taken = list(map(target, arrays.targets))
    return [
        Picture(pixels[at] / np.float32(255), row=row, below=below[at])
        for row, pixels, below in (("as given", arrays.given, given), ("trained on", arrays.trained, taken))
        for at in range(min(_PICTURED, len(pixels)))
    ]


_ACCURACY: Final = Chart(
    "training",
    lines("epochs", "train_accuracy", "test_accuracy"),
    "Accuracy after each epoch. The result is that of the last epoch; the highest would be chosen on the test images.",
    title="Training and test accuracy by epoch",
    rows="history",
)
_FEATURES: Final = Chart(
    "features",
    lines("epochs", "knn", "objectness"),
    "k-NN accuracy of the features, and the overlap of one head's CLS attention with the object's mask, after each "
    "epoch; on the left random weights.",
    title="What the features tell about test images, by epoch",
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
            "What do the features tell?",
            "pretraining",
            says="What is minimised is {{ meaning|whole }} ({{ source }}). The features of {{ model }} "
            "{% if row.knn %}find the class of {{ knn }} of the test images by their nearest neighbours, with "
            "random weights of {{ random|alone }}{% else %}were not compared with classes, as there are no "
            "labels{% endif %}.{% if row.objectness %} The last block's best head overlaps the object by "
            "{{ objectness|value }}, counting as large an area.{% endif %}",
            columns=("model", "objective", "knn", "random", "gain", "objectness"),
            charts=(_FEATURES,),
        ),
        Section(
            "Do the features collapse?",
            "by_epoch",
            about=("collapse",),
            opening="{% set last = rows[-1] %}The effective rank of the features went from {{ first.rank|number }} to "
            "{{ last.rank|number }}, and their spread from {{ first.spread|number }} to "
            "{{ last.spread|number }}: it is none where all images have the same features.",
            columns=("epochs", "knn", "rank", "spread", "objectness", "teacher_information"),
            charts=(
                Chart(
                    "rank",
                    lines("epochs", "rank"),
                    "Effective rank of the features of test images: how many directions they use.",
                    title="Effective rank by epoch",
                ),
                Chart(
                    "teacher",
                    lines("epochs", "teacher_entropy", "teacher_information"),
                    "Entropy of what the teacher says of an image, and the information about the image in it: none "
                    "where it says the same of all.",
                    title="The teacher's outputs by epoch",
                    only=lambda row: row.teacher_entropy is not None,
                ),
            ),
        ),
        Section(
            "What does it reconstruct?",
            lambda record: [record.reconstructions] if record.reconstructions else [],
            opening="The decoder sees the patches that are left; in the picture, mean and contrast of each patch are "
            "those of the image.",
            charts=(
                Chart(
                    "reconstructions",
                    images(),
                    "Test images, what the encoder sees of them, and their masked patches as the decoder fills them "
                    "in.",
                    title="Reconstructions of masked test images",
                    rows=_reconstructed,
                ),
            ),
        ),
        Section(
            "Did it converge, and does it overfit?",
            "history",
            opening="{% if record.pretraining %}The loss on test images is that of the objective, with the same random "
            "numbers after every epoch.{% elif not record.scores %}The training has not ended.{% elif "
            "record.scores[0].gap %}Accuracy on the training images of the last epoch, as the model saw them, "
            "minus that on the test images is {{ record.scores[0].gap }}, a lower bound of overfitting."
            "{% else %}Training images were mixed, so that accuracy on them does not show overfitting."
            "{% endif %}",
            charts=(
                Chart(
                    "loss",
                    lines("epochs", "train_loss", "test_loss"),
                    "Loss after each epoch. A test loss that rises while the training loss falls is overfitting; "
                    "strong augmentation lifts the training loss above it.",
                    title="Training and test loss by epoch",
                ),
            ),
        ),
        Section(
            "What does the teacher change?",
            "taught",
            says="**{{ teacher }}** is the teacher: the student learns {% if row.hard %}the teacher's prediction "
            "as a second label{% else %}the teacher's probabilities at temperature {{ temperature }}{% endif %}, "
            "with weight {{ weight }} in the loss, through {% if token %}a distillation token with its own head"
            "{% else %}the head of the labels{% endif %}. {% if forms %}Its outputs on each training image"
            "{% if forms > 1 %} and its mirror image{% endif %} were computed once.{% else %}The teacher saw the "
            "same augmented images as the student, in every step.{% endif %}",
            charts=(
                Chart(
                    "beside",
                    intervals("model", "accuracy", "agreement"),
                    "Accuracy on the same test images, and agreement with the teacher's predictions, correct or not, "
                    "with intervals; the paired test below has more power.",
                    title="Student and teacher",
                    rows="scores",
                ),
            ),
        ),
        replace(COMPARED, rows=lambda record: record.pairs if _enough(record) else ()),
        *class_sections(),
        Section(
            "What does the model see in training?",
            lambda record: [row for row in record.setup if row.augmentation],
            opening="The images are augmented anew in every epoch: {{ first.augmentation }}.{% if first.mixed %} Of "
            "the {{ first.shown }} first images of the first batch, {{ first.mixed }} {{ first.mixed|have }} a "
            "target of several classes.{% endif %}",
            charts=(
                Chart(
                    "first_batch",
                    images(),
                    "Images of the first batch as given, and as the model takes them, with the shares of the classes "
                    "in their target, before label smoothing.",
                    title="The first training batch",
                    rows=_batch,
                ),
            ),
        ),
        Section("How was it trained?", "recipe", opening=_how, columns=("setting", "value")),
    ),
)
