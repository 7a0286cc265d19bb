"""Changes of places against models that are cut by hand, hooks on timm's modules, and attention written out."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.uses import BrokenError, state_of
from tests.lens.places.models import ATTENTIVE, EVERY, HANDWRITTEN, MODELS, PLAIN
from tests.lens.tiny import images, ours, shared_model, timm_model
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.attention import projection_of
from vitlens.lens.capture import capture, capture_attention
from vitlens.lens.intervene import Change, KnockOut, another_image, intervene
from vitlens.lens.places import places
from vitlens.lens.trace import layers
from vitlens.models.model import Model

SAME = {"atol": 1e-5, "rtol": 1e-4}
WEIGHTS = "blocks.0.attention.weights"


def changed(model: Model, batch: Tensor, changes: dict[str, Change], **options: object) -> Tensor:
    with torch.no_grad(), intervene(model, changes, **options):
        return model(batch)


@pytest.mark.parametrize("name", EVERY)
def test_what_was_captured_changes_nothing_and_another_images_does(name):
    model = EVERY[name]()
    batch = images(model.input_size)
    with torch.no_grad():
        plain = model(batch)
    listed = [place.name for place in places(model) if place.changeable]
    captured = capture(model, batch, listed)
    for place in listed:
        for change in (captured[place], torch.clone):
            found = changed(model, batch, {place: change})
            torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-6, msg=place)
        if not torch.equal(captured[place][0], captured[place][1]):  # the query of attention pooling is a parameter
            moved = changed(model, batch, {place: captured[place].flip(0) + 0.1})
            assert not torch.allclose(moved, plain, atol=1e-6), place


@pytest.mark.parametrize("name", [*ATTENTIVE, *HANDWRITTEN])
def test_a_head_set_to_zero_is_its_columns_cut(name):
    model = EVERY[name]()
    batch = images(model.input_size)
    for layer in layers(model):
        for head in range(layer.heads):
            cut = copy.deepcopy(model)
            projection = projection_of(cut, layer.attention)
            with torch.no_grad():
                projection.weight[:, head * layer.head_dim : (head + 1) * layer.head_dim] = 0
                expected = cut(batch)
            place = f"blocks.{layer.index}.head.{head}"
            torch.testing.assert_close(changed(model, batch, {place: "zero"}), expected, **SAME)


def hooked(model: Model, batch: Tensor, path: str, write: Callable[[Tensor], Tensor], *, before: bool) -> Tensor:
    """The logits with a plain hook that rewrites a module's output, or its input."""
    module = model.module.get_submodule(path)
    if before:
        handle = module.register_forward_pre_hook(lambda _module, inputs: (write(inputs[0]), *inputs[1:]))
    else:
        handle = module.register_forward_hook(lambda _module, _inputs, output: write(output))
    with torch.no_grad():
        logits = model(batch)
    handle.remove()
    return logits


