"""Changes of places against models cut by hand, hooks on timm's modules, and formulas."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import pytest
import timm
import torch
from torch import Tensor
from torch.nn.utils.parametrizations import weight_norm

import vitlens
from tests.kit.lens import (
    ATTENTIVE,
    EVERY,
    HANDWRITTEN,
    MODELS,
    SAME,
    changeable,
    changed,
    entering,
    heads_by_layer,
    hooked,
    module_paths,
    of,
    removable,
    without_head,
)
from tests.kit.marks import slow_among
from tests.kit.tiny import EACH_FAMILY, FAMILIES, images, model_of, ours, shaken, shared_model
from vitlens import KnockOut, Model
from vitlens.errors import InputError, UnknownNameError, UnsupportedError

WEIGHTS = "blocks.0.attention.weights"
SCORES = "blocks.0.attention.scores"
VALUES = "blocks.0.attention.values"


def seen(
    model: Model, batch: Tensor, place: str, changes: Mapping[str, object] = MappingProxyType({})
) -> Tensor:
    """Return the tensor at a place under changes."""
    with vitlens.intervene(model, changes):
        return vitlens.capture(model, batch, place)[place]


# timm's ViT has the parts of dinov2-registers, the registers of which ours has
@pytest.mark.parametrize("name", slow_among(EVERY, ("vit", "registers")))
def test_what_was_captured_changes_nothing_and_another_images_does(name):
    model = EVERY[name]()
    batch = of(model, batch=2)
    plain = changed(model, batch, {})
    listed = changeable(model)
    captured = vitlens.capture(model, batch, listed)
    # what one does wrong, the next ones read
    cloned = changed(model, batch, dict.fromkeys(listed, torch.clone))
    torch.testing.assert_close(cloned, plain, atol=1e-6, rtol=1e-6)
    for place in listed:
        logits = changed(model, batch, {place: captured[place]})
        torch.testing.assert_close(logits, plain, atol=1e-6, rtol=1e-6, msg=place)
        # the query of attention pooling is a parameter
        if not torch.equal(captured[place][0], captured[place][1]):
            moved = changed(model, batch, {place: captured[place].flip(0) + 0.1})
            assert not torch.allclose(moved, plain, atol=1e-6), place


def cut_by_hand(
    model: Model, layer: int, batch: Tensor
) -> Iterator[tuple[dict[str, object], Tensor]]:
    """Yield changes of a layer, each with the logits of a copy that is cut or has a plain hook."""
    name, (unit, _, mlp) = f"blocks.{layer}", module_paths(model, layer)
    for place in (place for place in model.places() if place.name.startswith(f"{name}.head.")):
        head = int(place.name.rpartition(".")[2])
        ramp = torch.linspace(-1, 1, place.shape[-1])
        yield {place.name: "zero"}, without_head(model, layer, head)(batch)
        expected = without_head(model, layer, head, ramp)(batch)
        shape = ((), place.shape[-2:-1], (len(batch), *place.shape[:-1]))[(layer + head) % 3]
        yield {place.name: ramp.expand(*shape, -1)}, expected
    for place in (place for place in model.places() if place.name == f"{name}.mlp"):
        ramp = torch.linspace(-1, 1, place.shape[-1])
        yield {place.name: "zero"}, hooked(model, batch, mlp, torch.zeros_like, before=False)
        yield (
            {place.name: ramp},
            hooked(model, batch, mlp, lambda out, ramp=ramp: ramp.expand_as(out), before=False),
        )
    if removable(model, layer):
        entered = entering(model, layer, batch)
        yield {name: "remove"}, hooked(model, batch, unit, lambda _output: entered, before=False)
    # CaiT's CLS: next to the patches
    if model.alias in FAMILIES and not unit.startswith("blocks_token_only"):
        yield (
            {f"{name}.tokens": entering(model, layer, batch).flatten(1, -2).flip(0)},
            model(batch).flip(0),
        )


@pytest.mark.parametrize("name", [*EACH_FAMILY, *HANDWRITTEN])
@torch.no_grad()
def test_changes_are_those_of_a_model_that_is_cut_by_hand(name):
    model = HANDWRITTEN[name]() if name in HANDWRITTEN else shared_model(name)
    batch = of(model)
    plain = model(batch)
    assert removable(model, 0) == (name not in ("einsum", "encoder"))
    for layer in range(len(heads_by_layer(model))):
        for changes, expected in cut_by_hand(model, layer, batch):
            torch.testing.assert_close(
                changed(model, batch, changes), expected, **SAME, msg=str(changes)
            )
            assert not torch.allclose(expected, plain, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "place", "path", "which", "tokens"),
    [
        ("vit", "blocks.1.input", "blocks.1", "cls", [0]),
        ("vit", "blocks.0", "blocks.0", "3,5", [3, 5]),
        ("vit", "blocks.0.attention", "blocks.0.attn", "cls", [0]),
        ("vit", "blocks.0.mlp", "blocks.0.mlp", "3,5", [3, 5]),
        ("swin", "blocks.1.tokens", "layers.0.blocks.1", "0,5", [0, 5]),  # of a map
    ],
)
def test_some_tokens_of_a_place_are_those_that_a_hook_on_timms_module_writes(
    name, place, path, which, tokens
):
    model = shared_model(name)
    batch = of(model)
    ramp = torch.linspace(-1, 1, 32 if name == "vit" else 16)

    def write(tensor: Tensor) -> Tensor:
        sequence = tensor.flatten(1, -2)
        return sequence.index_copy(1, torch.tensor(tokens), sequence[:, tokens] + ramp).view(
            tensor.shape
        )

    expected = hooked(model, batch, path, write, before=path == "blocks.1" or name == "swin")
    logits = changed(model, batch, {f"{place}[{which}]": lambda some: some + ramp})
    torch.testing.assert_close(logits, expected, **SAME)
    assert not torch.allclose(expected, model(batch), atol=1e-6)


def test_heads_of_a_window_that_stands_as_a_map_are_replaced_alone():
    """MaxViT's projection reads (calls, rows, columns, width): zero for one head is zero for its
    columns.
    """
    shape = {
        "img_size": 32,
        "num_classes": 5,
        "depths": (1, 1, 1, 1),
        "embed_dim": (32, 32, 64, 64),
    }
    module = shaken(lambda: timm.create_model("maxvit_rmlp_pico_rw_256", **shape), scale=0.01)
    model = model_of(module, alias="maxvit")
    batch = images()
    assert heads_by_layer(model)[4] == 2
    assert entering(model, 4, batch, projection=True).dim() == 4
    expected = changed(without_head(model, 4, 1), batch, {})
    torch.testing.assert_close(changed(model, batch, {"blocks.4.head.1": "zero"}), expected, **SAME)


class ByName(torch.nn.Linear):
    """A linear layer that gives its tensors by name, as Microsoft's Swin does."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.linear(input=tokens, weight=self.weight, bias=self.bias)


