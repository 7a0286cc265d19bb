"""Hooks report calls and are removed; nn.MultiheadAttention computed by its formula equals itself."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lens.tiny import images, ours
from vitlens.errors import UnsupportedError
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observing
from vitlens.models.hooks import Arguments, as_call, watching


class Encoder(nn.Module):
    def __init__(self, *, need_weights: bool = False, batch_first: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, bias=bias, batch_first=batch_first)
        self.need_weights = need_weights

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.attn(query, key, key, need_weights=self.need_weights, attn_mask=mask)[0]
        return result


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MASKS = {
    "none": None,
    "boolean": random(5, 5, seed=3) > 0.5,
    "additive": random(5, 5, seed=3),
    "per head": random(2 * 4, 5, 5, seed=3) > 0.8,
}


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_output_and_weights_are_the_modules_own(mask, bias, cross):
    torch.manual_seed(0)
    model = Encoder(bias=bias).eval()
    query = random(2, 5, 16)
    key = random(2, 5, 16, seed=1) if cross else query
    plain = model(query, key, MASKS[mask])
    own = model.attn(query, key, key, attn_mask=MASKS[mask], average_attn_weights=False)[1]
    calls: list[AttentionCall] = []
    with observing(model, calls.append):
        observed = model(query, key, MASKS[mask])
    torch.testing.assert_close(observed, plain, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(calls[0].weights(), own, atol=1e-6, rtol=1e-5)
    assert (calls[0].site.module, calls[0].site.heads) == ("attn", 4)


def test_tokens_first():
    model = Encoder(batch_first=False).eval()
    query = random(5, 2, 16)
    plain = model(query, query)
    calls: list[AttentionCall] = []
    with observing(model, calls.append):
        torch.testing.assert_close(model(query, query), plain, atol=1e-6, rtol=1e-5)
    assert calls[0].weights().shape == (2, 4, 5, 5)


class Returning(Encoder):
    """Returns the weights as nn.MultiheadAttention does by default, or one matrix a head."""

    def __init__(self, *, average: bool) -> None:
        super().__init__()
        self.average = average

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.attn(query, key, key, attn_mask=mask, average_attn_weights=self.average)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("mask", [None, torch.ones(5, 7, dtype=torch.bool).triu(4)])
def test_returned_weights_are_those_of_torch(average: bool, mask: Tensor | None):
    model, query, key = Returning(average=average).eval(), random(2, 5, 16), random(2, 7, 16, seed=1)
    output, weights = model(query, key, mask)
    calls: list[AttentionCall] = []
    with observing(model, calls.append):
        observed, returned = model(query, key, mask)
    torch.testing.assert_close(observed, output, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(returned, weights, atol=1e-6, rtol=1e-5)
    assert len(calls) == 1
    each = calls[0].weights()
    torch.testing.assert_close(each.mean(1) if average else each, weights, atol=1e-6, rtol=1e-5)


def test_added_keys_are_refused_aloud():
    model = Encoder().eval()
    model.attn = nn.MultiheadAttention(16, 4, add_bias_kv=True, batch_first=True)
    with pytest.raises(UnsupportedError, match="added keys"), observing(model, lambda _call: None):
        model(random(2, 5, 16), random(2, 5, 16))


class Direct(Encoder):
    """Calls torch's function itself, whose boolean mask says who is left out (the module turns it into numbers)."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        own = self.attn
        result: Tensor = F.multi_head_attention_forward(
            query,
            key,
            key,
            16,
            4,
            own.in_proj_weight,
            own.in_proj_bias,
            None,
            None,
            False,
            0.0,
            own.out_proj.weight,
            own.out_proj.bias,
            training=False,
            need_weights=False,
            attn_mask=mask,
        )[0]
        return result


def test_the_function_called_with_a_boolean_mask():
    model = Direct().eval()
    query, mask = random(5, 2, 16), random(5, 5, seed=3) > 0.5
    plain = model(query, query, mask)
    calls: list[AttentionCall] = []
    root = Root(model, query, mask)
    with observing(root, calls.append):
        torch.testing.assert_close(root(random(2, 3)), plain, atol=1e-6, rtol=1e-5)
    assert (calls[0].weights()[..., mask] == 0).all()


class Root(nn.Module):
    def __init__(self, layer: nn.Module, query: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.layer, self.query, self.mask = layer, query, mask

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.layer(self.query, self.query, self.mask)
        return result


def test_watching_reports_arguments_and_outputs_in_the_order_of_the_calls():
    model, batch = ours(), images((32, 48))
    calls: list[tuple[str, str]] = []
    outputs: list[Tensor] = []

    def before(name: str, arguments: Arguments) -> None:
        calls.append(("before", name))
        assert list(arguments) == [0]

    def after(name: str, arguments: Arguments, output: Tensor) -> None:
        calls.append(("after", name))
        args, kwargs = as_call(arguments)
        assert not kwargs
        assert args[0].shape == output.shape
        outputs.append(output)

    names = ("blocks.0", "blocks.0.mlp", "blocks.1")
    with torch.no_grad(), watching(model.module, names, after, before=before):
        logits = model(batch)
    inner = [("before", "blocks.0.mlp"), ("after", "blocks.0.mlp")]
    first = [("before", "blocks.0"), *inner, ("after", "blocks.0")]
    assert calls == [*first, ("before", "blocks.1"), ("after", "blocks.1")]
    with torch.no_grad():
        assert torch.equal(model(batch), logits)
    assert len(outputs) == 3  # nothing is watched any more


def test_a_module_that_raised_is_reported_where_asked():
    model = ours()
    left: list[object] = []
    with (
        pytest.raises(RuntimeError),
        watching(model.module, ["blocks.0"], lambda _name, _arguments, output: left.append(output), always=True),
    ):
        model.module.blocks[0](torch.zeros(1, 2, 3))  # of another width
    assert left == [None]
