"""Interventions against models that are cut by hand: columns, rows, whole modules, attention written out."""

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.kit.uses import BrokenError
from tests.lens.tiny import (
    EACH_FAMILY,
    FAMILIES,
    images,
    model_of,
    ours,
    shaken,
    shared_model,
    timm_model,
    torchvision_vit,
)
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.attention import projection_of
from vitlens.lens.call import AttentionCall
from vitlens.lens.intervene import Change, KnockOut, intervene
from vitlens.lens.observe import observing, survey
from vitlens.lens.places import resolve_tokens
from vitlens.lens.trace import Layer, layers
from vitlens.models.model import Model

SAME = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(params=EACH_FAMILY)
def model(request: pytest.FixtureRequest) -> Model:
    return shared_model(request.param)


def of(model: Model, *, batch: int = 3) -> Tensor:
    return images(model.input_size, batch=batch)


def changed(model: Model, batch: Tensor, changes: dict[str, Change]) -> Tensor:
    with torch.no_grad(), intervene(model, changes):
        return model(batch)


def with_columns(model: Model, layer: Layer, head: int, constant: Tensor | None = None) -> Model:
    """A copy whose output projection does not read the head, but (its bias) a constant instead."""
    cut = copy.deepcopy(model)
    projection = projection_of(cut, layer.attention)
    assert projection is not None
    columns = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
    if constant is not None:
        projection.bias += projection.weight[:, columns] @ constant
    projection.weight[:, columns] = 0
    return cut


@pytest.mark.parametrize("constant", ["zero", "given"])
def test_a_head_set_to_a_constant_is_its_columns_in_the_bias(model, constant):
    batch = of(model)
    for layer in layers(model):
        given = torch.linspace(-1, 1, layer.head_dim) if constant == "given" else torch.zeros(layer.head_dim)
        windows = (layer.windows,) if layer.windows > 1 else ()
        for head in range(layer.heads):
            expected = with_columns(model, layer, head, given)(batch)
            assert not torch.allclose(expected, model(batch), atol=1e-6)
            for shape in ((), (layer.queries,), (len(batch), *windows, layer.queries)):
                change = {f"blocks.{layer.index}.head.{head}": given.expand(*shape, -1)}
                torch.testing.assert_close(changed(model, batch, change), expected, **SAME)


def projection_input(model: Model, layer: Layer, batch: Tensor) -> Tensor:
    projection = projection_of(model, layer.attention)
    seen: list[Tensor] = []
    handle = projection.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    model(batch)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", ["vit", "cait", "swin", "siglip"])
def test_a_head_of_another_image_token_by_token(name):
    """By giving what a hook on the projection saw; against a hook that writes it in."""
    model = shared_model(name)
    batch, index = of(model), torch.tensor([2, 0, 1])
    for layer in layers(model):
        seen = projection_input(model, layer, batch)
        columns = slice(layer.head_dim, 2 * layer.head_dim)
        per_image = seen.unflatten(0, (3, -1))
        other = per_image[index].reshape(seen.shape)

        def write(_module, inputs, columns=columns, other=other):
            written = inputs[0].clone()
            written[..., columns] = other[..., columns]
            return written

        projection = projection_of(model, layer.attention)
        handle = projection.register_forward_pre_hook(write)
        expected = model(batch)
        handle.remove()
        assert not torch.allclose(expected, model(batch), atol=1e-6)
        given = per_image[index][..., columns] if layer.windows > 1 else per_image[index][:, 0, :, columns]
        torch.testing.assert_close(changed(model, batch, {f"blocks.{layer.index}.head.1": given}), expected, **SAME)


def test_a_query_that_may_look_at_nothing_reads_zeros(model):
    """All keys of all queries gone is the same as all heads set to zero."""
    batch = of(model)
    for layer in layers(model):
        if "cait" in model.alias and layer.queries > 1:
            continue  # talking heads: a bias joins the weights after the softmax
        knocked = changed(model, batch, {f"blocks.{layer.index}.attention.weights": KnockOut()})
        torch.testing.assert_close(knocked, changed(model, batch, {f"blocks.{layer.index}.head.*": "zero"}), **SAME)


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


def last_linear(module: nn.Module) -> nn.Linear:
    return [found for found in module.modules() if isinstance(found, nn.Linear)][-1]


def test_an_mlp_set_to_zero_or_a_constant_is_its_last_layer_so_made(model):
    batch = of(model)
    for layer in layers(model):
        cut = copy.deepcopy(model)
        linear = last_linear(cut.module.get_submodule(layer.mlp))
        constant = torch.linspace(-1, 1, linear.out_features)
        changes: tuple[tuple[Change, Tensor], ...] = (("zero", 0 * constant), (constant, constant))
        for change, bias in changes:
            linear.weight.zero_()
            linear.bias.copy_(bias)
            found = changed(model, batch, {f"blocks.{layer.index}.mlp": change})
            torch.testing.assert_close(found, cut(batch), **SAME)
            assert not torch.allclose(found, model(batch), atol=1e-6)


