"""One run's activations in another: all places at once, each against a full forward; and replay by places."""

import pytest
import torch
from torch import Tensor

import vitlens
from tests.lens.places.models import ATTENTIVE, EVERY, MODELS, PLAIN
from tests.lens.test_replay import Reaches, small_vit
from tests.lens.tiny import images, model_of, ours, shared_model
from vitlens.analysis.patching.patching import patch_parts
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.capture import capture
from vitlens.lens.intervene import Change, KnockOut, intervene
from vitlens.lens.patch import patch
from vitlens.lens.places import places
from vitlens.lens.replay import replaying
from vitlens.models.model import Model

SAME = {"atol": 1e-5, "rtol": 1e-4}


def pair(model: Model) -> tuple[Tensor, Tensor]:
    return images(model.input_size, batch=3), images(model.input_size, batch=3, seed=1)


@pytest.mark.parametrize("name", EVERY)
def test_each_place_is_a_full_forward_with_the_others_tensor_there(name):
    model = EVERY[name]()
    clean, other = pair(model)
    listed = [place.name for place in places(model) if place.changeable]
    patched = patch(model, clean, other, listed)
    captured = capture(model, other, listed)
    assert patched.places == tuple((place,) for place in listed)
    assert patched.exact == (name not in ("cnn", "einsum", "encoder"))
    with torch.no_grad():
        torch.testing.assert_close(patched.clean, model(clean), **SAME)
        torch.testing.assert_close(patched.other, model(other), **SAME)
        for place in listed:
            with intervene(model, {place: captured[place]}):
                torch.testing.assert_close(patched[place], model(clean), **SAME, msg=place)


@pytest.mark.parametrize("name", MODELS)
def test_the_last_blocks_output_is_the_other_run(name):
    model = MODELS[name]()
    clean, other = pair(model)
    if name == "siglip":
        sets: list[str | tuple[str, ...]] = ["blocks.2"]
    elif name == "cait":
        sets = ["blocks.3", ("blocks.0", "blocks.2", "blocks.3")]
    else:
        blocks = [place.name for place in places(model) if place.kind in ("residual", "block")]
        sets = [blocks[-1], tuple(blocks)]
        if "patches" in places(model).names:
            sets.append("blocks.0.input")
    patched = patch(model, clean, other, sets)
    for logits in patched.logits:
        torch.testing.assert_close(logits, patched.other, **SAME)
    assert not torch.allclose(patched.clean, patched.other, atol=1e-4)


@pytest.mark.parametrize("name", PLAIN)
def test_places_apart_are_the_commands_activation_patching(name):
    """The same numbers as `ablate` writes: every head and token of a block's input."""
    model = MODELS[name]()
    clean, other = pair(model)
    first, second = (torch.full((3,), label) for label in (0, 1))
    expected = patch_parts(model, other, clean, targets=first, others=second)
    patched = patch(model, clean, other, ["blocks.*.head.*", "blocks.*.input[*]"])
    difference = patched.logits[..., 0] - patched.logits[..., 1] - (patched.clean[:, 0] - patched.clean[:, 1])
    heads, positions = difference.split([4, len(difference) - 4])
    torch.testing.assert_close(heads.unflatten(0, (2, 2)).movedim(-1, 0), expected.heads, **SAME)
    torch.testing.assert_close(positions.unflatten(0, (2, -1)).movedim(-1, 0), expected.positions, **SAME)


def test_what_was_captured_may_be_given():
    model = ours()
    clean, other = pair(model)
    captured = capture(model, other, "blocks.*.mlp")
    by_images = patch(model, clean, other, "blocks.*.mlp")
    assert torch.equal(patch(model, clean, captured, "blocks.*.mlp").logits, by_images.logits)
    with pytest.raises(UnknownNameError, match=r"no captured place 'blocks.0.residual'"):
        patch(model, clean, captured, "blocks.0")
    with pytest.raises(InputError, match="two runs of as many images, found 3 and 2"):
        patch(model, clean, other[:2], "blocks.0")
    with pytest.raises(InputError, match="that was patched alone, found 'blocks"):
        by_images["blocks.0"]


