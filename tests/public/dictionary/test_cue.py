"""A cue that points to a class is tested on the log-odds of that class, not of the label."""

from functools import cache

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.planted_dictionary import DIM, DIRECTIONS, PATCH, PLACE, SIZE, sparse_images
from tests.kit.tiny import ours
from vitlens import Model

CUE = 0  # the direction of the cue
POINTS_TO = 2  # class "c"
HAS_CUE = torch.arange(80) // 5 % 2 == 1
LABELS = torch.arange(80) % 5  # independent of the cue


def model_with_a_cue() -> Model:
    """Return a model whose logit of class "c" is the cue in its tokens; other logits are 0."""
    directions = torch.nn.functional.normalize(
        torch.randn(DIRECTIONS, DIM, generator=torch.Generator().manual_seed(1)), dim=1
    )
    model = ours(size=SIZE, patch_size=(PATCH, PATCH), dim=DIM, depth=1, pooling="mean")
    state = model.module.state_dict()
    state["patch_embed.proj.weight"].copy_(directions.T.reshape(DIM, 3, PATCH, PATCH))
    for name in ("patch_embed.proj.bias", "pos_embed", "head.weight", "head.bias"):
        state[name].zero_()
    for name in ("attn.proj", "mlp.fc2"):  # the block passes its tokens on
        state[f"blocks.0.{name}.weight"].zero_()
        state[f"blocks.0.{name}.bias"].zero_()
    state["head.weight"][POINTS_TO] = 4 * directions[CUE]
    return model


def images_with_a_cue() -> Tensor:
    """Return images in half of which the cue is in every patch."""
    images = sparse_images(len(HAS_CUE), 0)
    numbers = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # views of the patches
    numbers[:, 0, :, :, 0, 0] = HAS_CUE.float()[:, None, None]
    return images


@cache
def latents_of(attribute: str) -> list[object]:
    """Return the tested latents that are labelled with the cue under this name."""
    model = model_with_a_cue()
    images = images_with_a_cue()
    plan = vitlens.DictionaryPlan(k=4, expansion=DIRECTIONS // DIM, tokens=60_000)
    sae = vitlens.fit_sae(model, images, PLACE, plan)
    names = vitlens.name_latents(sae, images, LABELS, attributes={attribute: HAS_CUE}, tested=4)
    return [row for row in names.latents if row.word is not None]


def test_a_latent_of_a_cue_is_confirmed_by_the_class_that_the_cue_points_to():
    rows = latents_of("cue = c")
    assert {row.points_to for row in rows} == {"c"}
    confirmed = [row for row in rows if row.state == "confirmed"]
    assert confirmed
    assert all(row.margin.low > 0 for row in confirmed)
    assert all(row.gain.value > 0 for row in confirmed)


@pytest.mark.parametrize("attribute", ["cue: c", "cue = z"])
def test_an_attribute_that_names_no_class_is_tested_on_the_label(attribute):
    rows = latents_of(attribute)
    assert {row.points_to for row in rows} == {None}
    assert not [row for row in rows if row.state == "confirmed"]
