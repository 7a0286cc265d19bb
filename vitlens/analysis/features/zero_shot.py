"""Zero-shot classification by texts, and the accuracy of each prompt template."""

from collections.abc import Mapping, Sequence
from typing import Final

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.features.rows import TemplateRow
from vitlens.errors import InputError, by_caller
from vitlens.models.language_image import (
    PHOTO,
    PLACE,
    ByTemplate,
    ensemble,
)
from vitlens.shapes import Labels
from vitlens.uncertainty import accuracy_difference, holm, paired_test

ENSEMBLE: Final = "ensemble of all"


def template_rows(
    model: str,
    embeddings: Float[Tensor, "batch dim"],
    labels: Labels,
    classes: ByTemplate,
    templates: Sequence[str],
    *,
    groups: Tensor | None = None,
    seed: int = 0,
) -> tuple[TemplateRow, ...]:
    """Return the accuracy of the ensemble of all templates, then of each template.

    model: its alias; embeddings: of the images, of any length; classes: embeddings of the classes
    by template; groups: (batch,) of images that share a source, for the intervals.
    """
    unit = F.normalize(embeddings.to(classes), dim=-1)

    def correct_with(class_embeddings: Tensor) -> Tensor:
        return (unit @ class_embeddings.T).argmax(-1).cpu() == labels.cpu()

    of_ensemble = correct_with(ensemble(classes))
    of_templates = [correct_with(class_embeddings) for class_embeddings in classes]
    rows = [TemplateRow(model, ENSEMBLE, accuracy(of_ensemble, groups=groups))]
    groups_on_cpu = None if groups is None else groups.cpu()
    tests = [paired_test(correct, of_ensemble, groups=groups_on_cpu) for correct in of_templates]
    for template, correct, p, p_holm in zip(templates, of_templates, tests, holm(tests)):
        gain = accuracy_difference(correct, of_ensemble, groups=groups_on_cpu, seed=seed)
        rows.append(TemplateRow(model, template, accuracy(correct, groups=groups), gain, p, p_holm))
    return tuple(rows)


def chosen_templates(words: Sequence[str], sets: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return templates from words, each the name of a set or a template with {}, without repeats.

    Raises InputError for a word that is neither.
    """
    for word in words:
        if word not in sets and PLACE not in word:
            option = by_caller(python="templates=", command="--clip-templates ")
            raise InputError(
                f"expected a template with {PLACE} in place of the class, a file of such lines, or "
                f"one of {', '.join(sets)}, found {word!r}; e.g. {option}{PHOTO[0]!r}"
            )
    templates = list[str]()
    for word in words:
        templates += sets.get(word, (word,))
    return tuple(dict.fromkeys(templates))
