"""The claims of `vitlens train`: accuracy, convergence, overfitting, features, and what may
overturn them.

In a template of `found`, `effect` is the estimate of the claim; the other values are in `given`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import join, quote
from typing import Any, Final, Literal

from vitlens.commands.run.flags import typed_again
from vitlens.commands.run.options import DECIDING
from vitlens.commands.shared.comparison import PairRow, not_equal
from vitlens.commands.shared.trainings import trained
from vitlens.commands.shared.worst_class import worst_class
from vitlens.commands.train.options import TrainOptions
from vitlens.commands.train.record import PretrainingRow, ScoreRow, TrainRecord, last_tenth
from vitlens.record import Config
from vitlens.report.claims import FEWEST, SMALLEST, Claim, above, clear, found, judge
from vitlens.report.escape import as_code
from vitlens.report.next_steps import next_step
from vitlens.report.prose import Marked, listed, say
from vitlens.report.typed_options import data_words

# points: a training whose accuracy rises by this in the last tenth of its epochs is not converged
RISING: Final = 1.0
_TENTH: Final = 10  # epochs: with fewer, a tenth is less than one epoch
_SHORT: Final = 30  # epochs: a shorter training says little about an architecture
# training images of a class: with fewer, random weights mostly memorise the images
_FEW: Final = 500
_PRETRAINED: Final = "timm:deit_tiny_patch16_224"  # small, with good features for photographs
# accuracy minus mean confidence: a model with at least this is hardly trained
_UNSURE: Final = 0.1
# advice, as templates over `commands`
_LONGER: Final = "train longer, for example with `--epochs {{ more }}`."
_USE: Final = (
    "{{ evaluate }} shows errors and calibration, {{ explain }} what the model looks at; this "
    "folder is a MODEL for every command."
)
# "open": undecided whether accuracy still rose; "": its rise was not measured
State = Literal["chance", "rising", "level", "open", ""]


@dataclass(frozen=True)
class _Ending:
    """How a training ended, as templates.

    headline: the end of the title, after the accuracy.
    sentence: of the claim on convergence.
    advice: the next step; an overfitting or hardly trained model gets another one.
    """

    headline: str
    sentence: str
    advice: str


_ENDINGS: Final[dict[State, _Ending]] = {
    "chance": _Ending(
        ", no better than chance",
        "This is not significantly better than always predicting the most frequent class, "
        "{{ chance|percent(1) }}.",
        "{{ check }} finds common causes of a failed training. If it finds none, " + _LONGER,
    ),
    "rising": _Ending(
        " and was still improving",
        "It had not converged: in the last {{ span }} of {{ n }}, accuracy rose from "
        "{{ earlier.test_accuracy|percent(1) }} to {{ last.test_accuracy|percent(1) }}, by "
        "{{ effect }}.",
        _LONGER,
    ),
    "level": _Ending(
        " and had levelled off",
        "Accuracy had levelled off: over the last {{ span }} of {{ n }} it changed by "
        "{{ effect }}.",
        _USE,
    ),
    "open": _Ending(
        "; convergence is undecided",
        "Over the last {{ span }} of {{ n }}, accuracy changed by {{ effect }}: convergence is "
        "undecided.",
        _LONGER,
    ),
    "": _Ending(" on held-out images", "", _USE),
}


def claims(record: TrainRecord) -> Iterator[Claim]:
    """Yield accuracy, convergence and overfitting, comparisons with other models, and the features
    without labels.
    """
    for row in record.pretraining:
        yield from _feature_claims(row, record)
    if not has_enough_images(record):
        return
    score = record.scores[0]
    epochs = len(record.history)
    ending = _ENDINGS[state_of(record)]
    advice = ending.advice
    yield _accuracy_claim(record, ending)
    yield _convergence_claim(record, ending)
    if _overfits(score):
        yield _overfitting_claim(record)
        advice = _against_overfitting(record)
    elif _hardly_trained(score):
        yield _hardly_trained_claim(score)
        advice = _LONGER + " {{ evaluate }} shows its calibration."
    yield from _pair_claims(record)
    values = {"more": 2 * epochs, **commands(record)}
    yield found("next", score.model, f"Next: {advice}", given=values, kind="answer")
    yield from worst_class(score.model, record.per_class, score.accuracy)


def _accuracy_claim(record: TrainRecord, ending: _Ending) -> Claim:
    score = record.scores[0]
    return found(
        "accuracy",
        score.model,
        "**{{ m }}** classifies {{ effect }} of the held-out images correctly, after {{ n }} "
        "epoch{{ n|s }} on {{ setup.training }} images in {{ time }}.",
        score.accuracy,
        headline="{{ m }} reaches {{ effect|value }} accuracy{{ end }}",
        given={
            "m": score.model,
            "time": score.seconds,
            "n": len(record.history),
            "setup": record.setup[0],
            "end": Marked(ending.headline),
        },
        kind="answer",
        place="training",
    )


def _convergence_claim(record: TrainRecord, ending: _Ending) -> Claim:
    score = record.scores[0]
    earlier = None
    last = None
    epochs_between = 0
    evaluations = last_tenth(record.history)
    if evaluations is not None:
        earlier, last = evaluations
        epochs_between = last.epoch - earlier.epoch
    return found(
        "convergence",
        score.model,
        ending.sentence,
        score.gain,
        kind="answer",
        place="training",
        given={
            "span": epoch_span(epochs_between),
            "n": len(record.history),
            "earlier": earlier,
            "last": last,
            "chance": _chance(record),
        },
    )


def _overfitting_claim(record: TrainRecord) -> Claim:
    score = record.scores[0]
    return found(
        "overfitting",
        score.model,
        "**{{ m }}** overfits: in the last epoch it classifies "
        "{{ last.train_accuracy|percent(1) }} of the training images correctly, as it saw them, "
        "{{ effect }} more than of the held-out images.{% if few %} {{ setup.training }} images "
        "of {{ classes }} classes are too few to train all its weights.{% endif %}",
        score.gap,
        given={
            "m": score.model,
            "last": record.history[-1],
            "few": _has_few_images(record),
            "setup": record.setup[0],
            "classes": len(record.per_class),
        },
        kind="answer",
        place="loss",
    )


def _hardly_trained_claim(score: ScoreRow) -> Claim:
    return found(
        "hardly trained",
        score.model,
        "**{{ m }}** is hardly trained: its mean confidence is {{ effect }}, far below its "
        "accuracy, so its probabilities are too low.",
        score.confidence,
        given={"m": score.model},
        kind="answer",
        place="training",
    )


def has_enough_images(record: TrainRecord) -> bool:
    """Return True if there are enough test images for a claim."""
    return bool(record.scores) and (record.scores[0].accuracy.n or 0) >= FEWEST


def state_of(record: TrainRecord) -> State:
    """Return whether accuracy is at chance, or still rose when training ended."""
    score = record.scores[0]
    rise = score.gain
    if not above(score.accuracy, _chance(record)):
        return "chance"
    if rise is None:
        return ""
    if rise.value >= RISING and clear(rise, 0.0):
        return "rising"
    # after few epochs a small rise says little, unless there is no room for a larger one
    cannot_rise = 100 * (1 - score.accuracy.value) < RISING
    is_long = len(record.history) >= _TENTH
    if abs(rise.value) < RISING and (cannot_rise or is_long):
        return "level"
    return "open"


def _chance(record: TrainRecord) -> float:
    """Return the share of the most frequent class among the test images."""
    counts = [row.n for row in record.per_class]
    return max(counts) / sum(counts)


def _overfits(score: ScoreRow) -> bool:
    """Return True if accuracy on training images is significantly higher than on test images."""
    return score.gap is not None and (score.gap.low or 0.0) >= SMALLEST


def _hardly_trained(score: ScoreRow) -> bool:
    """Return True if mean confidence is far below accuracy, as it is early in a training."""
    if score.confidence is None or score.confidence.high is None or score.accuracy.low is None:
        return False
    return score.accuracy.low - score.confidence.high >= _UNSURE


def _has_few_images(record: TrainRecord) -> bool:
    """Return True if there are too few training images to train more than a head."""
    if any(row.last == 0 for row in record.started):  # only the head is trained
        return False
    classes = max(1, len(record.per_class))
    return record.setup[0].training < _FEW * classes


def _against_overfitting(record: TrainRecord) -> str:
    """Return what to do about overfitting: add images, or train fewer weights."""
    if not _has_few_images(record):
        return (
            "add images, or augment them more (`--set randaugment=2`); a longer training "
            "overfits more."
        )
    if record.started:
        return "train only its head, {{ frozen }}, or add images; a longer training overfits more."
    return (
        "train only the head of a pretrained model, {{ frozen }}, or add images; a longer "
        "training overfits more."
    )


def commands(record: TrainRecord) -> dict[str, Marked]:
    """Return the commands that the report recommends, ready to be typed, by name.

    "frozen" trains only the head: of the same model, if its training started from weights, else of
    a pretrained one.
    """
    options = {**record.options, "data": record.options.get("data") or "digits"}
    data_option = join(data_words(options))
    # the trained model, then the images, as words of a command line
    on_model = quote(str(record.folder))
    for file in record.options.get("model_file") or ():
        on_model += f" --model-file {quote(str(file))}"
    if data_option != "--data digits":  # the default of a model of digits
        on_model += f" {data_option}"
    model_to_freeze = f"{_PRETRAINED} {data_option}"
    if record.started:
        model_to_freeze = _typed_again(options, _STARTED)
    same_training = _typed_again(options, _CHECKED)
    lines = {
        "evaluate": f"vitlens evaluate {on_model}",
        "explain": f"vitlens explain {on_model}",
        "check": f"vitlens train {same_training} --check",
        "frozen": f"vitlens train {model_to_freeze} --freeze-backbone",
        "stats": f"vitlens stats {on_model} --over-training",
    }
    return {name: Marked(as_code(line)) for name, line in lines.items()}


# The options that `_typed_again` repeats, by field of TrainOptions. For a bundle of options, the
# fields of it that are repeated; () repeats all of them, and is the only value for a single option.
_Repeated = Mapping[str, Sequence[str]]
# what --check checks
_CHECKED: Final[_Repeated] = {
    "model": (),
    "model_file": (),
    "recipe": (),
    "tuning": (),
    "shape": (),
    "data": (),
    "run": DECIDING,
}
# what loads the model with its weights, and the images
_STARTED: Final[_Repeated] = {
    "model": (),
    "model_file": (),
    "tuning": ("weights",),
    "shape": ("image_size",),
    "data": (),
    "run": ("data_dir", "labels"),
}


def _typed_again(options: Mapping[str, Any], repeated: _Repeated) -> str:
    """Return some options of a training as they are typed.

    options: all options of the training, as in config.json.
    """
    values: dict[str, Any] = {}
    for name, fields in repeated.items():
        value = options.get(name)
        if isinstance(value, Mapping):  # a bundle
            fields_of_bundle = fields or value.keys()
            value = {field: value.get(field) for field in fields_of_bundle}
        values[name] = value
    return " ".join(typed_again(TrainOptions, values))


def epoch_span(epochs: int) -> Marked:
    """Return "epoch" or "5 epochs", as after "the last" and "every"."""
    if epochs == 1:
        return Marked("epoch")
    return Marked(say("{{ n }} epochs", n=epochs))


def _feature_claims(row: PretrainingRow, record: TrainRecord) -> Iterator[Claim]:
    """Yield k-NN accuracy compared with random weights, and whether the features collapsed."""
    if row.knn is not None and row.random is not None:
        yield found(
            "features",
            row.model,
            "The features of **{{ m }}**, trained on {{ row.learned_from }} "
            "({{ row.title|lower }}) for {{ n }} epoch{{ n|s }}, reach a k-NN accuracy of "
            "{{ effect }}. With random weights it was {{ row.random|alone }}, a difference of "
            "{{ row.gain|alone }}"
            "{% if not better %}, which is not significant{% endif %}. "
            "Each held-out image is classified by its {{ row.neighbours }} nearest of "
            "{{ row.bank }} training images.",
            row.knn,
            kind="answer",
            place="features",
            given={
                "row": row,
                "m": row.model,
                "better": above(row.gain, 0.0),
                "n": len(record.history),
            },
            headline="{% if better %}"
            "{{ m }} learned classes from {{ row.learned_from }}: k-NN accuracy "
            "{{ effect|value }}, from {{ row.random|value }}"
            "{% else %}"
            "The features of {{ m }} are no better than those of random weights"
            "{% endif %}",
        )
    if row.information is not None:
        because = "information about the image in its teacher's outputs"
        claim = judge("collapse", row.model, row.information, "collapse", because=because)
        says = say(
            "{% if state == 'fail' %}"
            "**{{ m }}** has **collapsed**, or has not begun to learn: its teacher's output is "
            "nearly the same for every image, with {{ effect }} of information about the image."
            "{% if not centred %} The outputs were not centred (`centring=false`), so that one of "
            "them can dominate for all images.{% endif %}"
            "{% else %}"
            "**{{ m }}** has not collapsed: its teacher's outputs hold {{ effect }} of "
            "information about the image."
            "{% endif %}",
            state=claim.state,
            m=row.model,
            effect=row.information,
            centred=row.settings.get("centring", True),
        )
        claim = replace(claim, place="teacher", kind="answer", says=says)
        yield replace(claim, next_step=next_step(claim, _as_models_config(record)))


def _as_models_config(record: TrainRecord) -> Config:
    """Return the config of a run on the trained model, which is the training's folder."""
    options = {
        "model": str(record.folder),
        "model_options": {"model_file": record.options.get("model_file")},
        "data": record.options.get("data"),
        "run": record.options.get("run"),
    }
    return replace(record.config, options=options)


