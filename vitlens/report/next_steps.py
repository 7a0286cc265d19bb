"""Next steps of failing or surprising claims: one hypothesis, and the command that tests it.

To add one, write an entry under the question of the claims. A test parses every command. Commands
have placeholders:
- {model}: the first model that a claim is about;
- {models}: all models that it is about;
- {data}: the options that name the images of the run.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from vitlens.record import Config
from vitlens.report.claims import Claim
from vitlens.report.escape import as_code
from vitlens.report.prose import Marked
from vitlens.report.typed_options import data_words, is_random, model_options, model_words

_FAILING: Final = ("warn", "fail")
# commands that need labels, and take images without labels with --predicted
_PREDICTED: Final = ("ablate", "attack", "audit", "stats")
# commands for which one phrase is enough
_WITHOUT_CLASSES: Final = ("look", "explain", "profile", "rollout", "attention", "stats")
_UNLABELLED: Final = ("explain", "profile", "rollout", "attention")  # commands that need no labels
# the options of models that `vitlens train` has, too
_OF_TRAIN: Final = frozenset(("weights", "model_file", "image_size"))


@dataclass(frozen=True)
class NextStep:
    """One hypothesis and the command that tests it.

    hypothesis: a sentence without a full stop.
    command: the command line, with placeholders.
    refuted_by: the outcome that speaks against the hypothesis, "" if that is obvious.
    families: the families of models that the run must have for it.
    """

    hypothesis: str
    command: str
    refuted_by: str = ""
    families: tuple[str, ...] = ()


_AUDIT: Final = "vitlens audit {model} {data}"
_STRONGER: Final = NextStep(
    "a stronger attack breaks more of these images",
    "vitlens attack {models} {data} --attack auto",
    refuted_by="the accuracy under attack stays as high",
)
_MASKED: Final = NextStep(
    "attacks that need no gradients break more images than these",
    "vitlens attack {model} {data} --attack noise,square",
)
_SPARE: Final = NextStep(
    "the model is as good without these heads", "vitlens ablate {model} {data}"
)
_EVERY_MAP: Final = NextStep(
    "another method passes every check",
    "vitlens explain {model} {data} --method all --verify",
    refuted_by="every method fails a check",
)
NEXT_STEPS: Final[Mapping[str, NextStep]] = MappingProxyType(
    {
        "accuracy": NextStep(
            "other seeds rank a ViT and a CNN differently",
            "vitlens study --kind architecture {data} --seeds 3",
            refuted_by="the same model leads for every seed",
            families=("vit", "cnn"),
        ),
        "which is better": NextStep(
            "the difference comes from the number of training images",
            "vitlens study --kind data {data}",
            refuted_by="the difference is as large for every number of images",
        ),
        "calibration": NextStep(
            "a few predicted classes cause most of the error", "vitlens evaluate {model} {data}"
        ),
        "confidence": NextStep(
            "its confidence is wrong on hard images only", "vitlens evaluate {model} {data}"
        ),
        "confidence by class": NextStep(
            "this class is confused with one other class", "vitlens evaluate {model} {data}"
        ),
        "worst class": NextStep(
            "its features separate this class, its classifier does not",
            "vitlens features {model} {data}",
        ),
        "robustness": _STRONGER,
        "difference under attack": _STRONGER,
        "why robustness differs": NextStep(
            "the same candidates account for it under stronger attacks",
            "vitlens attack {models} {data} --attack auto",
        ),
        "attack": _STRONGER,
        "self-checks": _MASKED,
        "masked gradients": _MASKED,
        "transfer beats the attack": _MASKED,
        "common corruptions": NextStep(
            "the loss comes from corruptions that resemble no training image",
            "vitlens study --kind data {data}",
        ),
        "consistency": NextStep(
            "the changed predictions are errors", "vitlens evaluate {model} {data}"
        ),
        "corruption": NextStep(
            "the difference depends on the patch size",
            "vitlens study --kind patch-size {data}",
            refuted_by="the loss is the same for every patch size",
        ),
        "disturbance": NextStep(
            "the difference comes from architecture, not from one training",
            "vitlens study --kind architecture {data}",
        ),
        "disturbed images": NextStep(
            "the difference comes from architecture, not from one training",
            "vitlens study --kind architecture {data}",
        ),
        "attention health": _SPARE,
        "dead heads": _SPARE,
        "uniform heads": _SPARE,
        "fixed place": _SPARE,
        "redundant heads": NextStep(
            "either head takes over when the other is removed",
            "vitlens ablate {model} {data} --units head",
        ),
        "hidden by the mean": NextStep(
            "the head's output must differ from image to image",
            "vitlens ablate {model} {data} --replace mean,resample",
        ),
        "head": NextStep(
            "it matters to one class more than to others", "vitlens stats {model} {data} --names"
        ),
        "sinks": NextStep(
            "registers take over the attention of sinks", "vitlens study --kind registers"
        ),
        "maps": _EVERY_MAP,
        "explanation": _EVERY_MAP,
        "maps that ignore the weights": _EVERY_MAP,
        "maps below a baseline": _EVERY_MAP,
        "uniform maps": _EVERY_MAP,
        "shortcut": NextStep(
            "training on images in which this cue is unrelated to the class removes these errors",
            "vitlens train {model} {data} --set randaugment=2",
            refuted_by="errors still disappear when the cue is removed",
        ),
        "classifier": NextStep(
            "training only the classifier again closes the gap",
            "vitlens train {model} {data} --freeze-backbone",
        ),
        "features": NextStep(
            "the features differ before the last layer, too", "vitlens features {models} {data}"
        ),
        "why it fails": NextStep(
            "the same property separates another model's errors", "vitlens compare {models} {data}"
        ),
        "attention on errors": NextStep(
            "errors come from a few heads, without which accuracy rises",
            "vitlens ablate {model} {data}",
        ),
        "change": NextStep(
            "the change helps another model as well", "vitlens compare {models} {data}"
        ),
        "errors": NextStep(
            "changing this property fixes errors", "vitlens compare {models} {data}"
        ),
        "timings": NextStep(
            "other processes on this machine disturbed the timings", "vitlens profile {models}"
        ),
        "steps": NextStep("the walkthrough misreads a part of this model", _AUDIT),
        "collapse": NextStep(
            "its features do not separate classes", "vitlens features {model} {data}"
        ),
        "regression": NextStep(
            "some classes got worse, and others did not", "vitlens evaluate {models} {data}"
        ),
        "accuracy lost to a corruption": NextStep(
            "the same holds for trainings with other seeds",
            "vitlens study --kind pretraining --seeds 5",
        ),
    }
)


def needs_a_next_step(claim: Claim) -> bool:
    """Return True if a claim fails or surprises."""
    return claim.state in _FAILING or claim.kind == "hidden fault"


def next_step(claim: Claim, config: Config) -> str:
    """Return the hypothesis that a claim leads to and the command that tests it, as one sentence.

    It is "" if there is no entry for the question. It is also "" if the command needs labels, and
    the images of the run have none, or if the hypothesis is about other families of models.
    """
    entry = NEXT_STEPS.get(claim.question) or NEXT_STEPS.get(_family(claim.question))
    if entry is None:
        return ""
    return words_of(entry, claim.subject, config)


def words_of(entry: NextStep, subject: str, config: Config) -> str:
    """Return a hypothesis and the command that tests it, as one sentence.

    It is "" if the command cannot be run on the images, or the run has no models of its families.
    """
    if not {model.family for model in config.models}.issuperset(entry.families):
        return ""
    command = command_of(entry, subject, config)
    if not command:
        return ""
    return sentence_of(entry.hypothesis, command, entry.refuted_by)


def sentence_of(hypothesis: str, command: str, refuted_by: str = "") -> str:
    """Return a hypothesis and the command that tests it, as one sentence."""
    sentence = f"Hypothesis: {hypothesis}. Test it: {Marked(as_code(command))}"
    if refuted_by:
        sentence += f". It is refuted if {refuted_by}."
    return sentence


def _family(question: str) -> str:
    """Return the first word of a question such as "corruption: noise" or "head L3.H1"."""
    return question.partition(":")[0].partition(" ")[0]


def command_of(entry: NextStep, subject: str, config: Config) -> str:
    """Return the command line of a next step for the models and images of a run.

    It is "" if the command cannot be run on them.

    subject: the subject of the claim, one alias or several joined by "and".
    """
    word = entry.command.split()[1]  # the word after "vitlens"
    images = _images(word, config)
    if images is None and "{data}" in entry.command:
        return ""
    first_model, several_models = _models_of(subject, config)
    lacks_models = not first_model and "{model" in entry.command
    if lacks_models or (word == "compare" and len(several_models) != 2):
        return ""
    different_models = list(dict.fromkeys(several_models))
    options = config.options
    if "{model" in entry.command and not _can_load(word, options, different_models):
        return ""
    line = entry.command.format(
        model=shlex.join([*first_model, *model_words(options, first_model)]),
        models=shlex.join([*different_models, *model_words(options, different_models)]),
        data=shlex.join(images or []),
    )
    return " ".join(line.split())  # an empty value leaves two spaces


def _models_of(subject: str, config: Config) -> tuple[list[str], list[str]]:
    """Return the typed models for {model} and for {models} of a command about a subject.

    The first list has one model, or none for a run without models. The second has all models of the
    run if the subject is only one of them, or none.
    """
    typed_models = _typed_models(config)
    all_models = list(typed_models.values())
    subjects = subject.split(" and ")
    subject_models = [name for alias, name in typed_models.items() if alias in subjects]
    several_models = subject_models if len(subject_models) > 1 else all_models
    first_model = (subject_models or all_models)[:1]
    return first_model, several_models


def _can_load(word: str, options: Mapping[str, Any], models: Sequence[str]) -> bool:
    """Return True if a command has the options that load these models of a run."""
    typed_options = model_options(options)
    has_one_phrase = len(typed_options.get("text", ())) == 1
    if has_one_phrase and word not in _WITHOUT_CLASSES:
        return False
    if word == "train":
        return typed_options.keys() <= _OF_TRAIN and not is_random(options, models)
    return True


def _typed_models(config: Config) -> dict[str, str]:
    """Return each model as the user typed it, by its alias."""
    options = config.options
    typed: Sequence[Any] = options.get("models") or []
    if not typed and options.get("model"):
        typed = [options["model"]]
    if len(typed) == 1:  # also where each phrase of --text makes a model of it
        return dict.fromkeys((entry.alias for entry in config.models), _as_short(str(typed[0])))
    if len(typed) == len(config.models):
        return {entry.alias: _as_short(str(name)) for entry, name in zip(config.models, typed)}
    return {entry.alias: entry.name or entry.alias for entry in config.models}


def _as_short(typed: str) -> str:
    """Return a typed model without an alias that repeats its name."""
    alias, _, name = typed.partition("=")
    return name if alias == name else typed


def _images(word: str, config: Config) -> list[str] | None:
    """Return the options that give a command the images of a run; None if it cannot take them.

    - Image files, and runs with --predicted: a command that takes --predicted gets it. Of others,
      those that need no labels take the images, and the rest only a data set with labels.
    - A data set: it has labels unless the run says otherwise, so that every command takes it.

    word: the command.
    """
    options = config.options
    images = list(map(str, options.get("images") or ()))
    words = ["--images", *images] if images else data_words(options)
    if not words:
        return []
    is_predicted = bool(images or options.get("predicted"))
    if word in _PREDICTED and is_predicted:
        return [*words, "--predicted"]
    # --predicted may have been typed for images with labels
    has_labels = not is_predicted or any("labels" in part for part in config.fingerprints)
    if word in _UNLABELLED or (has_labels and not images):
        return words
    return None
