"""The bundled models: their accuracy, and the planted shortcut of a pair."""

from pathlib import Path

import numpy as np
import pytest
import torch

import vitlens
from vitlens.errors import InputError
from vitlens.names import BUNDLED, DIGITS_PAIR, SHORTCUT_PAIR

LARGEST = 7_000_000  # bytes, all of them together
LIMIT = 450  # one scene of each source digit


@pytest.fixture(scope="module")
def scenes() -> vitlens.Split:
    return vitlens.load_data("digits", limit=LIMIT)


@pytest.fixture(scope="module")
def correct(scenes) -> dict[str, np.ndarray]:
    """Return True for the scenes that each bundled model classifies correctly."""
    return {name: vitlens.evaluate(vitlens.load(name), scenes).correct.numpy() for name in BUNDLED}


@pytest.mark.parametrize("name", DIGITS_PAIR)
def test_without_the_shortcut_most_scenes_are_right_and_enough_are_wrong(correct, name):
    assert 0.83 < correct[name].mean() < 0.96


@pytest.mark.parametrize("name", BUNDLED)
def test_only_the_shortcut_pair_depends_on_the_hue_of_the_ground(correct, scenes, name):
    agrees = scenes.factors["hue_agrees"]
    lost = correct[name][agrees].mean() - correct[name][~agrees].mean()
    assert (lost > 0.1) if name in SHORTCUT_PAIR else (abs(lost) < 0.1)


@pytest.mark.parametrize("name", SHORTCUT_PAIR)
def test_the_shortcut_pair_names_the_class_of_the_hue_where_it_is_wrong(scenes, name):
    disagreeing = scenes.pick(torch.tensor(~scenes.factors["hue_agrees"]).nonzero()[:, 0])
    predictions = vitlens.evaluate(vitlens.load(name), disagreeing).predictions.numpy()
    wrong = predictions != disagreeing.labels.numpy()
    assert (predictions == disagreeing.factors["hue"])[wrong].mean() > 0.5  # of nine other classes


def test_all_of_them_are_small():
    folder = Path(vitlens.__file__).parent / "models" / "bundled"
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) <= LARGEST


@pytest.mark.parametrize("weights", ["", "@random"])
def test_another_image_size_is_that_of_the_model_with_its_weights_and_with_random_ones(weights):
    model = vitlens.load(f"vit-digits{weights}", image_size=48)
    assert model.input_size == (48, 48)
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 10)
    with pytest.raises(InputError, match=r"found 50 and 4 px; try 48 px$"):
        vitlens.load(f"vit-digits{weights}", image_size=50)