ON_TIMM: dict[str, tuple[str, bool]] = {  # a place of timm's ViT, its module there, and whether it is the input
    "blocks.1.input": ("blocks.1", True),
    "blocks.0.residual": ("blocks.0", False),
    "blocks.0": ("blocks.0", False),
    "blocks.1.attention": ("blocks.1.attn", False),
    "blocks.1.mlp": ("blocks.1.mlp", False),
}
CHANGES: dict[str, tuple[Change, Callable[[Tensor], Tensor]]] = {
    "zero": ("zero", torch.zeros_like),
    "a vector": (torch.linspace(-1, 1, 32), lambda tensor: torch.linspace(-1, 1, 32).expand(tensor.shape)),
    "a function": (lambda tensor: 0.5 * tensor + 1, lambda tensor: 0.5 * tensor + 1),
    "resample": ("resample", lambda tensor: tensor[another_image(3, 0)]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ON_TIMM)
def test_changes_are_those_of_a_hook_on_timms_module(place, change):
    model = shared_model("vit")
    batch = images(batch=3)
    path, before = ON_TIMM[place]
    ours_, by_hand = CHANGES[change]
    expected = hooked(model, batch, path, by_hand, before=before)
    torch.testing.assert_close(changed(model, batch, {place: ours_}), expected, **SAME)
    assert not torch.allclose(expected, model(batch), atol=1e-6)

    def first_token(tensor: Tensor) -> Tensor:
        written = tensor.clone()
        written[:, :1] = by_hand(tensor[:, :1])
        return written

    expected = hooked(model, batch, path, first_token, before=before)
    torch.testing.assert_close(changed(model, batch, {f"{place}[cls]": ours_}), expected, **SAME)


def test_heads_queries_and_values_by_hooks_on_timms_layers():
    model = shared_model("vit")
    batch = images(batch=3)

    def halve(columns: slice) -> Callable[[Tensor], Tensor]:
        def write(tensor: Tensor) -> Tensor:
            written = tensor.clone()
            written[..., columns] *= 0.5
            return written

        return write

    half: Change = lambda tensor: 0.5 * tensor  # noqa: E731
    cases = {
        "blocks.0.head.1": ("blocks.0.attn.proj", slice(16, 32), True),
        "blocks.0.heads": ("blocks.0.attn.proj", slice(None), True),
        "blocks.1.attention.queries": ("blocks.1.attn.qkv", slice(0, 32), False),
        "blocks.1.attention.keys": ("blocks.1.attn.qkv", slice(32, 64), False),
        "blocks.1.attention.values": ("blocks.1.attn.qkv", slice(64, 96), False),
    }
    for place, (path, columns, before) in cases.items():
        expected = hooked(model, batch, path, halve(columns), before=before)
        torch.testing.assert_close(changed(model, batch, {place: half}), expected, **SAME, msg=place)


@pytest.mark.parametrize("name", PLAIN)
def test_weights_that_are_replaced_are_multiplied_by_the_values(name):
    """Uniform weights: every head gives the mean of its values; half of them, half of it; and observers see them."""
    model = MODELS[name]()
    batch = images(model.input_size)
    tokens = layers(model)[0].queries
    for total in (1.0, 0.5):
        uniform = torch.tensor(total / tokens)
        with intervene(model, {WEIGHTS: uniform}):
            seen = capture(model, batch, [WEIGHTS, "blocks.0.heads"])
            observed = capture_attention(model, batch).layers[0]
        assert (seen[WEIGHTS] == uniform).all()
        assert (observed == uniform).all()
        if "blocks.0.attention.values" in places(model).names:
            values = capture(model, batch, "blocks.0.attention.values")["blocks.0.attention.values"]
            expected = total * values.mean(2, keepdim=True).expand(seen["blocks.0.heads"].shape)
            torch.testing.assert_close(seen["blocks.0.heads"], expected, **SAME)
    scaled = changed(model, batch, {WEIGHTS: lambda weights: 0.5 * weights})
    torch.testing.assert_close(scaled, changed(model, batch, {"blocks.0.heads": lambda heads: 0.5 * heads}), **SAME)


@pytest.mark.parametrize("name", PLAIN)
def test_changed_scores_go_through_the_softmax(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    weights = capture(model, batch, WEIGHTS)[WEIGHTS]
    with intervene(model, {"blocks.0.attention.scores": lambda scores: 2 * scores}):
        sharper = capture_attention(model, batch).layers[0]
    torch.testing.assert_close(sharper, weights**2 / (weights**2).sum(-1, keepdim=True), **SAME)


@pytest.mark.parametrize("name", ATTENTIVE)
def test_a_knock_out_leaves_the_other_keys_scaled_to_one(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    clean = capture(model, batch, "blocks.*.attention.weights")
    with intervene(model, {WEIGHTS: KnockOut(keys=[1, 3], queries=0, heads=1)}):
        found = capture(model, batch, WEIGHTS)[WEIGHTS]
    keep = torch.ones(clean[WEIGHTS].shape[-3:])
    keep[1, 0, [1, 3]] = 0
    expected = clean[WEIGHTS] * keep
    torch.testing.assert_close(found, expected / expected.sum(-1, keepdim=True), **SAME)
    if name == "registers":
        with intervene(model, {WEIGHTS: KnockOut(keys="register", queries="patch")}):
            found = capture(model, batch, WEIGHTS)[WEIGHTS]
        assert (found[:, :, 3:, 1:3] == 0).all()
        assert (found[:, :, :3, 1:3] > 0).all()
        torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:-1]))


