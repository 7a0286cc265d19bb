"""Wrong calls of the Python API, as a new user makes them: one line that says what to type."""

# ruff: noqa: ARG005  every call takes a model and images

import numpy as np
import pytest
import torch
from torch import nn

import vitlens
from tests.lens.tiny import images as made
from tests.lens.tiny import ours
from vitlens.errors import InputError, UnknownNameError, VitlensError, nearest


@pytest.fixture(scope="module")
def vit():
    return ours()


@pytest.fixture(scope="module")
def images(vit):
    return made(vit.input_size)


UNTYPED = {
    "images and model exchanged": (lambda vit, images: vitlens.rollout(images, vit), "exchange the two"),
    "exchanged in the lens": (lambda vit, images: vitlens.capture(images, vit, "blocks.0.mlp"), "exchange the two"),
    "exchanged in evaluate": (lambda vit, images: vitlens.evaluate(images, vit), "exchange the two"),
    "a name as model": (lambda vit, images: vitlens.attention("vit-digits", images), r"vitlens\.load\(NAME\)"),
    "a module as model": (lambda vit, images: vitlens.relevance(vit.module, images), r"vitlens\.wrap\(module"),
    "a name in profile": (lambda vit, images: vitlens.profile("vit-digits"), r"vitlens\.load"),
    "a tensor in intervene": (lambda vit, images: vitlens.intervene(images, {}).__enter__(), r"vitlens\.load"),
    "a module to load": (lambda vit, images: vitlens.load(nn.Linear(2, 2)), r"vitlens\.wrap"),
    "an option by place": (lambda vit, images: vitlens.explain(vit, images, "gradcam"), "targets=, method="),
    "a misspelt option": (lambda vit, images: vitlens.rollout(vit, images, head_fusion="max"), "did you mean 'fusion'"),
    "one epsilon": (lambda vit, images: vitlens.attack(vit, images, "predicted", epsilons=0.1), r"epsilons=\[0, 0.1\]"),
    "one batch size": (lambda vit, images: vitlens.profile(vit, batch_sizes=1), r"batch_sizes=\[1, 8\]"),
    "a number as place": (lambda vit, images: vitlens.capture(vit, images, 3), "name of a place, found int"),
    "models in similarity": (lambda vit, images: vitlens.similarity(vit, vit), r"vitlens\.features"),
    "fractions as targets": (lambda vit, images: vitlens.relevance(vit, images, targets=2.0), "whole numbers"),
    "yes as target": (lambda vit, images: vitlens.relevance(vit, images, targets=True), "found True"),
    "a tensor of fractions": (
        lambda vit, images: vitlens.relevance(vit, images, targets=torch.zeros(len(images))),
        "whole numbers",
    ),
    "a list of floats": (lambda vit, images: vitlens.rollout(vit, list(images)), r"torch\.stack"),
    "channels first": (
        lambda vit, images: vitlens.rollout(vit, np.zeros((3, 32, 48), dtype="uint8")),
        r"numpy\.moveaxis",
    ),
    "channels last": (
        lambda vit, images: vitlens.rollout(vit, images[0].permute(1, 2, 0)),
        r"permute\(2, 0, 1\)\[None\]",
    ),
    "one mean": (lambda vit, images: vitlens.wrap(vit.module, image_size=32, mean=0.5, std=0.5), "mean as 3 numbers"),
    "text as size": (
        lambda vit, images: vitlens.wrap(vit.module, image_size="32", mean=(0, 0, 0), std=(1, 1, 1)),
        "image_size as 2 numbers",
    ),
    "no maps": (lambda vit, images: vitlens.show(images, {}), "found none"),
    "a word as maps": (lambda vit, images: vitlens.show(images, "rollout"), "the text 'rollout'"),
    "a model on a board": (lambda vit, images: vitlens.show_board(vit), "found Model"),
    "no attention": (lambda vit, images: vitlens.show_heads(None), r"vitlens\.attention\(model, images\)"),
    "weights without model": (
        lambda vit, images: vitlens.show_heads(vitlens.attention(vit, images), images),
        "model=model",
    ),
    "fewer images": (
        lambda vit, images: vitlens.show_heads(vitlens.attention(vit, images), images[:1], model=vit, image=1),
        "expected the 2 images of the attention, found 1",
    ),
    "maps of arrays": (
        lambda vit, images: vitlens.show(np.zeros((9, 9, 3), dtype="uint8"), torch.rand(2, 2)),
        "model=model",
    ),
}


@pytest.mark.parametrize("call", UNTYPED)
def test_a_wrong_call_is_answered_in_one_line(call, vit, images):
    make, message = UNTYPED[call]
    with pytest.raises(VitlensError, match=message) as told:
        make(vit, images)
    assert isinstance(told.value, InputError)
    assert "\n" not in str(told.value)


def test_targets_as_arrays_and_scalars_are_those_of_a_list(vit, images):
    expected = vitlens.relevance(vit, images, targets=[1, 1])
    for targets in (np.array([1, 1]), torch.tensor([1, 1]), torch.tensor(1), np.int64(1), 1, (1, 1)):
        assert torch.equal(vitlens.relevance(vit, images, targets=targets), expected)


def test_a_word_of_a_class_name_is_found():
    assert nearest("cat", ["crate", "cab", "tiger cat", "Persian cat"])[0].endswith(" cat")


def test_an_unknown_name_that_is_no_text():
    assert str(UnknownNameError("method", None, ["a", "b"])) == "no method None; known: a, b"


def test_one_kind_of_unit_is_a_text(vit, images):
    one, several = (vitlens.ablate(vit, images, "predicted", replace="zero", kinds=kinds) for kinds in ("mlp", ["mlp"]))
    assert one.units == several.units


def test_results_of_the_lens_are_shown_as_tables(vit, images):
    for result in (
        vitlens.patch(vit, images, images, "blocks.0.mlp"),
        vitlens.logit_lens(vit, images),
        vitlens.direct_logit_attribution(vit, images),
    ):
        assert "tensor(" not in repr(result)
        assert "<table>" in result._repr_html_()
