"""The requirement of a classifier."""

from vitlens.errors import UnsupportedError, argument
from vitlens.models.language_image import is_language_image
from vitlens.models.model import Model
from vitlens.models.requirement import requirement


@requirement("classifier", quick=True)
def require_classifier(model: Model) -> None:
    """Raise UnsupportedError, with how to add a classifier, for a model that has none."""
    if model.has_classifier:
        return
    if is_language_image(model):
        advice = (
            f"name the classes with {argument('classes', flag='classes FILE')} "
            "(vitlens.zero_shot in Python)"
        )
    else:
        advice = (
            f"add a head with vitlens train {model.provenance.name} --freeze-backbone --data DATA"
        )
    raise UnsupportedError(
        f"expected logits of classes, found features: {model.alias} has no classifier; {advice}"
    )
