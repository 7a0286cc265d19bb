"""Interventions against models that are cut by hand: columns, rows, whole modules, attention written out."""

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.kit.uses import BrokenError
from tests.lens.tiny import (
    CLASSES,
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
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.attention import attention_module
from vitlens.lens.call import AttentionCall
from vitlens.lens.capture import capture_attention
from vitlens.lens.intervene import intervened
from vitlens.lens.interventions import (
    BlockRemoved,
    HeadReplaced,
    Intervention,
    KnockedOut,
    MLPReplaced,
    StreamPatched,
    positions,
)
from vitlens.lens.layers import Layer, layers
from vitlens.lens.observe import observing, survey
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet
from vitlens.shapes import TokenLayout

SAME = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(params=EACH_FAMILY)
def model(request: pytest.FixtureRequest) -> Model:
    return shared_model(request.param)


def of(model: Model, *, batch: int = 3) -> Tensor:
    return images(model.input_size, batch=batch)


def changed(model: Model, batch: Tensor, *interventions: Intervention, **data: object) -> Tensor:
    with torch.no_grad(), intervened(model, interventions, **data):
        return model(batch)


def with_columns(model: Model, layer: Layer, head: int, constant: Tensor | None = None) -> Model:
    """A copy whose output projection does not read the head, but (its bias) a constant instead."""
    cut = copy.deepcopy(model)
    projection = attention_module(cut, layer.attention).projection
    assert projection is not None
    columns = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
    if constant is not None:
        projection.bias += projection.weight[:, columns] @ constant
    projection.weight[:, columns] = 0
    return cut


def test_a_head_set_to_zero_is_its_columns_cut(model):
    batch = of(model)
    for layer in layers(model):
        for head in range(layer.heads):
            expected = with_columns(model, layer, head)(batch)
            assert not torch.allclose(expected, model(batch), atol=1e-6)
            torch.testing.assert_close(changed(model, batch, HeadReplaced(layer.index, head)), expected, **SAME)


@pytest.mark.parametrize("by", ["mean", "given"])
def test_a_head_set_to_a_constant_is_its_columns_in_the_bias(model, by):
    batch = of(model)
    for layer in layers(model):
        constant = torch.linspace(-1, 1, layer.head_dim)
        what = HeadReplaced(layer.index, layer.heads - 1, by)
        expected = with_columns(model, layer, layer.heads - 1, constant)(batch)
        tokens = layer.windows * layer.queries
        for shape in ((), (tokens,), (len(batch), tokens)):
            data = {what: constant.expand(*shape, -1)}
            torch.testing.assert_close(changed(model, batch, what, replacements=data), expected, **SAME)


def projection_input(model: Model, layer: Layer, batch: Tensor) -> Tensor:
    projection = attention_module(model, layer.attention).projection
    seen: list[Tensor] = []
    handle = projection.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    model(batch)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", ["vit", "cait", "swin", "siglip"])
def test_a_head_of_another_image_token_by_token(name):
    """Both ways: by index, and by giving what a hook on the projection saw; against a hook that writes it in."""
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

        projection = attention_module(model, layer.attention).projection
        handle = projection.register_forward_pre_hook(write)
        expected = model(batch)
        handle.remove()
        assert not torch.allclose(expected, model(batch), atol=1e-6)
        resampled, given = (HeadReplaced(layer.index, 1, by) for by in ("resample", "given"))
        data = {resampled: index, given: per_image[index].flatten(1, 2)[..., columns]}
        for what in (resampled, given):
            torch.testing.assert_close(changed(model, batch, what, replacements=data), expected, **SAME)


def left_over(weights: Tensor, keep: Tensor) -> Tensor:
    rest = weights * keep
    return rest / rest.sum(-1, keepdim=True).clamp_min(1e-30)


@pytest.mark.parametrize("heads", [None, (1,)])
def test_a_knock_out_leaves_the_other_keys_scaled_to_one(model, heads):
    batch = of(model)
    clean = capture_attention(model, batch)
    for layer in layers(model):
        queries, keys = (0,) if layer.queries == 1 else (0, 2), (1, 3)
        keep = torch.ones(layer.heads, layer.queries, layer.keys)
        for head in heads or range(layer.heads):
            for query in queries:
                keep[head, query, list(keys)] = 0
        with intervened(model, KnockedOut(layer.index, queries, keys, heads)):
            seen = capture_attention(model, batch)
        expected = left_over(clean.layers[layer.index], keep)
        torch.testing.assert_close(seen.layers[layer.index], expected, atol=1e-5, rtol=1e-4)
        with torch.no_grad():
            assert not torch.equal(seen.layers[layer.index], clean.layers[layer.index])


def test_a_query_that_may_look_at_nothing_reads_zeros(model):
    """All keys of all queries gone is the same as all heads set to zero."""
    batch = of(model)
    for layer in layers(model):
        if "cait" in model.alias and layer.queries > 1:
            continue  # talking heads: a bias joins the weights after the softmax
        heads = [HeadReplaced(layer.index, head) for head in range(layer.heads)]
        knocked = changed(model, batch, KnockedOut(layer.index))
        torch.testing.assert_close(knocked, changed(model, batch, *heads), **SAME)


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
    batch, layout = of(model), model.layout
    keys = positions(layout, "register")
    cut = copy.deepcopy(model)
    cut.module.blocks[layer].attn = ByHand(cut.module.blocks[layer].attn, 0, list(keys))
    knocked = changed(model, batch, KnockedOut(layer, positions(layout, "cls"), keys))
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
        mean = MLPReplaced(layer.index, "mean")
        for what, bias in ((MLPReplaced(layer.index), 0 * constant), (mean, constant)):
            linear.weight.zero_()
            linear.bias.copy_(bias)
            found = changed(model, batch, what, replacements={mean: constant})
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
        found = changed(model, batch, BlockRemoved(layer.index))
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
        what = StreamPatched(layer.index)
        data = {what: stream(model, layer, batch).flip(0)}
        torch.testing.assert_close(changed(model, batch, what, replacements=data), plain.flip(0), **SAME)


@pytest.mark.parametrize("name", ["ours", "swin"])
def test_some_tokens_of_the_stream_alone(name):
    """A pre-hook that writes the same tokens."""
    model = shared_model(name)
    batch, layer = of(model), layers(model)[1]
    what = StreamPatched(1, (0, 5))
    new = torch.randn(3, 2, stream(model, layer, batch).shape[-1], generator=torch.Generator().manual_seed(1))

    def write(_module, inputs):
        tokens = inputs[0].clone()
        tokens.view(3, -1, tokens.shape[-1])[:, [0, 5]] = new
        return (tokens, *inputs[1:])

    handle = model.module.get_submodule(layer.unit).register_forward_pre_hook(write)
    expected = model(batch)
    handle.remove()
    torch.testing.assert_close(changed(model, batch, what, replacements={what: new}), expected, **SAME)


def test_several_at_once_are_contexts_nested(model):
    batch, last = of(model), len(layers(model)) - 1
    several = [HeadReplaced(0, 0), HeadReplaced(0, 1), KnockedOut(1, None, (1,)), MLPReplaced(0), HeadReplaced(last, 1)]
    given = HeadReplaced(0, 1, "given")
    data = {given: torch.randn(3, layers(model)[0].windows * layers(model)[0].queries, 1)}
    several[1] = given
    at_once = changed(model, batch, *several, replacements=data)
    first, *rest = several
    with torch.no_grad(), intervened(model, rest[:2], replacements=data), intervened(model, first):
        some = model(batch)
        with intervened(model, rest[2:]):
            nested = model(batch)
        torch.testing.assert_close(model(batch), some)
    torch.testing.assert_close(nested, at_once)
    torch.testing.assert_close(model(batch), changed(model, batch))
    assert not torch.allclose(some, nested, atol=1e-6)


@pytest.mark.parametrize("make", [ours, torchvision_vit, FAMILIES["swin"]])
def test_an_observation_sees_the_changed_model_wherever_it_stands(make: Callable[[], Model]):
    model = make()
    batch, what = of(model), KnockedOut(0, (0,), (1,))
    survey(model, batch)
    seen: list[Tensor] = []

    def keep(call: AttentionCall) -> None:
        if call.site.layer == 0:
            seen.append(call.weights())

    with torch.no_grad(), intervened(model, what), observing(model, keep):
        model(batch)
    with torch.no_grad(), observing(model, keep), intervened(model, what):
        model(batch)
    assert (seen[0][:, :, 0, 1] == 0).all()
    assert torch.equal(seen[0], seen[1])


def test_a_model_may_be_surveyed_with_a_change_in_force():
    model = ours()
    with intervened(model, KnockedOut(0, (0,), (1,))):
        assert len(survey(model, of(model))) == 2


def test_gradients_go_through_an_intervention():
    model = ours()
    batch = of(model).requires_grad_()
    with intervened(model, [HeadReplaced(0, 0), KnockedOut(1, (0,), (1,))]):
        gradient = torch.autograd.grad(model(batch)[:, 0].sum(), batch)[0]
    cut = with_columns(model, layers(model)[0], 0)
    with intervened(cut, KnockedOut(1, (0,), (1,))):
        expected = torch.autograd.grad(cut(batch)[:, 0].sum(), batch)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


WRONG: dict[str, tuple[Intervention, type[Exception], str]] = {
    "layer": (HeadReplaced(2, 0), InputError, "expected a layer from 0 to 1 of ours, found 2"),
    "negative layer": (BlockRemoved(-1), InputError, "found -1"),
    "head": (HeadReplaced(1, 2), InputError, r"expected a head from 0 to 1 in layer 1 of ours \(blocks.1\), found 2"),
    "head of a knock-out": (KnockedOut(1, (0,), (0,), (3,)), InputError, "expected a head from 0 to 1"),
    "query": (KnockedOut(0, (13,)), InputError, "expected query positions from 0 to 12"),
    "key": (KnockedOut(0, (0,), (-1,)), InputError, "expected key positions from 0 to 12"),
    "token": (StreamPatched(0, (40,)), InputError, "expected token positions from 0 to 12"),
    "mean without data": (HeadReplaced(0, 0, "mean"), InputError, "expected a tensor for HeadReplaced"),
    "resample without data": (HeadReplaced(0, 0, "resample"), InputError, "expected a tensor"),
    "MLP's mean without data": (MLPReplaced(0, "mean"), InputError, "expected a tensor"),
    "patch without data": (StreamPatched(0), InputError, "expected a tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_exist_is_refused(case):
    what, error, message = WRONG[case]
    with pytest.raises(error, match=message), intervened(ours(), what):
        pytest.fail("it was not refused")


@pytest.mark.parametrize(
    ("what", "data", "message"),
    [
        (HeadReplaced(0, 0, "mean"), torch.zeros(5), r"fits \(batch, tokens, width\) = \(3, 13, 8\)"),
        (HeadReplaced(0, 0, "mean"), torch.zeros(14, 8), "found shape"),
        (HeadReplaced(0, 0, "resample"), torch.tensor([0, 1]), "one image index for each of 3 images"),
        (HeadReplaced(0, 0, "resample"), torch.zeros(3), "float32"),
        (MLPReplaced(0, "given"), torch.zeros(7, 16), "found shape"),
        (StreamPatched(0, (0, 1)), torch.zeros(3, 16), "found shape"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(what, data, message):
    model = ours()
    with pytest.raises(InputError, match=message):
        changed(model, of(model), what, replacements={what: data})


def test_a_model_without_attention_is_refused():
    cnn = model_of(build_resnet("resnet20", classes=len(CLASSES), image_size=(32, 32)), alias="cnn")
    with pytest.raises(UnsupportedError, match="expected softmax attention"):
        changed(cnn, images(), HeadReplaced(0, 0))


def test_a_pooling_query_is_no_block():
    with pytest.raises(UnsupportedError, match="output has the shape of its input"):
        changed(timm_model("vit_base_patch16_siglip_224"), images(), BlockRemoved(2))


def test_an_unknown_replacement_is_refused():
    for what, word in ((HeadReplaced(0, 0), "median"), (MLPReplaced(0), "resample")):
        object.__setattr__(what, "by", word)  # the type checker of the tests would stop it at the constructor
        with pytest.raises(UnknownNameError, match=f"no replacement '{word}'"):
            what.__post_init__()


def test_interventions_serve_as_keys():
    several = [HeadReplaced(3, 7, "mean"), KnockedOut(0, (0,), (1, 2)), BlockRemoved(5), StreamPatched(1, (0,), "cat")]
    assert len({*several, *several, HeadReplaced(3, 7, "mean", "a"), HeadReplaced(3, 7, "mean", "b")}) == 6


def test_where_the_tokens_stand():
    layout = TokenLayout((2, 2), (8, 8), ("cls", "register", "register"))
    assert positions(layout, "cls") == (0,)
    assert positions(layout, "register") == (1, 2)
    assert positions(layout, "patch") == (3, 4, 5, 6)
    assert positions(layout, "all") == tuple(range(7))
    with pytest.raises(InputError, match="expected a model with a distillation token"):
        positions(layout, "distillation")


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

    with intervened(model, HeadReplaced(one.index, 1)), torch.no_grad():
        replaced = model(batch)
    hook = module.get_submodule(f"{one.attention}.proj").register_forward_pre_hook(without)
    with torch.no_grad():
        expected = model(batch)
    hook.remove()
    assert seen[0].dim() == 4
    torch.testing.assert_close(replaced, expected)


def test_the_inner_of_two_interventions_undoes_its_own_alone():
    model, batch = ours(), images((32, 48))
    with torch.no_grad(), intervened(model, HeadReplaced(0, 0)):
        outer = model(batch)
        with pytest.raises(BrokenError), intervened(model, [HeadReplaced(0, 0), HeadReplaced(0, 1)]):
            raise BrokenError
        assert torch.equal(model(batch), outer)
    assert not torch.equal(model(batch), outer)
