"""Zero-shot classification with a language-image model, and the accuracy of each prompt
template."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.errors import InputError, by_caller
from vitlens.models.language_image import (
    PHOTO,
    PLACE,
    ByTemplate,
    ensemble,
    text_tower,
    with_prompts,
)
from vitlens.models.model import Model
from vitlens.shapes import Labels
from vitlens.uncertainty import Estimate, accuracy_difference, holm, paired_test

ENSEMBLE: Final = "ensemble of all"


class TemplateScore(NamedTuple):
    """The accuracy of a model with one template (or the ensemble of all); gain: minus the
    ensemble's, in points, paired over images (None for the ensemble); p, p_holm: of `paired_test`
    against the ensemble, and corrected.
    """

    template: str
    accuracy: Estimate
    gain: Estimate | None = None
    p: float | None = None
    p_holm: float | None = None


def prompted(model: Model, prompts: Sequence[str]) -> Model:
    """Return a language-image model whose logits are the similarities of an image to each of these
    texts.
    """
    tower = text_tower(model)
    return with_prompts(model, tuple(prompts), tower.embed(list(prompts), device=model.device))


def template_scores(
    embeddings: Float[Tensor, "batch dim"],
    labels: Labels,
    each: ByTemplate,
    templates: Sequence[str],
    *,
    groups: Tensor | None = None,
    seed: int = 0,
) -> tuple[TemplateScore, ...]:
    """Return the accuracy of the ensemble of all templates, then of each template, on the same
    images.

    embeddings: of the images, of any length; groups: (batch,) which images share a source, for the
    intervals.
    """
    unit = F.normalize(embeddings.to(each), dim=-1)

    def correct_with(classes: Tensor) -> Tensor:
        return (unit @ classes.T).argmax(-1).cpu() == labels.cpu()

    of_ensemble = correct_with(ensemble(each))
    corrects = [correct_with(classes) for classes in each]
    scores = [TemplateScore(ENSEMBLE, accuracy(of_ensemble, groups=groups))]
    members = None if groups is None else groups.cpu()
    tests = [paired_test(correct, of_ensemble, groups=members) for correct in corrects]
    for template, correct, p, p_holm in zip(templates, corrects, tests, holm(tests)):
        gain = accuracy_difference(correct, of_ensemble, groups=members, seed=seed)
        scores.append(TemplateScore(template, accuracy(correct, groups=groups), gain, p, p_holm))
    return tuple(scores)


def chosen_templates(words: Sequence[str], sets: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Templates from words, each the name of a set or a template with {}; every template once.

    Raises InputError for a word that is neither.
    """
    for word in words:
        if word not in sets and PLACE not in word:
            option = by_caller(python="templates=", command="--clip-templates ")
            raise InputError(
                f"expected a template with {PLACE} in place of the class, a file of such lines, or "
                "one of "
                f"{', '.join(sets)}, found {word!r}; e.g. {option}{PHOTO[0]!r}"
            )
    return tuple(dict.fromkeys(template for word in words for template in sets.get(word, (word,))))
