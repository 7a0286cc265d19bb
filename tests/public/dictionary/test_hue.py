"""In a model trained with a hue that gives the class away, latents carry the hue: without them, it
errs less by the hue, and other latents do not do that.
"""

from typing import NamedTuple

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import vitlens

PLACE = "blocks.0.residual"
CARRIES = 0.95  # AUC of a latent for one of the ten hues


class Answers(NamedTuple):
    """The share of conflicting images answered by their hue, and the errors and answers changed."""

    by_hue: float
    fixed: int  # of the errors by the hue
    broken: int  # of the right answers


class Shortcut(NamedTuple):
    """Images with a planted hue, a dictionary of the model that was trained with it, and what each
    of its latents has in each image (images, patches, latents).
    """

    sae: vitlens.Dictionary
    test: vitlens.Split
    hue: Tensor
    images: Tensor
    latents: Tensor

    def areas(self, latent: int) -> list[float]:
        """Return the AUC of a latent for each hue."""
        scores = self.latents[..., latent].mean(1).numpy()
        return [roc_auc_score(self.hue == number, scores) for number in range(10)]


@pytest.fixture(scope="module")
def shortcut() -> Shortcut:
    model = vitlens.load("vit-shortcut")
    test = vitlens.load_data("digits-shortcut", part="test", limit=240)
    train = vitlens.load_data("digits-shortcut", part="train", limit=240)
    plan = vitlens.DictionaryPlan(k=16, expansion=4, tokens=120_000)
    sae = vitlens.fit_sae(model, train, PLACE, plan)
    (batch,) = test.batches(len(test))
    with sae.places():
        latents = vitlens.capture(model, batch.images, f"{PLACE}.latents")[f"{PLACE}.latents"]
    hue = torch.tensor(test.factors["hue"]).long()
    return Shortcut(sae, test, hue, batch.images, latents)


@pytest.mark.slow
def test_latents_that_carry_the_hue_are_found_and_without_them_hue_errors_are_fixed(
    shortcut,
):
    sae = shortcut.sae
    model = sae.model
    hue = shortcut.hue
    labels = shortcut.test.labels.long()

    def predictions() -> Tensor:
        with torch.no_grad():
            return model(shortcut.images).argmax(1)

    clean = predictions()
    conflict = hue != labels
    by_hue = conflict & (clean == hue)

    def answers(changed: Tensor) -> Answers:
        return Answers(
            float((changed == hue)[conflict].double().mean()),
            int((changed == labels)[by_hue].sum()),
            int((changed != labels)[clean == labels].sum()),
        )

    mean = shortcut.latents.mean(0)
    carriers = []
    others = []
    for latent in range(len(sae)):
        if max(shortcut.areas(latent)) > CARRIES:
            carriers.append(latent)
        elif shortcut.latents[..., latent].any():
            others.append(latent)

    def without(numbers: list[int]) -> Answers:
        def change(values: Tensor) -> Tensor:
            changed = values.clone()
            changed[..., numbers] = mean[:, numbers]
            return changed

        with sae.places(), vitlens.intervene(model, {f"{PLACE}.latents": change}):
            return answers(predictions())

    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(0))
    control = [others[index] for index in order[: len(carriers)].tolist()]
    removed = without(carriers)
    unrelated = without(control)
    assert len(carriers) >= 10
    assert removed.by_hue < answers(clean).by_hue - 0.05
    assert removed.fixed > removed.broken
    assert removed.by_hue < unrelated.by_hue
    assert removed.fixed - removed.broken > unrelated.fixed - unrelated.broken


@pytest.mark.slow
def test_latents_of_the_hue_are_confirmed_by_the_class_that_the_hue_points_to(shortcut):
    sae = shortcut.sae
    carriers = [number for number in range(len(sae)) if max(shortcut.areas(number)) > CARRIES]
    confirmed = {}
    for title in ("hue = {}", "hue: {}"):  # the first names a class, the second does not
        attributes = {title.format(number): shortcut.hue == number for number in range(10)}
        names = vitlens.name_latents(
            sae, shortcut.test, attributes=attributes, tested=1, chosen=carriers
        )
        confirmed[title] = [row for row in names.latents if row.state == "confirmed"]
    assert len(confirmed["hue = {}"]) > len(confirmed["hue: {}"])
    assert all(row.word.startswith("hue") for row in confirmed["hue = {}"])