def _pair_claims(record: TrainRecord) -> Iterator[Claim]:
    """Yield the pairs of models that differ significantly, and always the student and the model
    without a teacher.
    """
    scores = {score.model: score for score in record.scores}
    for row in record.pairs:
        better = scores[row.first]
        other = scores[row.second]
        if row.gain(row.first).value < 0:
            better, other = other, better
        is_answer = {better.role, other.role} == {"student", "without a teacher"}
        if row.decided or is_answer:
            yield _pair_claim(row, better, other, is_answer=is_answer)


def _pair_claim(row: PairRow, better: ScoreRow, other: ScoreRow, *, is_answer: bool) -> Claim:
    return found(
        "comparison",
        f"{row.first} and {row.second}",
        "{% if row.decided %}"
        "{{ better }} classifies more held-out images correctly than {{ other }}: "
        "{{ better_accuracy|value }} compared with {{ other_accuracy|value }}, {{ effect }} more "
        "(McNemar's exact test, p = {{ row.p_holm|number }}){{ effect|borderline(row.p_holm) }}."
        "{% else %}"
        "The accuracies of {{ better }}, {{ better_accuracy|value }}, and {{ other }}, "
        "{{ other_accuracy|value }}, do not differ significantly: {{ effect }}, p = "
        "{{ row.p_holm|number }}{{ effect|borderline(row.p_holm) }}."
        "{% endif %}",
        row.gain(better.model),
        p=row.p_holm,
        kind="answer" if is_answer else "comparison",
        place="beside",
        given={
            "better": _with_role(better),
            "other": _with_role(other),
            "better_accuracy": better.accuracy,
            "other_accuracy": other.accuracy,
            "row": row,
        },
    )