def test_linear_layers_that_are_called_by_name_are_read_like_others():
    usual = ours()
    module = ours().module
    for block in module.blocks:
        for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
            layer.__class__ = ByName
    by_name = model_of(module, size=(32, 48))
    changes = {"blocks.0.head.1": "zero"}
    batch = of(usual)
    costs = []
    for model in (usual, by_name):
        torch.testing.assert_close(changed(model, batch, changes), changed(usual, batch, changes))
        with vitlens.replay(model, batch) as replay:
            torch.testing.assert_close(replay.run([changes])[0], changed(usual, batch, changes))
            costs.append(replay.forward_cost)
    assert costs[0] == costs[1]


def test_heads_before_a_projection_whose_weights_are_computed_again_in_each_pass():
    module = ours().module
    for block in module.blocks:
        weight_norm(block.attn.proj)
    model = model_of(module, size=(32, 48))

    def cut(heads: Tensor) -> Tensor:
        return torch.cat([heads[..., :8], torch.zeros_like(heads[..., 8:])], -1)

    expected = hooked(model, of(model), "blocks.0.attn.proj", cut, before=True)
    torch.testing.assert_close(
        changed(model, of(model), {"blocks.0.head.1": "zero"}), expected, **SAME
    )


@pytest.mark.parametrize("name", ["ours", "swin", "cnn"])
def test_the_mean_is_that_of_all_reference_images(name):
    """More than go through the model at once."""
    model = EVERY[name]()
    batch = of(model)
    reference = of(model, batch=35, seed=3)
    chosen = [place for place in changeable(model) if not place.endswith(("heads", "input"))]
    means = {
        place: tensor.mean(0) for place, tensor in vitlens.capture(model, reference, chosen).items()
    }
    for place in chosen[::3]:
        logits = changed(model, batch, {place: "mean"}, reference=reference)
        torch.testing.assert_close(
            logits, changed(model, batch, {place: means[place]}), **SAME, msg=place
        )


def test_the_mean_of_a_model_in_16_bits_is_rounded_once():
    model = ours().to(torch.bfloat16)
    reference = images((32, 48), batch=7, seed=3).bfloat16()
    mean = seen(model, reference, "blocks.1.mlp").double().mean(0)
    with vitlens.intervene(model, {"blocks.1.mlp": "mean"}, reference=reference):
        mean_output = seen(model, reference[:1], "blocks.1.mlp")[0]
    # half of the last bit
    assert (mean_output.double() - mean).abs().le(2**-8 * mean.abs() + 1e-9).all()


