"""From the names of classes to the embeddings of their prompts: what makes a classifier of a language-image model.

A class is the mean of the embeddings of its prompts, one a template, each of length 1, scaled to length 1 again
(Radford 2021, section 3.1.4). One template is an ensemble of one.
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import InputError
from vitlens.labels import imagenet_classes
from vitlens.models.language_image import TextTower, text_tower, with_prompts
from vitlens.models.model import Model

PHOTO: Final = ("a photo of a {}.",)
PLACE: Final = "{}"  # of the class in a template

ByTemplate = Float[Tensor, "templates classes dim"]


def classified(
    model: Model,
    classes: Sequence[str],
    *,
    templates: Sequence[str] = PHOTO,
    names: Sequence[str] | None = None,
) -> Model:
    """The model as a classifier of these classes; names: what the prompts call them (default: see `spoken`).

    Raises UnsupportedError for a model without a text tower, InputError for a template without {}.
    """
    tower = text_tower(model)
    each = by_template(tower, names or spoken(classes), templates, device=model.device)
    return with_prompts(model, tuple(classes), joined(each))


def by_template(
    tower: TextTower, names: Sequence[str], templates: Sequence[str], *, device: torch.device | str = "cpu"
) -> ByTemplate:
    """Embeddings of length 1 of every class in every template. Raises InputError for a template without {}."""
    for template in templates:
        if PLACE not in template:
            raise InputError(
                f"expected {PLACE} in a template, in place of the class, found {template!r}; e.g. {PHOTO[0]!r}"
            )
    if not templates or not names:
        raise InputError(f"expected templates and classes, found {len(templates)} and {len(names)}")
    texts = [template.replace(PLACE, name) for template in templates for name in names]
    found = tower.embed(texts, device=device)
    return found.view(len(templates), len(names), -1)


def joined(each: ByTemplate) -> Float[Tensor, "classes dim"]:
    """The ensemble of all templates: the mean of each class, of length 1."""
    return F.normalize(each.mean(0), dim=-1)


def spoken(classes: Sequence[str]) -> tuple[str, ...]:
    """Classes as one says them: ImageNet's in words that tell them apart, others without underscores."""
    if tuple(classes) == imagenet_classes():
        from vitlens.models.open_clip_library import imagenet_prompt_names

        return imagenet_prompt_names()
    return tuple(name.replace("_", " ").strip() for name in classes)
