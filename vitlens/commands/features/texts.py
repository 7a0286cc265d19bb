"""Language-image models: zero-shot classification, and the relevance of images for prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.chain import require_chain
from vitlens.analysis.attention.methods import relevance
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.rows import TemplateRow
from vitlens.analysis.features.zero_shot import chosen_templates, template_rows
from vitlens.commands.features.images import Subject, batch_of, names_of
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import PromptRow
from vitlens.commands.run.progress import progress
from vitlens.errors import ModelError
from vitlens.models.language_image import (
    PHOTO,
    PLACE,
    by_template,
    has_prompts,
    has_text_tower,
    is_language_image,
    prompt_names,
    similarities,
    text_tower,
    with_prompts,
    with_text,
)
from vitlens.models.model import Model
from vitlens.names import TEMPLATE_SETS

_CLASS: Final = "{}"  # placeholder of the class in a template
_BATCH: Final = 64  # images
_DEFAULT_TEMPLATES: Final = FeaturesOptions.templates


def require_texts(models: Sequence[Model], options: FeaturesOptions) -> None:
    """Raise an error if prompts or templates are given that models cannot read.

    At least one model must have a text tower, and each text tower must have a tokenizer.
    """
    has_templates = options.templates != _DEFAULT_TEMPLATES
    with_texts = [model for model in models if has_text_tower(model)]
    if (options.prompts or has_templates) and not with_texts:
        text_tower(models[0])  # raises an error that names models with a text tower
    for model in with_texts:
        if options.prompts:
            text_tower(model).tokens(list(options.prompts))  # raises without a tokenizer
            require_chain(model)
        if has_templates:
            texts = [template.replace(_CLASS, "thing") for template in _templates(options)]
            text_tower(model).tokens(texts)


def _templates(options: FeaturesOptions) -> tuple[str, ...]:
    """Return the templates of the options, each of which names a set, a file, or is a template."""
    names: list[str] = []  # of sets, and templates
    for name in options.templates:
        file = Path(name)
        if name not in TEMPLATE_SETS and _CLASS not in name and file.is_file():
            lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
            names += [line for line in lines if line]
        else:
            names.append(name)
    # open_clip is imported only if one of its sets is named: else its sets stay empty, as their
    # names must be known
    sets: dict[str, Sequence[str]] = dict.fromkeys(TEMPLATE_SETS, ())
    sets_of_open_clip = set(TEMPLATE_SETS) - {"photo"}
    if not sets_of_open_clip.isdisjoint(names):
        from vitlens.models.sources.open_clip import template_sets

        sets.update(template_sets())
    sets["photo"] = PHOTO
    return chosen_templates(names, sets)


@dataclass(frozen=True)
class ZeroShot:
    """The zero-shot accuracy of the ensemble of templates and of each template.

    rows: the ensemble first.
    reason: why there are no rows; "" for a model without a text tower or for images without labels,
        where none are expected.
    """

    rows: tuple[TemplateRow, ...] = ()
    reason: str = ""

    def fields(self, classes: int) -> dict[str, Any]:
        """Return the fields of FeaturesRow about zero-shot classification among `classes`."""
        if not self.rows:
            return {"no_zero_shot": self.reason}
        ensemble = self.rows[0]
        return {"zero_shot": ensemble.accuracy, "candidates": classes, "chance": 1 / classes}


def classify_zero_shot(subject: Subject, test: Features) -> ZeroShot:
    """Classify the test images by the names of their classes."""
    split = subject.test
    if not has_text_tower(subject.model) or split.labels is None or not split.classes:
        return ZeroShot()
    try:
        templates = _templates(subject.options)
        embeddings = _embed_classes(subject, templates)
    except ModelError as error:  # no tokenizer; with --prompt an error was raised before
        return ZeroShot(reason=str(error))
    rows = template_rows(
        subject.alias,
        _embed_images(subject, test),
        split.labels,
        embeddings,
        templates,
        groups=split.groups,
        seed=subject.seed,
    )
    return ZeroShot(rows)


def unknown_words_note(subject: Subject) -> str:
    """Return a note on words of the prompts that the text tower was not trained on; "" for none."""
    if not has_text_tower(subject.model):
        return ""
    texts = list(subject.options.prompts)
    if subject.test.labels is not None and subject.test.classes:
        texts += [*_templates(subject.options), *prompt_names(subject.test.classes)]
    unknown = text_tower(subject.model).unknown_words(texts)
    if not unknown:
        return ""
    words = ", ".join(repr(word) for word in unknown)
    return (
        f"The captions on which {subject.alias} was trained lack {words}: its text tower has not "
        "learned what that means"
    )


def _embed_images(subject: Subject, test: Features) -> Tensor:
    """Return the embeddings of the test images in the space of images and texts.

    The outputs of a model without prompts are such embeddings. One with prompts is run again
    without them.
    """
    model = subject.model
    outputs_embeddings = is_language_image(model) and not has_prompts(model)
    if outputs_embeddings:
        return test.logits
    image_tower = with_prompts(model, (), None)  # no prompts: its outputs are embeddings
    embeddings = []
    for batch in subject.test.batches(subject.options.run.batch_size or _BATCH):
        with torch.no_grad():
            embeddings.append(image_tower(batch.images.to(model.device)).float().cpu())
    return torch.cat(embeddings)


def _embed_classes(subject: Subject, templates: Sequence[str]) -> Tensor:
    """Return the embeddings of all classes by each template, on the CPU."""
    model = subject.model
    tower = text_tower(model)
    names = prompt_names(subject.test.classes)
    embeddings = []
    what = f"Reading prompts by {subject.alias}"
    with progress(
        what, len(templates), unit="templates", quiet=subject.options.run.quiet
    ) as advance:
        for template in templates:
            embeddings.append(by_template(tower, names, [template], device=model.device).cpu())
            advance(1)
    return torch.cat(embeddings)


@dataclass(frozen=True)
class PromptRelevance:
    """The relevance of drawn images for each prompt.

    rows: the similarity of each image and prompt.
    maps: (images, prompts, rows, columns), the relevance of patches for this similarity.
    """

    rows: tuple[PromptRow, ...] = ()
    maps: NDArray[np.floating] | None = None


def explain_prompts(subject: Subject) -> PromptRelevance:
    """Return the relevance of the drawn images for each prompt.

    Returns nothing without prompts or a text tower.
    """
    model = subject.model
    prompts = subject.options.prompts
    if not prompts or not has_text_tower(model):
        return PromptRelevance()
    indices = subject.indices_to_draw
    images = batch_of(subject.to_draw, indices, model)
    classifier = with_text(model, prompts, templates=(PLACE,))
    maps = []
    for prompt_index in range(len(prompts)):  # the prompts are the classes of the classifier
        targets = torch.full((len(indices),), prompt_index, device=model.device)
        maps.append(relevance(classifier, images, targets=targets).float().cpu())
    with torch.no_grad():
        cosines = similarities(classifier, classifier(images)).cpu()  # (images, prompts)
    rows = []
    for image_index, name in enumerate(names_of(subject.to_draw, indices)):
        for prompt_index, prompt in enumerate(prompts):
            row = PromptRow(
                model=subject.alias,
                image=image_index,
                name=name,
                prompt=prompt,
                cosine=float(cosines[image_index, prompt_index]),
            )
            rows.append(row)
    return PromptRelevance(tuple(rows), torch.stack(maps, 1).numpy())