def _with_role(score: ScoreRow) -> Marked:
    """Return a model's name in bold, with its role in the distillation."""
    return Marked(say("**{{ s.model }}**{% if s.role %} ({{ s.role }}){% endif %}", s=score))


def unknown(record: TrainRecord) -> Iterator[str]:
    """Yield what could overturn the result, the most serious first."""
    if not record.scores:
        return
    score = record.scores[0]
    if not has_enough_images(record):
        yield _too_few_images(record)
    yield say(
        "{{ score.model }} was trained once, with one seed. The interval only covers the choice of "
        "{{ score.accuracy.n }} test images; another seed may give an accuracy outside it.",
        score=score,
    )
    yield from trained(record.training)
    yield from not_equal(record.pairs)
    if score.best is not None and score.best.value > score.accuracy.value:
        yield say(
            "The best epoch reached {{ best|value }}. It was chosen on the test images, so this "
            "number is optimistic and not the result.",
            best=score.best,
        )
    yield from _about_length(record)


def _too_few_images(record: TrainRecord) -> str:
    accuracies = []
    for score in record.scores:
        accuracies.append(say("{{ s.model }} {{ s.accuracy|alone }}", s=score))
    return say(
        "{{ n }} test image{{ n|s }} {{ n|are }} too few for a claim: {{ accuracies }}.",
        n=record.scores[0].accuracy.n,
        accuracies=listed(accuracies),
    )


def _about_length(record: TrainRecord) -> Iterator[str]:
    """Yield why a longer training might give another result."""
    epochs = len(record.history)
    if record.history and last_tenth(record.history) is None:
        yield "The test images were evaluated once, so a further rise of accuracy is not known."
    elif 0 < epochs < _SHORT and has_enough_images(record) and record.setup:
        yield say(
            "{% if level %}"
            "Accuracy levelled off as the learning rate fell from {{ peak|number }} to "
            "{{ end|number }}"
            "{% else %}"
            "{{ n }} epochs are few"
            "{% endif %}; "
            "a longer training was not tried.",
            n=epochs,
            level=state_of(record) == "level",
            end=record.history[-1].learning_rate,
            peak=max(row.learning_rate for row in record.history),
        )
