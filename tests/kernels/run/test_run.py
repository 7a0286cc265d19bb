"""A run of a command: when its images are read."""

import pytest

import vitlens
from vitlens.commands.predict.options import PredictOptions
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.run import Run
from vitlens.errors import VitlensError


def options(**more):
    return PredictOptions("vit-digits", run=RunOptions(device="cpu", quiet=True), **more)


def bundled(_options):
    """Return a model in place of those that a command line names."""
    return (vitlens.load("vit-digits"),)


def test_images_are_read_when_they_are_first_used():
    run = Run("predict", options(images=("missing.png",)), load=bundled)
    assert run.model.alias == "vit-digits"
    with pytest.raises(VitlensError, match=r"missing\.png"):
        _ = run.split


def test_other_images_take_the_place_of_those_that_were_not_read():
    run = Run("predict", options(images=("missing.png",)), load=bundled)
    digits = Run("predict", options(data="digits")).split.limit(3)
    assert len(run.with_images([digits]).shares[0]) == 3


@pytest.mark.parametrize("more", [{"data": "dgits"}, {"data": "digits", "images": ("a.png",)}])
def test_wrong_data_are_refused_before_a_model_is_loaded(more):
    def load(_options):
        raise AssertionError("a model is loaded")

    with pytest.raises(VitlensError):
        Run("predict", options(**more), load=load)