def test_a_knock_out_of_every_key_leaves_nothing():
    model, batch = ours(), images((32, 48))
    nothing = changed(model, batch, {WEIGHTS: KnockOut()})
    torch.testing.assert_close(nothing, changed(model, batch, {"blocks.0.head.*": "zero"}), **SAME)


@pytest.mark.parametrize("knocked", [{"keys": []}, {"queries": []}, {"heads": []}])
def test_a_knock_out_of_nothing_changes_nothing(knocked):
    """Also from a kept clean pass, which once took none for all."""
    model, batch = ours(), images((32, 48))
    nothing = {WEIGHTS: KnockOut(**knocked)}
    clean = changed(model, batch, {})
    torch.testing.assert_close(changed(model, batch, nothing), clean, **SAME)
    with vitlens.replay(model, batch) as kept:
        torch.testing.assert_close(kept.run([nothing])[0], clean, **SAME)


@pytest.mark.parametrize("name", ATTENTIVE)
def test_a_block_removed_passes_its_input_on(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    with intervene(model, {"blocks.1": "remove"}):
        seen = capture(model, batch, ["blocks.1.input", "blocks.1"])
    assert torch.equal(seen["blocks.1.input"], seen["blocks.1"])
    clean = capture(model, batch, "blocks.1.input")
    assert torch.equal(clean["blocks.1.input"], seen["blocks.1.input"])


def test_the_mean_is_that_of_the_reference_images():
    model = ours()
    batch, reference = images((32, 48)), images((32, 48), batch=4, seed=3)
    chosen = ["blocks.0.head.1", "blocks.1.mlp", "blocks.1.residual[cls]"]
    means = {name: tensor.mean(0) for name, tensor in capture(model, reference, chosen).items()}
    found = changed(model, batch, dict.fromkeys(chosen, "mean"), reference=reference)
    torch.testing.assert_close(found, changed(model, batch, means), **SAME)


def test_the_mean_of_a_model_in_16_bits_is_rounded_once():
    model, reference = vitlens.load("vit-digits").to(torch.bfloat16), images((32, 32), batch=7, seed=3).bfloat16()
    mean = capture(model, reference, "blocks.1.mlp")["blocks.1.mlp"].double().mean(0)
    with intervene(model, {"blocks.1.mlp": "mean"}, reference=reference):
        found = capture(model, reference[:1], "blocks.1.mlp")["blocks.1.mlp"][0]
    assert (found.double() - mean).abs().le(2**-8 * mean.abs() + 1e-9).all()  # half of the last bit


def test_another_image_is_never_the_same_and_depends_on_the_seed_alone():
    for count in (2, 3, 10):
        for seed in range(5):
            index = another_image(count, seed)
            assert sorted(index.tolist()) == list(range(count))
            assert (index != torch.arange(count)).all()
    assert not torch.equal(another_image(10, 0), another_image(10, 1))
    state = torch.get_rng_state()
    model, batch = ours(), images((32, 48), batch=5)
    found = [changed(model, batch, {"blocks.0": "resample"}, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], model(batch)[another_image(5, 0)], **SAME)
    assert torch.equal(torch.get_rng_state(), state)


NESTED: list[tuple[dict[str, Change], dict[str, Change]]] = [
    ({WEIGHTS: lambda weights: weights.square()}, {"blocks.0.attention.queries": lambda query: 2 * query}),
    ({WEIGHTS: lambda weights: weights.square()}, {"blocks.0.attention.scores": lambda scores: scores.clamp(0)}),
    ({"blocks.0.attention.values": torch.abs}, {"blocks.0.head.1": torch.neg}),
    ({"blocks.1.input": lambda tokens: tokens + 1}, {"blocks.0": lambda tokens: 2 * tokens}),
]


@pytest.mark.parametrize("outer_first", [True, False])
@pytest.mark.parametrize("case", range(len(NESTED)))
def test_nested_contexts_of_different_places_are_one(case, outer_first):
    """In whichever order: what comes first in the model is changed first."""
    model, batch = ours(), images((32, 48))
    first, second = NESTED[case] if outer_first else NESTED[case][::-1]
    with intervene(model, first):
        nested = changed(model, batch, second)
    assert torch.equal(nested, changed(model, batch, {**first, **second}))
    assert not torch.equal(nested, changed(model, batch, first))
    assert not torch.equal(nested, changed(model, batch, second))


@pytest.mark.parametrize("place", [p for p in places(ours()).names if p != "logits"])
def test_of_two_changes_of_one_place_the_outer_comes_first(place):
    model, batch = ours(), images((32, 48))
    with intervene(model, {place: lambda tensor: tensor + 1}), intervene(model, {place: lambda tensor: 2 * tensor}):
        found = capture(model, batch, place)[place]
    clean = capture(model, batch, place)[place]
    torch.testing.assert_close(found, 2 * (clean + 1), **SAME)


@pytest.mark.parametrize("fused", [True, False])
def test_a_knock_out_around_or_inside_a_change_of_the_weights(fused):
    """Whichever is the outer, the knocked keys get nothing before the change."""
    model, batch = ours(fused=fused), images((32, 48))
    double: dict[str, Change] = {WEIGHTS: lambda weights: 2 * weights}
    with intervene(model, {WEIGHTS: KnockOut(keys=0)}):
        knocked = capture(model, batch, WEIGHTS)[WEIGHTS]
    for outer, inner in (
        (intervene(model, {WEIGHTS: KnockOut(keys=0)}), intervene(model, double)),
        (intervene(model, double), intervene(model, {WEIGHTS: KnockOut(keys=0)})),
    ):
        with outer, inner:
            torch.testing.assert_close(capture(model, batch, WEIGHTS)[WEIGHTS], 2 * knocked, **SAME)
            torch.testing.assert_close(capture_attention(model, batch).layers[0], 2 * knocked, **SAME)


@pytest.mark.parametrize("name", ["ours", "ours-unfused", "torchvision-vit", "torchvision-swin", "cnn"])
def test_everything_is_undone_also_after_an_exception(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    changes: dict[str, Change] = {place.name: torch.clone for place in places(model) if place.changeable}

    last = "blocks.1.residual" if "blocks.1.residual" in changes else "blocks.1"

    def breaks(_tensor: Tensor) -> Tensor:
        raise BrokenError

    with torch.no_grad():
        before, plain = state_of(model), model(batch)
        with intervene(model, changes):
            around = state_of(model)
            with pytest.raises(BrokenError), intervene(model, {**changes, last: breaks}):
                model(batch)
            assert state_of(model) == around
            with pytest.raises(InputError), intervene(model, {"blocks.1": torch.zeros(3, 7, 5)}):
                pytest.fail("it was not refused")
            assert state_of(model) == around
        assert state_of(model) == before
        assert torch.equal(model(batch), plain)


@pytest.mark.parametrize("place", ["blocks.0.attention.weights", "blocks.0.head.1", "blocks.0.mlp", "blocks.0"])
def test_gradients_flow_through_a_change_and_into_what_is_given(place):
    model = ours().double()
    batch = images((32, 48)).double().requires_grad_()
    given = capture(model, batch.detach(), place)[place].clone().requires_grad_()
    with intervene(model, {place: given}):
        by_given = torch.autograd.grad(model(batch)[:, 1].sum(), given)[0]
    captured = capture(model, batch.detach(), place, graph=True)
    expected = torch.autograd.grad(captured.logits[:, 1].sum(), captured[place])[0]
    torch.testing.assert_close(by_given, expected)
    factor = torch.ones((), dtype=torch.double, requires_grad=True)
    with intervene(model, {place: lambda tensor: factor * tensor}):
        slope = torch.autograd.grad(model(batch)[:, 1].sum(), factor)[0]
    torch.testing.assert_close(slope, (expected * given).sum())


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_left_alone(training):
    model = ours().train(training)
    with intervene(model, {"blocks.0.mlp": "zero"}):
        assert model.training is training
        model(images((32, 48)))
    assert model.training is training


WRONG: dict[str, tuple[dict[str, Change], type[Exception], str]] = {
    "an unknown word": ({"blocks.0": "none"}, UnknownNameError, "no change of a place 'none'.*zero"),
    "a mean of nothing": ({"blocks.0": "mean"}, InputError, "expected reference images for the mean at blocks.0"),
    "a shape": ({"blocks.0": torch.zeros(7)}, InputError, r"broadcasts to \(batch, 13, 16\).*found shape \(7,\)"),
    "many axes": ({"blocks.0": torch.zeros(1, 2, 13, 16)}, InputError, r"found shape \(1, 2, 13, 16\)"),
    "twice": ({"blocks.*": "zero", "blocks.1": "zero"}, InputError, "once, found 'blocks.1.residual' twice"),
    "logits": ({"logits": "zero"}, UnsupportedError, "found logits, which is captured only"),
    "removed": ({"blocks.0.mlp": "remove"}, UnsupportedError, "to remove, found blocks.0.mlp; try 'zero'"),
    "tokens removed": ({"blocks.0[cls]": "remove"}, UnsupportedError, "to remove"),
    "knocked": ({"blocks.0": KnockOut(keys=0)}, InputError, "expected attention weights for a KnockOut"),
    "knocked key": ({WEIGHTS: KnockOut(keys=13)}, InputError, "positions from 0 to 12, found 13"),
    "knocked word": ({WEIGHTS: KnockOut(keys="regster")}, UnknownNameError, "did you mean 'register'"),
    "knocked head": ({WEIGHTS: KnockOut(heads=2)}, InputError, "from 0 to 1, found 2"),
    "a number": ({"blocks.0": 0.0}, InputError, "a KnockOut or a function at blocks.0.residual, found float"),
    "a list": ([("blocks.0", "zero")], InputError, "expected changes as {place: change}, found list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_at_once(case, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    changes, error, message = WRONG[case]
    with pytest.raises(error, match=message) as told, intervene(ours(), changes):
        pytest.fail("it was not refused")
    assert "\n" not in str(told.value)


def test_what_cannot_be_is_refused_in_the_forward_pass():
    model, batch = ours(), images((32, 48), batch=3)
    for change, message in (
        (torch.zeros(2, 13, 16), "for 1 or 3 images at blocks.0.residual, found one for 2"),
        (lambda tensor: tensor[:, :1], r"shape \(3, 13, 16\) from the function at blocks.0.residual, found shape"),
        (lambda _tensor: None, "found NoneType"),
    ):
        with pytest.raises(InputError, match=message):
            changed(model, batch, {"blocks.0": change})
    with pytest.raises(InputError, match="at least two images to resample blocks"):
        changed(model, batch[:1], {"blocks.0": "resample"})
    uneven = timm_model("swin_tiny_patch4_window7_224")
    with pytest.raises(InputError, match="whole sequence of tokens for 'cls', found 16"):
        changed(uneven, images(), {WEIGHTS: KnockOut(keys="cls")})


def test_the_public_names():
    assert vitlens.intervene is intervene
    assert vitlens.KnockOut is KnockOut
    assert vitlens.capture is capture
