"""Every public function that takes images refuses pixels outside [0, 1], and says what was found and what to type."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import vitlens
from tests.lens.tiny import images, ours
from vitlens.errors import DataError
from vitlens.models.model import Model

LABELS = torch.tensor([0, 1])


def observed(vit: Model, batch: Tensor) -> Tensor:
    kept: list[Tensor] = []
    vitlens.observe(vit, batch, lambda call: kept.append(call.weights()))
    return kept[0]


def replayed(vit: Model, batch: Tensor) -> Tensor:
    with vitlens.replay(vit, batch) as replay:
        return replay.run([{"blocks.0.mlp": "zero"}])


# each public function that takes images, and what of its answer is compared
TAKES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "ablate": lambda vit, batch: vitlens.ablate(vit, batch, LABELS).delta_loss,
    "attack": lambda vit, batch: vitlens.attack(vit, batch, "predicted", epsilon=0.1, steps=1).images,
    "attention": lambda vit, batch: vitlens.attention(vit, batch)[0],
    "choose_method": lambda vit, batch: torch.tensor(len(vitlens.choose_method(vit, batch).candidates)),
    "compare": lambda vit, batch: vitlens.compare(vit, vit, batch, LABELS).first.confidence,
    "evaluate": lambda vit, batch: vitlens.evaluate(vit, batch, LABELS).logits,
    "capture": lambda vit, batch: vitlens.capture(vit, batch, "blocks.0.mlp")["blocks.0.mlp"],
    "direct_logit_attribution": lambda vit, batch: vitlens.direct_logit_attribution(vit, batch).heads,
    "explain": lambda vit, batch: vitlens.explain(vit, batch, method="saliency"),
    "failures": lambda vit, batch: vitlens.failures(vit, batch, LABELS).correct,
    "features": lambda vit, batch: vitlens.features(vit, batch).at(-1),
    "explorer": lambda vit, batch: torch.from_numpy(vitlens.explorer(vit, batch).explorer.images[0].weights),
    "look": lambda vit, batch: vitlens.look(vit, batch).probabilities,
    "logit_lens": lambda vit, batch: vitlens.logit_lens(vit, batch).logits,
    "observe": observed,
    "patch": lambda vit, batch: vitlens.patch(vit, batch, images(vit.input_size, seed=1), "blocks.0.mlp").logits,
    "relevance": lambda vit, batch: vitlens.relevance(vit, batch),
    "replay": replayed,
    "rollout": lambda vit, batch: vitlens.rollout(vit, batch),
    "statistics": lambda vit, batch: vitlens.statistics(vit, batch).distance,
}
# each other public name, and why it has no pixels to check
TAKES_NONE = {
    "AttentionCall": "what observe hands on",
    "KnockOut": "a change",
    "attention_explorer": "weights of any model, and a picture that is drawn",
    "Model": "its forward may leave the range: integrated gradients, SmoothGrad and attacks do so on purpose",
    "Split": "of 8 bits, or checked when it is made",
    "Statistics": "a result",
    "Place": "what places lists",
    "__version__": "a string",
    "images": "makes them",
    "list_attacks": "lists",
    "list_methods": "lists",
    "list_models": "lists",
    "list_statistics": "lists",
    "intervene": "no images but the reference, see below",
    "load": "a name",
    "load_data": "a name",
    "places": "a model",
    "profile": "draws its own",
    "read": "a folder",
    "Refinement": "says what is done with maps",
    "shape_bias": "files of cue conflicts, whose pixels are 8 bits",
    "show": "draws them: tests/public/test_notebook.py",
    "show_board": "draws tables",
    "show_heads": "draws them: tests/public/test_notebook.py",
    "similarity": "features",
    "walkthrough": "takes one image, not these two: tests/analysis/walkthrough/test_walkthrough.py",
    "wrap": "a module",
    "train": "Splits, whose pixels are 8 bits",
    "zero_shot": "names of classes",
}


@pytest.fixture(scope="module")
def vit() -> Model:
    return ours()


def test_no_public_name_is_forgotten():
    assert TAKES.keys() | TAKES_NONE.keys() == set(vitlens.__all__)
    assert not TAKES.keys() & TAKES_NONE.keys()
    named = {
        name
        for name in vitlens.__all__
        if inspect.isfunction(found := getattr(vitlens, name)) and "images" in inspect.signature(found).parameters
    }
    assert named == TAKES.keys() | {"shape_bias", "show", "show_heads", "walkthrough"}


WRONG = {
    "0 to 255": (lambda batch: batch * 255, r"found 0(\.\d+)? to 25\d; divide by 255.*vitlens\.images"),
    "normalised": (lambda batch: (batch - 0.5) / 0.2, r"found -2\.\d+ to 2\.\d+; leave out the normalisation"),
    "a little above": (lambda batch: batch.clamp_min(0.5) + 6e-4, r"found 0\.5006 to 1\.\d+; clamp them"),
    "whole numbers": (lambda batch: (batch * 255).long(), r"found int64; divide by 255.*vitlens\.images"),
    "an array of floats": (lambda batch: batch.numpy(), r"one float tensor.*found float32"),
    "an array with channels first": (lambda batch: (batch * 255).byte().numpy(), r"found \(2, 3, 32, 48\)"),
    "NaN": (lambda batch: batch.where(batch < 0.9, torch.nan), "found NaN"),
    "infinity": (lambda batch: batch.where(batch < 0.9, torch.inf), "found NaN or infinity"),
    "one image": (lambda batch: batch[0], r"images\[None\]"),
    "channels last": (lambda batch: batch.permute(0, 2, 3, 1), r"permute\(0, 3, 1, 2\)"),
    "grey": (lambda batch: batch[:, :1], r"found \(2, 1, 32, 48\)"),
    "none": (lambda batch: batch[:0], r"batch > 0, found \(0, 3, 32, 48\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", TAKES)
def test_wrong_pixels_are_refused(vit, name, wrong):
    change, message = WRONG[wrong]
    batch = images(vit.input_size)
    batch[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    with pytest.raises(DataError, match=message) as told:
        TAKES[name](vit, change(batch))
    assert "\n" not in str(told.value)
    assert told.value.exit_code == 2


@pytest.mark.parametrize("name", TAKES)
def test_what_arithmetic_leaves_outside_is_clamped(vit, name):
    batch = images(vit.input_size)
    batch[:, :, :4] = torch.tensor([0.0, 1.0]).repeat(24)
    outside = batch + 9e-5 * (2 * batch - 1).where((batch == 0) | (batch == 1), 0)
    assert outside.min() < 0
    assert outside.max() > 1
    before = outside.clone()
    torch.testing.assert_close(TAKES[name](vit, outside), TAKES[name](vit, batch), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(outside, before)  # the images handed in are as they were


@pytest.mark.parametrize("name", TAKES)
def test_other_floating_point_types_are_taken(vit, name):
    """What numpy makes of a division is float64."""
    array = (images(vit.input_size) * 255).round().numpy() / np.float64(255)
    double = torch.from_numpy(array.astype(np.float64))
    torch.testing.assert_close(
        TAKES[name](vit, double), TAKES[name](vit, double.float()), rtol=0, atol=0, equal_nan=True
    )


def test_the_forward_of_the_model_itself_is_free(vit):
    batch = images(vit.input_size)
    assert vit(batch * 255).isfinite().all()


def test_training_takes_splits_alone(vit):
    """Its two parts are given by name and part, so that no image is in both."""
    assert "Split" in TAKES_NONE["train"]


def test_reference_images_and_the_other_run_are_checked_too(vit):
    batch = images(vit.input_size)
    with (
        pytest.raises(DataError, match="divide by 255"),
        vitlens.intervene(vit, {"blocks.0.mlp": "mean"}, reference=batch * 255),
    ):
        pytest.fail("it was not refused")
    with pytest.raises(DataError, match="divide by 255"):
        vitlens.patch(vit, batch, batch * 255, "blocks.0.mlp")
    with vitlens.replay(vit, batch) as replay, pytest.raises(DataError, match="divide by 255"):
        replay.run([{"blocks.0.mlp": "mean"}], reference=batch * 255)


def test_training_refuses_images_and_paths(vit):
    for given in (images(vit.input_size), "photos/", np.zeros((2, 8, 8, 3), np.uint8)):
        with pytest.raises(DataError, match=f"expected a Split.*found {type(given).__name__}.*load_data"):
            vitlens.train(vit, given, given, recipe=None, directory=None)
