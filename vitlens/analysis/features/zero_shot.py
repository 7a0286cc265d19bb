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

    model: the alias of the model.
    embeddings (batch, dim): the embeddings of the images, of any length.
    labels (batch,): the classes of the images.
    classes (templates, classes, dim): the embeddings of the classes with each template.
    templates: the templates.
    groups (batch,): the source of each image, for the intervals.
    seed: the seed of the intervals.
    """
    unit = F.normalize(embeddings.to(classes), dim=-1)

    def correct_with(class_embeddings: Tensor) -> Tensor:
        """Return True for images that are classified correctly by these embeddings of classes."""
        predictions = (unit @ class_embeddings.T).argmax(-1)
        return predictions.cpu() == labels.cpu()

    with_ensemble = correct_with(ensemble(classes))
    with_template = [correct_with(class_embeddings) for class_embeddings in classes]
    ensemble_accuracy = accuracy(with_ensemble, groups=groups)
    rows = [TemplateRow(model=model, template=ENSEMBLE, accuracy=ensemble_accuracy)]
    groups_on_cpu = None if groups is None else groups.cpu()
    p_values = [
        paired_test(correct, with_ensemble, groups=groups_on_cpu) for correct in with_template
    ]
    for template, correct, p, p_holm in zip(templates, with_template, p_values, holm(p_values)):
        row = TemplateRow(
            model=model,
            template=template,
            accuracy=accuracy(correct, groups=groups),
            gain=accuracy_difference(correct, with_ensemble, groups=groups_on_cpu, seed=seed),
            p=p,
            p_holm=p_holm,
        )
        rows.append(row)
    return tuple(rows)


def chosen_templates(words: Sequence[str], sets: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the templates that words stand for, without repeats.

    words: names of sets, and templates with {} in place of the class (PLACE).
    sets: the templates of each set by its name.

    Raises InputError for a word that is neither a set nor a template.
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
