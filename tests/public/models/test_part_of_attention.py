"""Attention that is seen in part, changed after its softmax, or has heads elsewhere."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.models import attention_kinds as kinds
from tests.kit.models.attention_kinds import of_layers, windowed
from tests.kit.models.files import one_line
from tests.kit.models.handwritten import Attention, Block, ViT, noise, own_weights, seeded, wrapped
from tests.kit.select import values_of
from vitlens.errors import UnsupportedError

QUESTIONS = {
    "attention": vitlens.attention,
    "rollout": vitlens.rollout,
    "relevance": vitlens.relevance,
    "statistics": vitlens.statistics,
}


@pytest.mark.parametrize("kind", kinds.SEEN, ids=lambda kind: kind.__name__)
def test_a_softmax_of_scores_is_seen_wherever_it_is_written(kind):
    build = of_layers(None, kind, None)
    model = wrapped(build)
    weights = vitlens.attention(model, noise())
    assert values_of(model.anatomy.attention, "module") == [
        f"layers.{layer}.att" for layer in range(3)
    ]
    assert vitlens.rollout(model, noise()).shape == (3, 3, 4)
    values, outputs = recorded_mixing(seeded(build))
    gate = model.module.layers[1].att.gate.sigmoid() if kind is kinds.gated_outputs else 1.0
    torch.testing.assert_close((weights[1] @ values) * gate, outputs, atol=1e-5, rtol=1e-4)


def recorded_mixing(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Record values and outputs (batch, heads, tokens, head_dim) of the second layer."""
    attention = module.layers[1].att
    seen = []
    mix = attention.mix

    def record(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend((v, mix(q, k, v)))
        return seen[1]

    attention.mix = record
    with torch.no_grad():
        module((noise() - 0.5) / 0.5)
    return seen[0], seen[1]


@pytest.mark.parametrize("kind", kinds.CHANGED, ids=lambda kind: kind.__name__)
def test_weights_changed_after_the_softmax_are_refused_by_the_layers_name(kind):
    model = wrapped(of_layers(None, kind))
    for question in QUESTIONS.values():
        with one_line(UnsupportedError, r"changed after it in layers\.1\.att"):
            question(model, noise())
    assert vitlens.explain(model, noise(), method="eigencam").shape == (3, 3, 4)


@pytest.mark.parametrize("kind", kinds.UNSEEN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_whose_attention_is_not_recognised_is_named(kind, place: int):
    layers = [None, None, None]
    layers[place] = kind
    model = wrapped(of_layers(*layers))
    for question in QUESTIONS.values():
        with one_line(UnsupportedError, rf"none in layers\.{place}\.att, where tokens are mixed"):
            question(model, noise())


class Neighbours(nn.Module):
    """A convolution over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(24, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.mT).mT


class Separate(ViT):
    """Blocks that are no list."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.first = Block()
        self.last = Block(partial(kinds.Kind, kinds.sigmoid))

    def read(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))[:, 0]


def with_neighbours() -> ViT:
    model = ViT(depth=3)
    model.layers[1] = Neighbours()
    return model


@pytest.mark.parametrize(("build", "name"), [(with_neighbours, r"layers\.1"), (Separate, "last")])
def test_a_block_that_mixes_tokens_without_attention_is_named(build, name: str):
    with one_line(UnsupportedError, f"none in {name}, where"):
        vitlens.rollout(wrapped(build), noise())


class WithoutAttention(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(self.norm_b(x))


def every_second() -> ViT:
    model = ViT(depth=4)
    model.layers[1], model.layers[3] = WithoutAttention(nn.Identity), WithoutAttention(nn.Identity)
    return model


def test_blocks_without_attention_mix_nothing_and_the_layers_with_attention_are_named():
    model = wrapped(every_second)
    assert model.anatomy.attention_modules == ("layers.0.att", "layers.2.att")
    assert vitlens.rollout(model, noise()).shape == (3, 3, 4)
    assert "those with attention are 0 and 2" in str(model)


WINDOWS = [  # heads, windows, the order of the axes, by torch's kernel
    (3, 4, "hw", True),
    (4, 4, "hw", True),
    (4, 4, "hw", False),
    (3, 3, "wh", True),
    (2, 4, "wh", False),
    (4, 4, "bh", True),
    (4, 2, "bh", False),
    (3, 3, "bw", True),
    (2, 4, "bw", False),
    (1, 4, "bh", True),
    (4, 1, "hw", False),
]


@pytest.mark.parametrize(("heads", "windows", "order", "is_fused"), WINDOWS)
def test_heads_are_told_from_windows_also_where_their_numbers_are_equal(
    heads: int, windows: int, order: str, is_fused: bool
):
    build = windowed(heads, windows, order, is_fused=is_fused)
    model = wrapped(build)
    expected = own_weights(seeded(build), noise())
    for ours, expected_weights in zip(vitlens.attention(model, noise()), expected, strict=True):
        torch.testing.assert_close(ours, expected_weights, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        with vitlens.intervene(model, {"blocks.0.head.0": "zero"}):
            changed = model(noise())
        model.module.layers[0].att.o.weight[:, : 24 // heads] = 0
        torch.testing.assert_close(changed, model(noise()), atol=1e-5, rtol=1e-4)


def test_the_self_check_notices_windows_taken_for_heads():
    model = wrapped(windowed(4, 4, "hw", is_fused=True))
    exchanged = tuple(replace(part, heads_axis=2) for part in model.anatomy.attention)
    model.anatomy = replace(model.anatomy, attention=exchanged)
    with one_line(UnsupportedError, "windows before the heads"):
        vitlens.attention(model, noise())


def test_heads_mixed_after_the_softmax_have_no_output_of_their_own():
    def mixed(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhqk,hg->bgqk", kinds.scores(q, k).softmax(-1), module.heads) @ v

    model = wrapped(of_layers(mixed, mixed))
    assert len(vitlens.attention(model, noise())) == 2
    with one_line(UnsupportedError, "mixed over its heads"):
        vitlens.ablate(model, noise(), torch.zeros(3, dtype=torch.long))


def test_attention_of_added_keys_says_how_many():
    class Memory(Attention):
        def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().split(x)
            more = k[:, :, :2] * 0 + 1
            return q, torch.cat([more, k], 2), torch.cat([more, v], 2)

    model = wrapped(partial(ViT, partial(Block, Memory)))
    with one_line(UnsupportedError, "the first has 13 and 15"):
        vitlens.rollout(model, noise())
