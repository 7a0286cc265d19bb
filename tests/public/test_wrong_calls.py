"""Wrong calls of the Python API, as a new user types them: one line that says what to type."""

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.tiny import images as made
from tests.kit.tiny import ours
from vitlens.errors import InputError, UnknownNameError, nearest


@pytest.fixture(scope="module")
def vit():
    return ours()


@pytest.fixture(scope="module")
def images(vit):
    return made(vit.input_size)


WRONG = {  # what is typed, and a part of the answer
    "vitlens.rollout(images, vit)": "exchange the two",
    "vitlens.attention('vit-digits', images)": r"vitlens\.load\(NAME\)",
    "vitlens.relevance(vit.module, images)": r"vitlens\.wrap\(module",
    "vitlens.profile('vit-digits')": r"vitlens\.load",
    "vitlens.intervene(images, {}).__enter__()": r"vitlens\.load",
    "vitlens.load('vit-digits', device='gpu')": "did you mean 'cuda'",
    "vitlens.load('vit-digits', device='CUDA')": "did you mean 'cuda'",
    "vitlens.load('vit-digits', device='cuda:99')": "CUDA device",
    "vitlens.load('vit-digits', device=torch.device('cuda', 99))": "CUDA device",
    "vitlens.load('vit-digits', device=0)": "did you mean 'cuda:0'",
    "vitlens.load('vit-digits', device='')": "auto, cpu, cuda",
    "next(vitlens.load_data('digits').batches(1, device='gpu'))": "did you mean 'cuda'",
    "vitlens.load(torch.nn.Linear(2, 2))": r"vitlens\.wrap",
    "vitlens.explain(vit, images, 'gradcam')": "targets=, method=",
    "vitlens.rollout(vit, images, head_fusion='max')": "did you mean 'fusion'",
    "vitlens.attack(vit, images, 'predicted', epsilons=0.1)": r"epsilons=\[0, 0.1\]",
    "vitlens.attack(vit, images, 'predicted', targets='label')": "other than the labels",
    "vitlens.profile(vit, batch_sizes=1)": r"batch_sizes=\[1, 8\]",
    "vitlens.capture(vit, images, 3)": "name of a place, found int",
    "vitlens.similarity(vit, vit)": r"vitlens\.features",
    "vitlens.relevance(vit, images, targets=2.0)": "whole numbers",
    "vitlens.relevance(vit, images, targets=True)": "found True",
    "vitlens.relevance(vit, images, targets=torch.zeros(len(images)))": "whole numbers",
    "vitlens.rollout(vit, list(images))": r"torch\.stack",
    "vitlens.rollout(vit, np.zeros((3, 32, 48), dtype='uint8'))": r"numpy\.moveaxis",
    "vitlens.rollout(vit, images[0].permute(1, 2, 0))": r"permute\(2, 0, 1\)\[None\]",
    "vitlens.wrap(vit.module, image_size=32, mean=0.5, std=0.5)": "mean as 3 numbers",
    "vitlens.wrap(vit.module, image_size='32', mean=(0, 0, 0), std=(1, 1, 1))": "image_size as 2 numbers",
    "vitlens.show(images, {})": "found none",
    "vitlens.show(images, 'rollout')": "the text 'rollout'",
    "vitlens.show_board(vit)": "found Model",
    "vitlens.show_heads(None)": r"vitlens\.attention\(model, images\)",
    "vitlens.show_heads(vitlens.attention(vit, images), images)": "model=model",
    "vitlens.show_heads(vitlens.attention(vit, images), images[:1], model=vit, image=1)": "the 2 images of",
    "vitlens.show(np.zeros((9, 9, 3), dtype='uint8'), torch.rand(2, 2))": "model=model",
    "vitlens.show_heads(vitlens.attention(vit, images), model=vit, image=2)": "from 0 to 1",
    "vitlens.show_heads(vitlens.attention(vit, images), images, model=vit, layer=7)": "from 0 to 1",
    "vitlens.show_heads(vitlens.attention(vit, images), model=vit, layer=1)": "images under the heads",
    "vitlens.show_heads([torch.zeros(2, 3)])": "expected weights",
    "vitlens.show_heads([torch.zeros(1, 2, 3, 3)], model=vit)": r"over the \d+ tokens",
    "vitlens.show_heads(vitlens.attention(vit, images), model=vitlens.load('cnn-digits'))": "",
    "vitlens.show(images, torch.zeros(3, 2, 2))": r"\(2, rows",
    "vitlens.show(images, torch.zeros(2, 2, 2, 2))": r"\(2, rows",
    "vitlens.show_board(torch.rand(3))": r"\(layers, heads\)",
    "vitlens.show_board(torch.rand(3, 3), 'distance')": "statistics",
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_answered_in_one_line(call, vit, images):
    with pytest.raises(InputError, match=WRONG[call] or None) as told:
        eval(call, {"vitlens": vitlens, "torch": torch, "np": np, "vit": vit, "images": images})
    assert "\n" not in str(told.value)


def test_a_word_of_a_class_name_is_found():
    assert nearest("cat", ["crate", "cab", "tiger cat", "Persian cat"])[0].endswith(" cat")
    assert str(UnknownNameError("method", None, ["a", "b"])) == "no method None; known: a, b"
