"""Wrong calls of the Python API, as a new user types them: one line that says what to type."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.tiny import images as made
from tests.kit.tiny import ours
from tests.kit.trainings import tiny_recipe
from vitlens.errors import InputError, UnknownNameError, nearest


@pytest.fixture(scope="module")
def vit():
    return ours()


@pytest.fixture(scope="module")
def images(vit):
    return made(vit.input_size)


# By subject: a call, and a regular expression that its message contains.
WRONG = {
    "models in the wrong place": r"""
>>> vitlens.rollout(images, vit)
exchange the two
>>> vitlens.attention('vit-digits', images)
vitlens\.load\(NAME\)
>>> vitlens.relevance(vit.module, images)
vitlens\.wrap\(module
>>> vitlens.profile('vit-digits')
vitlens\.load
>>> vitlens.intervene(images, {}).__enter__()
vitlens\.load
>>> vitlens.load(torch.nn.Linear(2, 2))
vitlens\.wrap
>>> vitlens.similarity(vit, vit)
vitlens\.features
""",
    "devices": r"""
>>> vitlens.load('vit-digits', device='gpu')
did you mean 'cuda'
>>> vitlens.load('vit-digits', device='CUDA')
did you mean 'cuda'
>>> vitlens.load('vit-digits', device='cuda:99')
CUDA device
>>> vitlens.load('vit-digits', device=torch.device('cuda', 99))
CUDA device
>>> vitlens.load('vit-digits', device=0)
did you mean 'cuda:0'
>>> vitlens.load('vit-digits', device='')
auto, cpu, cuda
>>> next(vitlens.load_data('digits').batches(1, device='gpu'))
did you mean 'cuda'
""",
    "arguments": r"""
>>> vitlens.explain(vit, images, 'gradcam')
targets=, method=
>>> vitlens.rollout(vit, images, head_fusion='max')
did you mean 'fusion'
>>> vitlens.attack(vit, images, 'predicted', epsilons=0.1)
epsilons=\[0, 0.1\]
>>> vitlens.attack(vit, images, 'predicted', targets='label')
other than the labels
>>> vitlens.profile(vit, batch_sizes=1)
batch_sizes=\[1, 8\]
>>> vitlens.capture(vit, images, 3)
name of a place, found int
>>> vitlens.relevance(vit, images, targets=2.0)
whole numbers
>>> vitlens.relevance(vit, images, targets=True)
found True
>>> vitlens.relevance(vit, images, targets=torch.zeros(len(images)))
whole numbers
>>> vitlens.wrap(vit.module, image_size=32, mean=0.5, std=0.5)
mean as 3 numbers
>>> vitlens.wrap(vit.module, image_size='32', mean=(0, 0, 0), std=(1, 1, 1))
image_size as 2 numbers
""",
    "images": r"""
>>> vitlens.rollout(vit, list(images))
torch\.stack
>>> vitlens.rollout(vit, np.zeros((3, 32, 48), dtype='uint8'))
numpy\.moveaxis
>>> vitlens.rollout(vit, images[0].permute(1, 2, 0))
permute\(2, 0, 1\)\[None\]
""",
    "figures": r"""
>>> vitlens.show(images, {})
found none
>>> vitlens.show(images, 'rollout')
the text 'rollout'
>>> vitlens.show_board(vit)
found Model
>>> vitlens.show_heads(None)
vitlens\.attention\(model, images\)
>>> vitlens.show_heads(vitlens.attention(vit, images), images)
model=model
>>> vitlens.show_heads(vitlens.attention(vit, images), images[:1], model=vit, image=1)
the 2 images of
>>> vitlens.show(np.zeros((9, 9, 3), dtype='uint8'), torch.rand(2, 2))
model=model
>>> vitlens.show_heads(vitlens.attention(vit, images), model=vit, image=2)
from 0 to 1
>>> vitlens.show_heads(vitlens.attention(vit, images), images, model=vit, layer=7)
from 0 to 1
>>> vitlens.show_heads(vitlens.attention(vit, images), model=vit, layer=1)
images under the heads
>>> vitlens.show_heads([torch.zeros(2, 3)])
expected weights
>>> vitlens.show_heads([torch.zeros(1, 2, 3, 3)], model=vit)
over the \d+ tokens
>>> vitlens.show_heads(vitlens.attention(vit, images), model=vitlens.load('cnn-digits'))
>>> vitlens.show(images, torch.zeros(3, 2, 2))
\(2, rows
>>> vitlens.show(images, torch.zeros(2, 2, 2, 2))
\(2, rows
>>> vitlens.show_board(torch.rand(3))
\(layers, heads\)
>>> vitlens.show_board(torch.rand(3, 3), 'distance')
statistics
""",
}


def wrong_calls() -> Iterator[Any]:
    """Yield each call with the expression of its message."""
    for session in WRONG.values():
        for case in session.split(">>> ")[1:]:
            call, _, message = case.strip().partition("\n")
            yield pytest.param(call, message, id=call)


@pytest.mark.parametrize(("call", "message"), list(wrong_calls()))
def test_a_wrong_call_is_answered_in_one_line(call, message, vit, images):
    names = {"vitlens": vitlens, "torch": torch, "np": np, "vit": vit, "images": images}
    with pytest.raises(InputError, match=message or None) as raised:
        eval(call, names)
    assert "\n" not in str(raised.value)


def test_a_word_of_a_class_name_is_found():
    assert nearest("cat", ["crate", "cab", "tiger cat", "Persian cat"])[0].endswith(" cat")
    assert str(UnknownNameError("method", None, ["a", "b"])) == "no method None; known: a, b"


def folder_of(root, *names):
    """Make a folder with empty files."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return str(root)


def flat_parts(root):
    for part in ("train", "test"):
        (root / part).mkdir()
        Image.new("RGB", (8, 8)).save(root / part / "a.png")
    return str(root)


def foreign_weights(root, name):
    torch.save({name: torch.zeros(2)}, root / "w.pth")
    return str(root / "w.pth")


def trained(root, **changes):
    data = vitlens.load_data("digits").limit(20)
    recipe = changes.pop("recipe", tiny_recipe())
    return vitlens.train(
        vitlens.load("vit-digits"), data, data, recipe=recipe, directory=root / "run", **changes
    )


OF_PYTHON = {  # wrong calls whose answers name no option of the command line
    "a folder of CIFAR's batches": lambda root: vitlens.load_data(
        folder_of(root, "data_batch_1", "batches.meta")
    ),
    "a folder with a table": lambda root: vitlens.load_data(folder_of(root, "labels.csv")),
    "the files of MNIST": lambda root: vitlens.load_data(
        folder_of(root, "train-images-idx3-ubyte")
    ),
    "flat parts": lambda root: vitlens.load_data(flat_parts(root)),
    "a file as data": lambda root: vitlens.load_data(folder_of(root, "a.csv") + "/a.csv"),
    "labels without a folder": lambda root: vitlens.load_data("digits", labels=root / "labels.csv"),
    "weights of adapters": lambda root: vitlens.load(
        "vit-micro", weights=foreign_weights(root, "lora_A")
    ),
    "weights of a mean": lambda root: vitlens.load(
        "vit-micro", weights=foreign_weights(root, "fc_norm.weight")
    ),
    "weights of MMPretrain": lambda root: vitlens.load(
        "vit-micro", weights=foreign_weights(root, "layers.0.ln1.bias")
    ),
    "weights of its own": lambda root: vitlens.load(
        "vit-digits", weights=foreign_weights(root, "a")
    ),
    "no such source": lambda _: vitlens.load("xyzw:qqqq"),
    "a run without weights": lambda root: vitlens.load(folder_of(root, "report.md")),
    "an interval of 0": lambda root: trained(root, keep_every=0),
    "more blocks than there are": lambda root: trained(root, train_last=99),
    "no such compiling": lambda root: trained(root, compiling="maybe"),
    "no such precision": lambda root: trained(root, precision="fp8"),
    "no such device": lambda root: trained(root, device="gpu"),
    "a class without training images": lambda root: vitlens.train(
        vitlens.load("vit-digits"),
        vitlens.load_data("digits").pick(torch.arange(1)),
        vitlens.load_data("digits"),
        recipe=tiny_recipe(),
        directory=root / "run",
    ),
}


@pytest.mark.parametrize("case", OF_PYTHON)
def test_python_callers_are_answered_without_options_of_the_command_line(case, tmp_path):
    with pytest.raises(InputError) as answer:
        OF_PYTHON[case](tmp_path)
    assert "\n" not in str(answer.value)
    assert "--" not in str(answer.value)