class Passes(nn.Module):
    """In a block's place: what comes in goes out."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, *tokens: Tensor, **_options: object) -> Tensor:
        return tokens[self.which]


def test_a_block_removed_is_a_block_that_passes(model):
    batch = of(model)
    for layer in layers(model):
        if not layer.removable:
            continue
        cut = copy.deepcopy(model)
        cut.module.set_submodule(layer.unit, Passes(layer.stream))
        found = changed(model, batch, {f"blocks.{layer.index}": "remove"})
        torch.testing.assert_close(found, cut(batch), **SAME)
        assert not torch.allclose(found, model(batch), atol=1e-6)


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


@pytest.mark.parametrize("name", ["ours", "swin"])
def test_some_tokens_of_the_stream_alone(name):
    """A pre-hook that writes the same tokens."""
    model = shared_model(name)
    batch, layer = of(model), layers(model)[1]
    new = torch.randn(3, 2, stream(model, layer, batch).shape[-1], generator=torch.Generator().manual_seed(1))

    def write(_module, inputs):
        tokens = inputs[0].clone()
        tokens.view(3, -1, tokens.shape[-1])[:, [0, 5]] = new
        return (tokens, *inputs[1:])

    handle = model.module.get_submodule(layer.unit).register_forward_pre_hook(write)
    expected = model(batch)
    handle.remove()
    torch.testing.assert_close(changed(model, batch, {"blocks.1.tokens[0,5]": new}), expected, **SAME)


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
        torch.testing.assert_close(model(batch), some)
    torch.testing.assert_close(nested, at_once)
    torch.testing.assert_close(model(batch), changed(model, batch, {}))
    assert not torch.allclose(some, nested, atol=1e-6)


@pytest.mark.parametrize("make", [ours, torchvision_vit, FAMILIES["swin"]])
def test_an_observation_sees_the_changed_model_wherever_it_stands(make: Callable[[], Model]):
    model = make()
    batch, what = of(model), {"blocks.0.attention.weights": KnockOut(queries=0, keys=1)}
    survey(model, batch)
    seen: list[Tensor] = []

    def keep(call: AttentionCall) -> None:
        if call.site.layer == 0:
            seen.append(call.weights())

    with torch.no_grad(), intervene(model, what), observing(model, keep):
        model(batch)
    with torch.no_grad(), observing(model, keep), intervene(model, what):
        model(batch)
    assert (seen[0][:, :, 0, 1] == 0).all()
    assert torch.equal(seen[0], seen[1])


def test_a_model_may_be_surveyed_with_a_change_in_force():
    model = ours()
    with intervene(model, {"blocks.0.attention.weights": KnockOut(queries=0, keys=1)}):
        assert len(survey(model, of(model))) == 2


def test_gradients_go_through_an_intervention():
    model = ours()
    batch = of(model).requires_grad_()
    knock: dict[str, Change] = {"blocks.1.attention.weights": KnockOut(queries=0, keys=1)}
    with intervene(model, {"blocks.0.head.0": "zero", **knock}):
        gradient = torch.autograd.grad(model(batch)[:, 0].sum(), batch)[0]
    cut = with_columns(model, layers(model)[0], 0)
    with intervene(cut, knock):
        expected = torch.autograd.grad(cut(batch)[:, 0].sum(), batch)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_a_pooling_query_is_no_block():
    with pytest.raises(UnsupportedError, match="output has the shape of its input"):
        changed(timm_model("vit_base_patch16_siglip_224"), images(), {"blocks.2": "remove"})


def test_where_the_tokens_stand():
    model = ours(registers=2)
    count = model.layout.tokens
    for word, expected in (("cls", (0,)), ("register", (1, 2)), ("patch", tuple(range(3, count)))):
        assert resolve_tokens(model, word, count) == expected
    assert resolve_tokens(model, "all", 7) == tuple(range(7))
    with pytest.raises(InputError, match="expected a model with a distillation token"):
        resolve_tokens(model, "distillation", count)


def test_a_layer_says_where_everything_is():
    first, last = layers(timm_model("swin_tiny_patch4_window7_224"))[::3]
    assert (first.unit, first.windows, first.tokens, first.head_dim) == ("layers.0.blocks.0", 16, 256, 8)
    assert (last.attention, last.heads, last.tokens) == ("layers.1.blocks.1.attn", 4, 64)
    pool = layers(timm_model("vit_base_patch16_siglip_224"))[2]
    assert (pool.attention, pool.unit, pool.mlp, pool.removable) == ("attn_pool", "attn_pool", "attn_pool.mlp", False)


def test_heads_of_a_window_that_stands_as_a_map_are_replaced_alone():
    """MaxViT's projection reads (calls, rows, columns, width): zero for one head is zero for its columns."""
    module = shaken(
        lambda: timm.create_model(
            "maxvit_rmlp_pico_rw_256", img_size=32, num_classes=5, depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64)
        ),
        scale=0.01,
    )
    model, batch = model_of(module, alias="maxvit"), images()
    known = layers(model)
    assert [(layer.heads, layer.head_dim, layer.windows) for layer in known[:2]] == [(1, 32, 64), (1, 32, 64)]
    one = known[4]
    seen: list[torch.Tensor] = []

    def without(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        seen.append(inputs[0].clone())
        changed = inputs[0].clone()
        changed[..., one.head_dim :] = 0
        return (changed,)

    with intervene(model, {f"blocks.{one.index}.head.1": "zero"}), torch.no_grad():
        replaced = model(batch)
    hook = module.get_submodule(f"{one.attention}.proj").register_forward_pre_hook(without)
    with torch.no_grad():
        expected = model(batch)
    hook.remove()
    assert seen[0].dim() == 4
    torch.testing.assert_close(replaced, expected)


def test_the_inner_of_two_interventions_undoes_its_own_alone():
    model, batch = ours(), images((32, 48))
    with torch.no_grad(), intervene(model, {"blocks.0.head.0": "zero"}):
        outer = model(batch)
        with pytest.raises(BrokenError), intervene(model, {"blocks.0.head.*": "zero"}):
            raise BrokenError
        assert torch.equal(model(batch), outer)
    assert not torch.equal(model(batch), outer)
