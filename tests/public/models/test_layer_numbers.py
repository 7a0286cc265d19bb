"""The number of a layer is that of its block, also where blocks without attention lie between.

Blocks that add nothing are put between those of a model: every result of a layer is then the one
that the layer had without them, under the number of its block.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.models.files import one_line
from tests.kit.models.handwritten import Block, ViT, noise, seeded, wrapped
from tests.kit.models.silent_blocks import Clipped, Silent, SilentMixer, listed, plain
from tests.kit.select import values_of
from tests.kit.tiny import model_of
from vitlens.errors import InputError, VitlensError

LABELS = torch.tensor([0, 1, 2])


class Flat(nn.Sequential):
    """All parts in one sequence: stem, blocks, norm, head."""

    def __init__(self) -> None:
        model = plain()
        first, second, third = model.layers
        stem = Stem(model)
        super().__init__(
            stem, first, Silent(), second, third, Silent(), model.ln, First(), model.out
        )


class Stem(nn.Module):
    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.conv = model.stem
        self.extra = model.extra
        self.pos = model.pos

    def forward(self, x: Tensor) -> Tensor:
        patches = self.conv(x).flatten(2).transpose(1, 2)
        return torch.cat([self.extra.expand(len(x), -1, -1), patches], 1) + self.pos


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class Pairs(ViT):
    """Lists of a norm and a branch, residuals in the outer loop, as x-transformers has them."""

    def __init__(self, places: str) -> None:
        super().__init__(depth=3)
        layers = list(self.layers)
        members = []
        for kind in places:
            members.append(
                nn.ModuleList(
                    [layers[0].norm_a, layers.pop(0).att] if kind == "a" else silent_branch()
                )
            )
        self.layers = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for norm, branch in self.layers:
            x = x + branch(norm(x))
        return self.out(self.ln(x)[:, 0])


def silent_branch() -> list[nn.Module]:
    part = Silent()
    return [part.norm, part.mlp]


MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]
] = {
    "one between": (plain, partial(listed, None, Silent, None, None), (0, 2, 3), {}),
    "around": (
        plain,
        partial(listed, Silent, None, Silent, Silent, None, None, Silent),
        (1, 4, 5),
        {},
    ),
    "every second": (
        plain,
        partial(listed, None, Silent, None, Silent, None, Silent),
        (0, 2, 4),
        {},
    ),
    "another class": (
        plain,
        partial(listed, SilentMixer, None, None, SilentMixer, None),
        (1, 2, 4),
        {},
    ),
    "without weights": (plain, partial(listed, None, Clipped, None, None, Clipped), (0, 2, 3), {}),
    "identity": (plain, partial(listed, None, nn.Identity, None, None), (0, 2, 3), {}),
    "a sequence": (plain, Flat, (0, 2, 3), {}),
    "named": (
        plain,
        partial(listed, None, Silent, None, None),
        (0, 2, 3),
        {"blocks": tuple(f"layers.{number}" for number in range(4))},
    ),
    "lists": (partial(Pairs, "aaa"), partial(Pairs, "afafa"), (0, 2, 4), {}),
}


@pytest.fixture(params=MODELS)
def twins(request) -> tuple[vitlens.Model, vitlens.Model, list[int]]:
    """Return a model, the same with silent blocks, and the numbers of its layers there."""
    build, changed, numbers, hints = MODELS[request.param]
    before = wrapped(build)
    after = wrapped(changed, **hints)
    torch.testing.assert_close(before(noise()), after(noise()), rtol=0, atol=0)
    return before, after, list(numbers)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, equal_nan=True, atol=1e-5, rtol=1e-4)


def test_attention_has_the_numbers_of_blocks_and_no_heads_elsewhere(twins):
    before, after, numbers = twins
    expected = vitlens.attention(before, noise())
    attention = vitlens.attention(after, noise())
    for layer, number in enumerate(numbers):
        same(attention[number], expected[layer])
    elsewhere = [weights for number, weights in enumerate(attention) if number not in numbers]
    assert {weights.shape[1] for weights in elsewhere} == {0}
    observed = []
    vitlens.observe(after, noise(), lambda call: observed.append(call.site.layer))
    assert observed == numbers


def test_statistics_have_the_numbers_of_blocks(twins):
    before, after, numbers = twins
    expected = vitlens.statistics(before, noise())
    statistics = vitlens.statistics(after, noise())
    for name in ("distance", "entropy", "cls_mass"):
        table = getattr(statistics, name)
        same(table[numbers], getattr(expected, name))
        assert int(table.isnan().all(1).sum()) == len(table) - len(numbers)
    rows = list(statistics.records())
    for row, expected_row in zip(rows, expected.records(), strict=True):
        assert (row["layer"], row["head"]) == (numbers[expected_row["layer"]], expected_row["head"])
        assert math.isclose(row["entropy"], expected_row["entropy"], rel_tol=1e-5)


def test_ablation_replay_and_places_have_the_numbers_of_blocks(twins):
    before, after, numbers = twins
    expected = vitlens.ablate(before, noise(), LABELS, replace="zero")
    effects = vitlens.ablate(after, noise(), LABELS, replace="zero")
    same(effects.delta_loss[numbers], expected.delta_loss)
    heads = [name for name in vitlens.places(after).names if ".head." in name]
    assert {int(name.split(".")[1]) for name in heads} == set(numbers)
    changes = [{f"blocks.{number}.head.1": "zero"} for number in numbers]
    with vitlens.replay(after, noise()) as replay:
        replayed = replay.run(changes)
    for logits, change, layer in zip(replayed, changes, range(len(numbers)), strict=True):
        with vitlens.intervene(after, change):
            same(after(noise()), logits)
        with vitlens.intervene(before, {f"blocks.{layer}.head.1": "zero"}):
            same(before(noise()), logits)


@pytest.mark.parametrize("method", ["rollout", "gradient-rollout", "relevance", "legrad"])
def test_maps_over_all_layers_start_at_the_number_of_a_block(twins, method: str):
    before, after, numbers = twins
    for layer, number in [(None, None), *enumerate(numbers)]:
        before_options = {} if layer is None else {"start_layer": layer}
        after_options = {} if number is None else {"start_layer": number}
        try:
            expected = vitlens.explain(before, noise(), method=method, **before_options)
        except VitlensError as error:  # no module is a block
            with pytest.raises(type(error)):
                vitlens.explain(after, noise(), method=method, **after_options)
            continue
        same(vitlens.explain(after, noise(), method=method, **after_options), expected)


def test_a_layer_is_named_by_its_block_and_another_one_is_refused(twins):
    before, after, numbers = twins
    with_attention = " or ".join([", ".join(map(str, numbers[:-1])), str(numbers[-1])])
    for layer, number in enumerate(numbers):
        expected = vitlens.explain(before, noise(), method="attention", layer=layer)
        same(vitlens.explain(after, noise(), method="attention", layer=number), expected)
    without = next(number for number in range(9) if number not in numbers)
    with one_line(InputError, re.escape(with_attention)):
        vitlens.explain(after, noise(), method="attention", layer=without)
    with one_line(VitlensError, "blocks"):
        vitlens.capture(after, noise(), f"blocks.{without}.head.0")


def test_heads_are_drawn_and_named_under_the_numbers_of_their_blocks(twins):
    _, after, numbers = twins
    seen = vitlens.look(after, noise())
    assert {place[0] for place in seen.places} == set(numbers)
    weights = vitlens.attention(after, noise())
    figure = vitlens.show_heads(weights, noise(), model=after)
    drawn = [text.get_text().removeprefix("layer ") for text in figure.texts]
    assert [text for text in drawn if text.isdecimal()] == list(map(str, numbers))
    explorer = vitlens.explorer(after, noise(), statistics=vitlens.statistics(after, noise()))
    assert list(explorer.explorer.layers) == numbers
    assert (
        len(explorer.explorer.labels)
        == explorer.explorer.images[0].weights.shape[0]
        == len(numbers)
    )


def test_contributions_and_depths_have_the_numbers_of_blocks():
    before = wrapped(plain)
    after = wrapped(partial(listed, Silent, None, Silent, None, None))
    expected = vitlens.direct_logit_attribution(before, noise())
    contributions = vitlens.direct_logit_attribution(after, noise())
    same(contributions.heads[:, [1, 3, 4]], expected.heads)
    same(contributions.total(), expected.total())
    assert contributions.heads[:, [0, 2]].isnan().all()
    lens = vitlens.logit_lens(after, noise())
    assert lens.places == ("blocks.0.input", *(f"blocks.{number}.residual" for number in range(5)))
    same(lens.logits[:, [1, 2, 4, 5]], vitlens.logit_lens(before, noise()).logits)
    read = vitlens.features(after, noise())
    assert values_of(read.layers, "index") == [0, 1, 2, 3, 4]
    same(read.at(3), vitlens.features(before, noise()).at(1))


def test_a_block_without_attention_can_be_changed_and_removed():
    model = wrapped(partial(listed, None, partial(Block, nn.Identity), None, None))
    # its attention is the identity, so that it changes the stream
    names = vitlens.places(model).names
    assert "blocks.1.residual" in names
    for name in names:
        assert not name.startswith("blocks.1.head")
    with vitlens.replay(model, noise()) as replay:
        logits = replay.run([{"blocks.1": "remove"}, {"blocks.1.residual": "zero"}])
        assert replay.exact
    for change, changed_logits in zip(
        ({"blocks.1": "remove"}, {"blocks.1.residual": "zero"}), logits, strict=True
    ):
        with vitlens.intervene(model, change):
            same(changed_logits, model(noise()))
    assert (logits[0] - model(noise())).abs().max() > 1e-4


HYBRIDS: dict[
    str, dict[str, Any]
] = {  # of timm: the first blocks of each are convolutions, pooling or separable
    "caformer_s18": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {},
    "coatnet_nano_rw_224": {"img_size": 64},
    "visformer_tiny": {"img_size": 64},
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_a_hybrid_are_counted_over_all_of_its_blocks(name: str):
    module = seeded(lambda: timm.create_model(name, **HYBRIDS[name]))
    model = model_of(module, alias="hybrid")
    pattern = re.compile(r"stages?\.?\d+\.(blocks\.)?\d+")
    blocks = [part for part, _ in module.named_modules() if pattern.fullmatch(part)]
    for number, attention in model.anatomy.attention_by_layer.items():
        assert attention.startswith(f"{blocks[number]}.")
    assert min(model.anatomy.attention_by_layer) > 0