def test_resampling_takes_each_image_once_and_never_its_own_by_the_seed_alone():
    model = ours()
    state = torch.get_rng_state()
    orders = set()
    for count, seed in ((2, 0), (3, 0), (5, 0), (5, 0), (5, 1)):
        batch = images((32, 48), batch=count)
        logits = changed(model, batch, {"blocks.0": "resample"}, seed=seed)
        plain = model(batch)
        order = (logits[:, None] - plain).norm(dim=-1).argmin(1).tolist()
        torch.testing.assert_close(logits, plain[order], **SAME)
        assert sorted(order) == list(range(count))
        for source, other in enumerate(order):
            assert source != other
        orders.add((count, *order))
    assert len(orders) == 4  # the same seed twice, and another
    assert torch.equal(torch.get_rng_state(), state)


NESTED: list[tuple[dict[str, object], dict[str, object]]] = [
    ({WEIGHTS: torch.square}, {"blocks.0.attention.queries": lambda query: 2 * query}),
    ({WEIGHTS: torch.square}, {SCORES: lambda scores: scores.clamp(0)}),
    ({VALUES: torch.abs}, {"blocks.0.head.1": torch.neg}),
    ({"blocks.1.input": lambda tokens: tokens + 1}, {"blocks.0": lambda tokens: 2 * tokens}),
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", range(len(NESTED)))
def test_what_comes_first_in_the_model_is_changed_first(case, fused):
    model = ours(fused=fused)
    batch = images((32, 48))
    for first, second in (NESTED[case], NESTED[case][::-1]):
        # unfused attention has no queries and values
        if set(first) | set(second) <= set(model.places().names):
            with vitlens.intervene(model, first):
                nested = changed(model, batch, second)
            assert not torch.equal(nested, changed(model, batch, first))
            assert not torch.equal(nested, changed(model, batch, second))
            assert torch.equal(nested, changed(model, batch, {**first, **second}))


@pytest.mark.parametrize("place", changeable(ours()))
def test_of_two_changes_of_one_place_the_outer_comes_first(place):
    model = ours()
    batch = images((32, 48))
    with vitlens.intervene(model, {place: lambda tensor: tensor + 1}):
        values = seen(model, batch, place, {place: lambda tensor: 2 * tensor})
    torch.testing.assert_close(values, 2 * (seen(model, batch, place) + 1), **SAME)


def test_a_knock_out_comes_before_any_change_of_the_weights():
    model = ours()
    batch = images((32, 48))
    knocked = {WEIGHTS: KnockOut(keys=0)}
    expected = 2 * seen(model, batch, WEIGHTS, knocked)
    for outer, inner in (
        (knocked, {WEIGHTS: lambda weights: 2 * weights}),
        ({WEIGHTS: lambda w: 2 * w}, knocked),
    ):
        with vitlens.intervene(model, outer):
            torch.testing.assert_close(seen(model, batch, WEIGHTS, inner), expected, **SAME)


@pytest.mark.parametrize("place", [WEIGHTS, "blocks.0.head.1", "blocks.0.mlp", "blocks.0"])
def test_gradients_flow_through_a_change_and_into_what_is_given(place):
    model = ours().double()
    batch = images((32, 48)).double().requires_grad_()
    activations = seen(model, batch.detach(), place).clone().requires_grad_()
    with vitlens.intervene(model, {place: activations}):
        by_given = torch.autograd.grad(model(batch)[:, 1].sum(), activations)[0]
    captured = vitlens.capture(model, batch.detach(), place, graph=True)
    expected = torch.autograd.grad(captured.logits[:, 1].sum(), captured[place])[0]
    torch.testing.assert_close(by_given, expected)
    factor = torch.ones((), dtype=torch.double, requires_grad=True)
    with vitlens.intervene(model, {place: lambda tensor: factor * tensor}):
        slope = torch.autograd.grad(model(batch)[:, 1].sum(), factor)[0]
    torch.testing.assert_close(slope, (expected * activations).sum())


@pytest.mark.parametrize("name", ATTENTIVE)
def test_attention_that_is_knocked_out_sharpened_or_replaced_is_as_written_out(name):
    """The other keys are scaled to one; scores go through the softmax; even weights give the mean
    of the values, half of them half of it; and observers see them.
    """
    model = MODELS[name]()
    batch = of(model)
    clean = seen(model, batch, WEIGHTS)
    keep = torch.ones(clean.shape[-3:])
    keep[1, 0, [1, 3]] = 0
    values = seen(model, batch, WEIGHTS, {WEIGHTS: KnockOut(keys=[1, 3], queries=0, heads=1)})
    torch.testing.assert_close(values, clean * keep / (clean * keep).sum(-1, keepdim=True), **SAME)
    with vitlens.intervene(model, {SCORES: lambda scores: 2 * scores}):
        sharper = seen(model, batch, WEIGHTS)
        scores = seen(model, batch, SCORES)
        torch.testing.assert_close(
            vitlens.attention(model, batch)[0], sharper.flatten(0, -4), **SAME
        )
    torch.testing.assert_close(sharper, clean**2 / (clean**2).sum(-1, keepdim=True), **SAME)
    torch.testing.assert_close(scores.softmax(-1), sharper, **SAME)
    for total in (1.0, 0.5):
        uniform = torch.tensor(total / clean.shape[-1])
        with vitlens.intervene(model, {WEIGHTS: uniform}):
            assert (seen(model, batch, WEIGHTS) == uniform).all()
            assert (vitlens.attention(model, batch)[0] == uniform).all()
            heads = seen(model, batch, "blocks.0.heads")
        if VALUES in model.places().names:
            expected = total * seen(model, batch, VALUES).mean(-2, keepdim=True).expand(heads.shape)
            torch.testing.assert_close(heads, expected, **SAME)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_query_that_attends_to_nothing_reads_zeros(name):
    """All keys of all queries gone is the same as all heads set to zero."""
    model = shared_model(name)
    batch = of(model)
    shapes = {place.name: place.shape for place in model.places()}
    for layer in range(len(heads_by_layer(model))):
        weights = f"blocks.{layer}.attention.weights"
        # talking heads: a bias joins the weights after the softmax
        if name != "cait" or shapes[weights][-2] == 1:
            zero = changed(model, batch, {f"blocks.{layer}.head.*": "zero"})
            torch.testing.assert_close(changed(model, batch, {weights: KnockOut()}), zero, **SAME)


def test_a_knock_out_of_nothing_changes_nothing_and_tokens_may_be_named():
    """Also from a kept clean pass, which once took none for all."""
    model = MODELS["registers"]()
    batch = of(model)
    clean = changed(model, batch, {})
    sets = [{WEIGHTS: KnockOut(**{axis: []})} for axis in ("keys", "queries", "heads")]
    with vitlens.replay(model, batch) as replay:
        for nothing in sets:
            torch.testing.assert_close(changed(model, batch, nothing), clean, **SAME)
            torch.testing.assert_close(replay.run([nothing])[0], clean, **SAME)
    by_name = changed(model, batch, {WEIGHTS: KnockOut(queries="cls", keys="register")})
    assert torch.equal(by_name, changed(model, batch, {WEIGHTS: KnockOut(queries=0, keys=[1, 2])}))
    assert not torch.allclose(by_name, clean, atol=1e-6)


WRONG: list[tuple[object, type[Exception], str]] = [
    ({"blocks.0": "none"}, UnknownNameError, "zero"),
    ({"blocks.0": "mean"}, InputError, "reference=IMAGES"),
    ({"blocks.0": torch.zeros(7)}, InputError, r"\(batch, 13, 16\).*found shape \(7,\)"),
    ({"blocks.0": torch.zeros(1, 2, 13, 16)}, InputError, r"found shape \(1, 2, 13, 16\)"),
    ({"blocks.*": "zero", "blocks.1": "zero"}, InputError, "'blocks.1.residual' twice"),
    ({"logits": "zero"}, UnsupportedError, "found logits"),
    ({"blocks.0.mlp": "remove"}, UnsupportedError, "found blocks.0.mlp; try 'zero'"),
    ({"blocks.0[cls]": "remove"}, UnsupportedError, "to remove"),
    ({"blocks.0": KnockOut(keys=0)}, InputError, "attention weights"),
    ({WEIGHTS: KnockOut(keys=13)}, InputError, "from 0 to 12, found 13"),
    ({WEIGHTS: KnockOut(keys="regster")}, UnknownNameError, "did you mean 'register'"),
    ({"blocks.0": 0.0}, InputError, "found float"),
    ([("blocks.0", "zero")], InputError, "found list"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_what_cannot_be_is_refused_at_once(changes, error, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(error, match=message), vitlens.intervene(ours(), changes):
        pytest.fail("it was not refused")


def test_what_cannot_be_is_refused_in_the_forward_pass():
    model = ours()
    batch = of(model)
    for change in (torch.zeros(2, 13, 16), lambda tensor: tensor[:, :1], lambda _tensor: None):
        with pytest.raises(InputError, match=r"blocks.0.residual, found"):
            changed(model, batch, {"blocks.0": change})
    with pytest.raises(InputError, match="at least two images"):
        changed(model, batch[:1], {"blocks.0": "resample"})
    with pytest.raises(InputError, match="found 16"):
        changed(shared_model("swin"), images(), {WEIGHTS: KnockOut(keys="cls")})
    with pytest.raises(UnsupportedError):
        changed(shared_model("siglip"), images(), {"blocks.2": "remove"})
