"""Changes of places against models that are cut by hand, hooks on timm's modules, and attention written out."""

import copy
from collections.abc import Callable, Iterator

import pytest
import timm
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.uses import BrokenError
from tests.lens.oracles import ATTENTIVE, EVERY, HANDWRITTEN, MODELS, PLAIN, changed, projection_input, with_columns
from tests.lens.tiny import (
    EACH_FAMILY,
    FAMILIES,
    images,
    model_of,
    ours,
    shaken,
    shared_model,
    torchvision_vit,
)
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.attention import projection_of
from vitlens.lens.call import AttentionCall
from vitlens.lens.capture import capture, capture_attention
from vitlens.lens.intervene import Change, KnockOut, another_image, intervene
from vitlens.lens.observe import observing, survey
from vitlens.lens.places import places
from vitlens.lens.trace import Layer, layers
from vitlens.models.model import Model

SAME = {"atol": 1e-5, "rtol": 1e-4}
WEIGHTS = "blocks.0.attention.weights"


@pytest.fixture(params=EACH_FAMILY)
def model(request: pytest.FixtureRequest) -> Model:
    return shared_model(request.param)


def of(model: Model) -> Tensor:
    return images(model.input_size, batch=3)


@pytest.mark.parametrize("name", EVERY)
def test_what_was_captured_changes_nothing_and_another_images_does(name):
    model = EVERY[name]()
    batch = images(model.input_size)
    plain = changed(model, batch, {})
    listed = [place.name for place in places(model) if place.changeable]
    captured = capture(model, batch, listed)
    for place in listed:
        for change in (captured[place], torch.clone):
            found = changed(model, batch, {place: change})
            torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-6, msg=place)
        if not torch.equal(captured[place][0], captured[place][1]):  # the query of attention pooling is a parameter
            moved = changed(model, batch, {place: captured[place].flip(0) + 0.1})
            assert not torch.allclose(moved, plain, atol=1e-6), place