RUNS: list[dict[str, Change]] = [
    {},
    {"blocks.0.head.1": "zero"},
    {"blocks.1.head.0": "zero"},
    {"blocks.0.heads": "zero", "blocks.1.mlp": torch.tensor(0.5)},
    {"blocks.1": "remove"},
    {"blocks.0.attention.weights": KnockOut(keys=[0, 2], queries=1)},
    {"blocks.1.attention.weights": lambda weights: weights.square()},
    {"blocks.0.attention": torch.neg},
    {"blocks.1.attention": torch.neg},
    {"blocks.1.mlp": torch.neg},
    {"blocks.1.residual": torch.neg},
    {"blocks.1": "resample"},
    {"blocks.0.mlp": "mean", "blocks.0.head.0": "mean"},
    {"blocks.1": "remove", "blocks.0.mlp": torch.neg},
    {"blocks.0.head.0": "resample", "blocks.1.attention.scores": torch.abs},
    {"blocks.0.head.0": torch.neg, "blocks.1.attention.scores": torch.neg},
]


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("name", ATTENTIVE)
def test_replay_is_a_full_forward_under_the_same_changes(name, chunk):
    model = MODELS[name]()
    batch, reference = images(model.input_size, batch=3), images(model.input_size, batch=4, seed=2)
    with replaying(model, batch, chunk=chunk) as replay:
        assert replay.exact
        found = replay.run(RUNS, reference=reference, seed=3)
    with torch.no_grad():
        for changes, logits in zip(RUNS, found):
            with intervene(model, changes, reference=reference, seed=3):
                torch.testing.assert_close(logits, model(batch), **SAME, msg=str(changes))


def test_places_of_one_layer_run_together_and_cost_less_than_forwards():
    model, batch = shared_model("vit"), images(batch=2)
    sets: list[dict[str, Change]] = [{f"blocks.1.{part}": torch.neg} for part in ("mlp", "attention", "residual")]
    with replaying(model, batch) as replay:
        before = replay.forward_equivalents
        replay.run(sets)
        assert replay.forward_equivalents - before < 2  # three runs of the second of two blocks


def test_a_replay_inside_an_intervention_starts_from_the_changed_model():
    model, batch = ours(), images((32, 48))
    outer: dict[str, Change] = {"blocks.0.attention.weights": lambda weights: weights.square()}
    inner: list[dict[str, Change]] = [
        {"blocks.0.attention.weights": KnockOut(keys=0)},
        {"blocks.0.input[0]": "zero"},
        {"blocks.0.attention.queries": torch.neg},
    ]
    with intervene(model, outer), torch.no_grad():
        with vitlens.replay(model, batch) as replay:
            found = replay.run(inner)
            torch.testing.assert_close(replay.logits, model(batch), **SAME)
        for changes, logits in zip(inner, found):
            with intervene(model, changes):
                torch.testing.assert_close(logits, model(batch), **SAME, msg=str(changes))


def test_a_model_that_cannot_be_replayed_is_run_in_full():
    """Its head reads the first block too: replay says so, and its numbers are those of full forwards."""
    model, batch = model_of(Reaches(small_vit()), size=(32, 48)), images((32, 48))
    sets: list[dict[str, Change]] = [
        {"blocks.1.attention": "zero"},
        {"blocks.1.head.0": "zero"},
        {"blocks.1.mlp": torch.neg},
    ]
    with replaying(model, batch) as replay:
        assert not replay.exact
        assert "full forwards" in replay.note
        found = replay.run(sets)
    assert not patch(model, batch, batch.flip(0), "blocks.1").exact
    with torch.no_grad():
        for changes, logits in zip(sets, found):
            with intervene(model, changes):
                torch.testing.assert_close(logits, model(batch), **SAME)
