"""The requirements of a classifier, and of one with probabilities.

`requirement` makes an object of each check; calling it adds the commands that the model supports to
the error (see requirement.py).
"""

from vitlens.errors import UnsupportedError, argument, by_caller
from vitlens.models.language_image import is_language_image
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.typed import short


@requirement("classifier", quick=True)
def require_classifier(model: Model) -> None:
    """Raise UnsupportedError, with how to add a classifier, for a model that has none."""
    if model.has_classifier:
        return
    if is_language_image(model):
        advice = (
            f"name phrases with {by_caller(python='model.with_text', command='--text PHRASE')}, or "
            f"the classes with {argument('classes', flag='classes FILE')}"
        )
    else:
        advice = (
            f"add a head with vitlens train {model.provenance.name} --freeze-backbone --data DATA"
        )
    raise UnsupportedError(
        f"expected logits of classes, found features: {model.alias} has no classifier; {advice}"
    )


@requirement("classes", quick=True)
def require_classes(model: Model) -> None:
    """Raise UnsupportedError for a model with fewer than two classes: it has no probabilities."""
    require_classifier.check(model)  # without the list of commands, which runs this check
    if len(model.classes) == 1:
        raise UnsupportedError(
            f"expected at least two classes, found only {short(model.classes[0])!r} of "
            f"{model.alias}, whose probability would always be 1; "
            f"{by_caller(python='give with_text a second phrase', command='add a second --text')}"
        )