class Passes(nn.Module):
    """In a block's place: what comes in goes out."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, *tokens: Tensor, **_options: object) -> Tensor:
        return tokens[self.which]


def cut_by_hand(model: Model, layer: Layer, batch: Tensor) -> Iterator[tuple[dict[str, Change], Tensor]]:
    """Changes of a layer, each with the logits of a copy of the model whose weights or modules are changed instead."""
    name, ramp = f"blocks.{layer.index}", torch.linspace(-1, 1, layer.head_dim)
    windows = (layer.windows,) if layer.windows > 1 else ()
    for head in range(layer.heads):
        yield {f"{name}.head.{head}": "zero"}, with_columns(model, layer, head)(batch)
        expected = with_columns(model, layer, head, ramp)(batch)
        for shape in ((), (layer.queries,), (len(batch), *windows, layer.queries)):
            yield {f"{name}.head.{head}": ramp.expand(*shape, -1)}, expected
    cut = copy.deepcopy(model)
    mlp = cut.module.get_submodule(layer.mlp) if layer.mlp else nn.Identity()
    *_, linear = (None, *(each for each in mlp.modules() if isinstance(each, nn.Linear)))
    if linear is not None and linear.bias is not None:
        constant = torch.linspace(-1, 1, linear.out_features)
        for change, bias in (("zero", 0 * constant), (constant, constant)):
            linear.weight.zero_()
            linear.bias.copy_(bias)
            yield {f"{name}.mlp": change}, cut(batch)
    if layer.removable and layer.unit != layer.attention:
        cut = copy.deepcopy(model)
        cut.module.set_submodule(layer.unit, Passes(layer.stream))
        yield {name: "remove"}, cut(batch)


@pytest.mark.parametrize("name", [*EACH_FAMILY, *HANDWRITTEN])
def test_changes_are_those_of_a_model_that_is_cut_by_hand(name):
    model = HANDWRITTEN[name]() if name in HANDWRITTEN else shared_model(name)
    batch = of(model)
    with torch.no_grad():
        plain = model(batch)
        for layer in layers(model):
            for changes, expected in cut_by_hand(model, layer, batch):
                torch.testing.assert_close(changed(model, batch, changes), expected, **SAME, msg=str(changes))
                assert not torch.allclose(expected, plain, atol=1e-6)


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


@pytest.mark.parametrize("name", ["vit", "cait", "swin", "siglip"])
def test_a_head_of_another_image_token_by_token(name):
    """By giving what a hook on the projection saw; against a hook that writes it in."""
    model = shared_model(name)
    batch, index = of(model), torch.tensor([2, 0, 1])
    paths = {module: path for path, module in model.module.named_modules()}
    for layer in layers(model):
        seen = projection_input(model, layer, batch)
        columns = slice(layer.head_dim, 2 * layer.head_dim)
        per_image = seen.unflatten(0, (3, -1))[index]

        def write(tensor: Tensor, columns: slice = columns, other: Tensor = per_image) -> Tensor:
            written = tensor.clone()
            written[..., columns] = other.reshape(tensor.shape)[..., columns]
            return written

        expected = hooked(model, batch, paths[projection_of(model, layer.attention)], write, before=True)
        given = per_image[..., columns] if layer.windows > 1 else per_image[:, 0, :, columns]
        torch.testing.assert_close(changed(model, batch, {f"blocks.{layer.index}.head.1": given}), expected, **SAME)
        assert not torch.allclose(expected, model(batch), atol=1e-6)


ON_TIMM: dict[str, tuple[str, bool]] = {  # a place of timm's ViT, its module there, and whether it is the input
    "blocks.1.input": ("blocks.1", True),
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
    batch = of(model)
    path, before = ON_TIMM[place]
    by_name, by_hand = CHANGES[change]

    def first_token(tensor: Tensor) -> Tensor:
        return torch.cat([by_hand(tensor[:, :1]), tensor[:, 1:]], 1)

    for name, write in ((place, by_hand), (f"{place}[cls]", first_token)):
        expected = hooked(model, batch, path, write, before=before)
        torch.testing.assert_close(changed(model, batch, {name: by_name}), expected, **SAME)
        assert not torch.allclose(expected, model(batch), atol=1e-6)


def test_heads_queries_and_values_by_hooks_on_timms_layers():
    model = shared_model("vit")
    batch = of(model)
    cases = {
        "blocks.0.head.1": ("blocks.0.attn.proj", slice(16, 32), True),
        "blocks.0.heads": ("blocks.0.attn.proj", slice(None), True),
        "blocks.1.attention.queries": ("blocks.1.attn.qkv", slice(0, 32), False),
        "blocks.1.attention.keys": ("blocks.1.attn.qkv", slice(32, 64), False),
        "blocks.1.attention.values": ("blocks.1.attn.qkv", slice(64, 96), False),
    }
    for place, (path, columns, before) in cases.items():

        def halve(tensor: Tensor, columns: slice = columns) -> Tensor:
            written = tensor.clone()
            written[..., columns] *= 0.5
            return written

        expected = hooked(model, batch, path, halve, before=before)
        found = changed(model, batch, {place: lambda tensor: 0.5 * tensor})
        torch.testing.assert_close(found, expected, **SAME, msg=place)


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


@pytest.mark.parametrize("name", PLAIN)
def test_changed_scores_go_through_the_softmax(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    weights = capture(model, batch, WEIGHTS)[WEIGHTS]
    with intervene(model, {"blocks.0.attention.scores": lambda scores: 2 * scores}):
        sharper = capture_attention(model, batch).layers[0]
        scores = capture(model, batch, "blocks.0.attention.scores")["blocks.0.attention.scores"]
    torch.testing.assert_close(sharper, weights**2 / (weights**2).sum(-1, keepdim=True), **SAME)
    torch.testing.assert_close(scores.softmax(-1), sharper, **SAME)


@pytest.mark.parametrize("name", ATTENTIVE)
def test_a_knock_out_leaves_the_other_keys_scaled_to_one(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    clean = capture(model, batch, WEIGHTS)[WEIGHTS]
    with intervene(model, {WEIGHTS: KnockOut(keys=[1, 3], queries=0, heads=1)}):
        found = capture(model, batch, WEIGHTS)[WEIGHTS]
    keep = torch.ones(clean.shape[-3:])
    keep[1, 0, [1, 3]] = 0
    torch.testing.assert_close(found, clean * keep / (clean * keep).sum(-1, keepdim=True), **SAME)


class ByHand(nn.Module):
    """Our attention written out, one query's row for some keys left out."""

    def __init__(self, attention: nn.Module, query: int, keys: list[int]) -> None:
        super().__init__()
        self.attention, self.query, self.keys = attention, query, keys

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.attention.qkv(tokens).unflatten(-1, (3, self.attention.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        exponentials = (query @ key.mT * query.shape[-1] ** -0.5).exp()
        exponentials[:, :, self.query, self.keys] = 0
        weights = exponentials / exponentials.sum(-1, keepdim=True)
        return self.attention.proj((weights @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_knock_out_is_attention_written_by_hand(fused, layer):
    model = ours(fused=fused, registers=2)
    batch = of(model)
    cut = copy.deepcopy(model)
    cut.module.blocks[layer].attn = ByHand(cut.module.blocks[layer].attn, 0, [1, 2])
    knock = KnockOut(queries="cls", keys="register")
    knocked = changed(model, batch, {f"blocks.{layer}.attention.weights": knock})
    torch.testing.assert_close(knocked, cut(batch), **SAME)
    assert not torch.allclose(knocked, model(batch), atol=1e-6)


def test_a_query_that_attends_to_nothing_reads_zeros(model):
    """All keys of all queries gone is the same as all heads set to zero."""
    batch = of(model)
    for layer in layers(model):
        if "cait" in model.alias and layer.queries > 1:
            continue  # talking heads: a bias joins the weights after the softmax
        knocked = changed(model, batch, {f"blocks.{layer.index}.attention.weights": KnockOut()})
        torch.testing.assert_close(knocked, changed(model, batch, {f"blocks.{layer.index}.head.*": "zero"}), **SAME)


@pytest.mark.parametrize("knocked", [{"keys": []}, {"queries": []}, {"heads": []}])
def test_a_knock_out_of_nothing_changes_nothing(knocked):
    """Also from a kept clean pass, which once took none for all."""
    model, batch = ours(), images((32, 48))
    nothing = {WEIGHTS: KnockOut(**knocked)}
    clean = changed(model, batch, {})
    torch.testing.assert_close(changed(model, batch, nothing), clean, **SAME)
    with vitlens.replay(model, batch) as kept:
        torch.testing.assert_close(kept.run([nothing])[0], clean, **SAME)


def stream(model: Model, layer: Layer, batch: Tensor) -> Tensor:
    seen: list[Tensor] = []
    unit = model.module.get_submodule(layer.unit)
    handle = unit.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[layer.stream]))
    model(batch)
    handle.remove()
    return seen[0].flatten(1, -2)


def test_the_whole_stream_of_other_images_gives_their_logits(model):
    batch = of(model)
    plain = model(batch)
    for layer in layers(model):
        if layer.unit.startswith("blocks_token_only"):
            continue  # CaiT: the patches come in beside the stream of CLS
        change = {f"blocks.{layer.index}.tokens": stream(model, layer, batch).flip(0)}
        torch.testing.assert_close(changed(model, batch, change), plain.flip(0), **SAME)


def test_some_tokens_of_a_map():
    """A pre-hook that writes the same tokens."""
    model = shared_model("swin")
    batch, layer = of(model), layers(model)[1]
    new = torch.randn(3, 2, stream(model, layer, batch).shape[-1], generator=torch.Generator().manual_seed(1))

    def write(tensor: Tensor) -> Tensor:
        tokens = tensor.clone()
        tokens.view(3, -1, tokens.shape[-1])[:, [0, 5]] = new
        return tokens

    expected = hooked(model, batch, layer.unit, write, before=True)
    torch.testing.assert_close(changed(model, batch, {"blocks.1.tokens[0,5]": new}), expected, **SAME)


def test_heads_of_a_window_that_stands_as_a_map_are_replaced_alone():
    """MaxViT's projection reads (calls, rows, columns, width): zero for one head is zero for its columns."""
    shape = {"img_size": 32, "num_classes": 5, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 64, 64)}
    module = shaken(lambda: timm.create_model("maxvit_rmlp_pico_rw_256", **shape), scale=0.01)
    model, batch = model_of(module, alias="maxvit"), images()
    known = layers(model)
    assert [(layer.heads, layer.head_dim, layer.windows) for layer in known[:2]] == [(1, 32, 64), (1, 32, 64)]
    one = known[4]
    assert projection_input(model, one, batch).dim() == 4
    expected = changed(with_columns(model, one, 1), batch, {})
    torch.testing.assert_close(changed(model, batch, {f"blocks.{one.index}.head.1": "zero"}), expected, **SAME)


def test_a_layer_says_where_everything_is():
    first, last = layers(shared_model("swin"))[::3]
    assert (first.unit, first.windows, first.tokens, first.head_dim) == ("layers.0.blocks.0", 16, 256, 8)
    assert (last.attention, last.heads, last.tokens) == ("layers.1.blocks.1.attn", 4, 64)
    pool = layers(shared_model("siglip"))[2]
    assert (pool.attention, pool.unit, pool.mlp, pool.removable) == ("attn_pool", "attn_pool", "attn_pool.mlp", False)


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
    state = torch.get_rng_state()
    for count, seed in ((2, 0), (2, 1), (3, 0), (10, 0), (10, 4)):
        index = another_image(count, seed)
        assert sorted(index.tolist()) == list(range(count))
        assert (index != torch.arange(count)).all()
    model, batch = ours(), images((32, 48), batch=5)
    found = [changed(model, batch, {"blocks.0": "resample"}, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], model(batch)[another_image(5, 0)], **SAME)
    assert torch.equal(torch.get_rng_state(), state)


def test_several_at_once_are_contexts_nested(model):
    batch, known = of(model), layers(model)
    windows = (known[0].windows,) if known[0].windows > 1 else ()
    several: dict[str, Change] = {
        "blocks.0.head.0": "zero",
        "blocks.0.head.1": torch.randn(3, *windows, known[0].queries, 1),
        "blocks.1.attention.weights": KnockOut(keys=1),
        "blocks.0.mlp": "zero",
        f"blocks.{len(known) - 1}.head.1": "zero",
    }
    at_once = changed(model, batch, several)
    first, *rest = ({place: change} for place, change in several.items())
    with torch.no_grad(), intervene(model, rest[0] | rest[1]), intervene(model, first):
        some = model(batch)
        with intervene(model, rest[2] | rest[3]):
            nested = model(batch)
        with pytest.raises(BrokenError), intervene(model, rest[3]):
            raise BrokenError
        torch.testing.assert_close(model(batch), some)
    torch.testing.assert_close(nested, at_once)
    assert not torch.allclose(some, nested, atol=1e-6)


NESTED: list[tuple[dict[str, Change], dict[str, Change]]] = [
    ({WEIGHTS: lambda weights: weights.square()}, {"blocks.0.attention.queries": lambda query: 2 * query}),
    ({WEIGHTS: lambda weights: weights.square()}, {"blocks.0.attention.scores": lambda scores: scores.clamp(0)}),
    ({"blocks.0.attention.values": torch.abs}, {"blocks.0.head.1": torch.neg}),
    ({"blocks.1.input": lambda tokens: tokens + 1}, {"blocks.0": lambda tokens: 2 * tokens}),
    ({WEIGHTS: lambda weights: 2 * weights}, {WEIGHTS: KnockOut(keys=0)}),  # a knock-out comes before any change
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("outer_first", [True, False])
@pytest.mark.parametrize("case", range(len(NESTED)))
def test_what_comes_first_in_the_model_is_changed_first(case, outer_first, fused):
    model, batch = ours(fused=fused), images((32, 48))
    first, second = NESTED[case] if outer_first else NESTED[case][::-1]
    if not set(first) | set(second) <= set(places(model).names):
        return  # unfused attention has no queries and values
    with intervene(model, first):
        nested = changed(model, batch, second)
    assert not torch.equal(nested, changed(model, batch, first))
    assert not torch.equal(nested, changed(model, batch, second))
    if first.keys() != second.keys():
        assert torch.equal(nested, changed(model, batch, {**first, **second}))
    else:
        with intervene(model, NESTED[case][1]):
            knocked = capture(model, batch, WEIGHTS)[WEIGHTS]
        torch.testing.assert_close(nested, changed(model, batch, {WEIGHTS: 2 * knocked}), **SAME)


@pytest.mark.parametrize("place", [place for place in places(ours()).names if place != "logits"])
def test_of_two_changes_of_one_place_the_outer_comes_first(place):
    model, batch = ours(), images((32, 48))
    with intervene(model, {place: lambda tensor: tensor + 1}), intervene(model, {place: lambda tensor: 2 * tensor}):
        found = capture(model, batch, place)[place]
    clean = capture(model, batch, place)[place]
    torch.testing.assert_close(found, 2 * (clean + 1), **SAME)


@pytest.mark.parametrize("make", [ours, torchvision_vit, FAMILIES["swin"]])
def test_an_observation_sees_the_changed_model_wherever_it_stands(make: Callable[[], Model]):
    model = make()
    batch, what = of(model), {WEIGHTS: KnockOut(queries=0, keys=1)}
    seen: list[Tensor] = []

    def keep(call: AttentionCall) -> None:
        if call.site.layer == 0:
            seen.append(call.weights())

    with torch.no_grad(), intervene(model, what), observing(model, keep):
        assert len(survey(model, batch)) == len(layers(model))  # of the unchanged model
        model(batch)
    with torch.no_grad(), observing(model, keep), intervene(model, what):
        model(batch)
    assert (seen[0][:, :, 0, 1] == 0).all()
    assert torch.equal(seen[0], seen[1])


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
    model = ours()
    batch = of(model)
    for change, message in (
        (torch.zeros(2, 13, 16), "for 1 or 3 images at blocks.0.residual, found one for 2"),
        (lambda tensor: tensor[:, :1], r"shape \(3, 13, 16\) from the function at blocks.0.residual, found shape"),
        (lambda _tensor: None, "found NoneType"),
    ):
        with pytest.raises(InputError, match=message):
            changed(model, batch, {"blocks.0": change})
    with pytest.raises(InputError, match="at least two images to resample blocks"):
        changed(model, batch[:1], {"blocks.0": "resample"})
    with pytest.raises(InputError, match="whole sequence of tokens for 'cls', found 16"):
        changed(shared_model("swin"), images(), {WEIGHTS: KnockOut(keys="cls")})
    with pytest.raises(UnsupportedError, match="output has the shape of its input"):
        changed(shared_model("siglip"), images(), {"blocks.2": "remove"})
