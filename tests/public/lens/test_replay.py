"""The replay and patching against full runs, and against models that are cut by hand."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.lens import (
    EVERY,
    HANDWRITTEN,
    SAME,
    changeable,
    changed,
    heads_by_layer,
    of,
    removable,
    without_head,
)
from tests.kit.marks import slow_if
from tests.kit.tiny import FAMILIES, model_of, ours, shared_model, timm_model
from vitlens import KnockOut, Model
from vitlens.errors import InputError, UnknownNameError

# what is really reached on these models, where it shows a mistake
TIGHT = {
    "atol": 2e-6,
    "rtol": 1e-5,
}
Sets = list[dict[str, object]]


def full(model: Model, batch: Tensor, sets: Sets) -> Tensor:
    options = {"reference": of(model, batch=4, seed=2), "seed": 3}
    return torch.stack([changed(model, batch, changes, **options) for changes in sets])


def replayed(replay: Any, sets: Sets) -> Tensor:
    return replay.run(sets, reference=of(replay.model, batch=4, seed=2), seed=3)


def of_every_kind(model: Model, batch: Tensor) -> Sets:
    """Return all changes of each layer, some of them at once, and {} at the end."""
    heads = heads_by_layer(model)
    generator = torch.Generator().manual_seed(1)
    outputs = [
        *vitlens.capture(
            model, batch, [f"blocks.{layer}.heads" for layer in range(len(heads))]
        ).values()
    ]

    def given(layer: int) -> Tensor:
        """Return the output of one head."""
        return torch.randn(outputs[layer].select(-3, 0).shape, generator=generator)

    sets: Sets = []
    for layer, count in enumerate(heads):
        name = f"blocks.{layer}"
        mean = outputs[layer].mean(0)
        for head in range(count):  # each in another way
            ways = ("zero", mean.select(-3, head), "resample", given(layer))
            sets.append({f"{name}.head.{head}": ways[(layer * count + head) % 4]})
        stream = vitlens.capture(model, batch, f"{name}.tokens")[f"{name}.tokens"][:, :1].flip(0)
        sets += [
            {f"{name}.tokens[0]": stream},
            {f"{name}.mlp": torch.tensor(0.1)},
            {f"{name}.mlp": "zero"},
        ]
        sets += [{f"{name}.heads": outputs[layer].flip(0)}]
        sets += [{f"{name}.attention.weights": KnockOut(queries=0, keys=[1, 2])}]
        sets += [{name: "remove"}] if removable(model, layer) else []
    last = f"blocks.{len(heads) - 1}"
    mean = outputs[0].mean(0)
    knock = KnockOut(keys=1)
    # the values of functions and means may depend on all images
    for block in (0, 1):
        sets += [{f"blocks.{block}.attention": torch.neg}, {f"blocks.{block}.mlp": torch.neg}]
    return [
        *sets,
        {"blocks.0.head.0": "zero", "blocks.0.head.1": mean.select(-3, 1), f"{last}.heads": "zero"},
        {"blocks.0.head.1": "resample", "blocks.1.head.0": "resample", "blocks.0.mlp": "zero"},
        {
            "blocks.0.head.0": "zero",
            "blocks.0.attention.weights": knock,
            "blocks.1": "remove",
            f"{last}.mlp": "zero",
        },
        {"blocks.0.tokens[0]": "zero", "blocks.1.tokens[0]": "zero", "blocks.0.head.0": given(0)},
        {
            f"{last}.attention.weights": KnockOut(queries=0, keys=1),
            f"{last}.head.0": "zero",
            "blocks.0.mlp": "zero",
        },
        {"blocks.1.attention.weights": torch.square},
        {"blocks.1": torch.neg},
        {"blocks.1": "resample"},
        {"blocks.0.mlp": "mean", "blocks.0.head.0": "mean"},
        {"blocks.1": "remove", "blocks.0.mlp": torch.neg},
        {"blocks.0.head.0": torch.neg, "blocks.1.attention.scores": lambda scores: 0.5 * scores},
        {},
    ]


def keeps_the_models_own(replay: Any) -> None:
    """Return what the replay keeps of the clean pass or computes again."""
    model = replay.model
    batch = replay.images
    places = [
        f"blocks.{layer}.{part}"
        for layer in range(len(heads_by_layer(model)))
        for part in ("heads", "tokens")
    ]
    for place, tensor in vitlens.capture(model, batch, places).items():
        torch.testing.assert_close(replay.tensor(place), tensor, **TIGHT)


CHUNKS = {"whole": {}, "parts": {"chunk": 3}, "stacked": {"chunk": 9}}
BY_DEFAULT = {  # every mechanism once, and every way of cutting several times
    "ours": "whole",
    "vit-mean": "whole",
    "deit-distilled": "stacked",
    "beit": "stacked",
    "eva02": "parts",
    "siglip": "parts",
    "cait": "whole",
    "torchvision-vit": "stacked",
    "torchvision-swin": "stacked",
    "our-swin": "parts",
}


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        slow_if(BY_DEFAULT.get(name) != chunks, name, chunks)
        for name, chunks in product(FAMILIES, CHUNKS)
    ],
)
def test_logits_are_those_of_the_full_forward(name, chunks):
    model = shared_model(name)
    batch = of(model, batch=4)
    sets = of_every_kind(model, batch)
    with vitlens.replay(model, batch, **CHUNKS[chunks]) as replay:
        assert (replay.exact, replay.note) == (True, "")
        logits = replayed(replay, sets)
        torch.testing.assert_close(replay.logits, model(batch), **TIGHT)
        keeps_the_models_own(replay)
    expected = full(model, batch, sets)
    torch.testing.assert_close(logits, expected, **TIGHT)
    touched = [
        what for what in range(len(sets)) if not torch.allclose(expected[what], expected[-1])
    ]
    assert len(touched) > 0.6 * len(sets)


@pytest.mark.parametrize("family", ["ours", "cait", "torchvision-swin"])
def test_with_little_memory_the_rest_is_computed_again_and_said(family):
    """The same numbers, for the more work the less may be kept."""
    model = shared_model(family)
    spent = []
    batch = of(model, batch=4)
    sets = of_every_kind(model, batch)[::3]
    expected = full(model, batch, sets)
    for budget in (1 << 30, 20_000, 0):
        with vitlens.replay(model, batch, budget=budget) as replay:
            torch.testing.assert_close(replayed(replay, sets), expected, **TIGHT)
            spent.append(replay.forward_equivalents)
            assert ("of the clean pass are kept" in replay.note) == (spent[-1] > spent[0])
            keeps_the_models_own(replay)
    assert spent == sorted(spent)
    assert spent[0] < spent[-1]


def test_the_work_is_what_counting_says():
    """ours: 13 tokens of 16 numbers, 2 blocks of 12 dim², 5 classes; only CLS after keys and
    values of the last.
    """
    model = ours()
    square = 16 * 16
    full_forward = 2 * 13 * 12 * square + 16 * 5
    last = 13 * 2 * square + (2 + 8) * square + 16 * 5
    delta = 8 * 16
    first = 13 * delta + 13 * 8 * square + last
    only_rows = delta + 8 * square + 16 * 5
    with vitlens.replay(model, of(model, batch=4)) as replay:
        spent = [replay.forward_equivalents]
        for changes in ({"blocks.0.head.0": "zero"}, {"blocks.1.head.0": "zero"}, {}):
            replay.run([changes])
            spent.append(replay.forward_equivalents)
    expected = [
        full_forward,
        full_forward + first,
        full_forward + first + only_rows,
        full_forward + first + only_rows,
    ]
    assert spent == pytest.approx([passes / full_forward for passes in expected])


def test_interventions_in_force_around_a_replay_stay_in_force():
    model = ours()
    batch = of(model)
    outer = {
        "blocks.0.head.0": "zero",
        "blocks.1.mlp": "zero",
        "blocks.0.attention.weights": torch.square,
    }
    more: Sets = [
        {"blocks.0.head.1": "zero"},
        {"blocks.1.head.0": "zero"},
        {"blocks.0.attention.weights": KnockOut(queries=0, keys=1)},
        {"blocks.0.input[0]": "zero"},
        {"blocks.0.attention.queries": torch.neg},
    ]
    with vitlens.intervene(model, outer):
        expected = full(model, batch, more)
        with vitlens.replay(model, batch) as replay:
            torch.testing.assert_close(replay.run(more), expected, **TIGHT)


RAMP = torch.linspace(-1, 1, 16)
AROUND: dict[
    str, dict[str, object]
] = {  # of the first and the last block, of which a replay keeps or computes parts
    "attention": {"blocks.0.attention": torch.neg},
    "last attention": {
        "blocks.1.attention": lambda tokens: 0.5 * tokens - tokens.mean(1, keepdim=True)
    },
    "input": {"blocks.1.input": lambda tokens: 1.3 * tokens},
    "residual": {"blocks.1.residual": lambda tokens: tokens - tokens.mean(1, keepdim=True) + RAMP},
    "remove": {"blocks.1": "remove"},
    "mlp": {"blocks.1.mlp": lambda tokens: tokens.flip(1)},
    "queries": {
        "blocks.1.attention.queries": lambda queries: queries - queries.mean(2, keepdim=True)
    },
    "patches": {"patches": lambda tokens: tokens.flip(1)},
}
HOOKED = ("blocks.0.attn", "blocks.1.attn", "blocks.1.attn.proj", "blocks.1.mlp", "blocks.1")


def flipped(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    """Mix the tokens, as a hook of a user."""
    return output.flip(1) - 0.5 * output.mean(1, keepdim=True)


@pytest.mark.parametrize("change", [*AROUND, *HOOKED])
def test_a_change_around_a_replay_reaches_every_set_of_changes(change):
    """As in full forward passes with both changes, the outer one first."""
    model = ours()
    batch = of(model, batch=4)
    sets = of_every_kind(model, batch)
    with vitlens.replay(
        model, batch
    ) as replay:  # what is kept of the model is kept before it changes
        replayed(replay, sets[:1])
    if change in AROUND:
        context = vitlens.intervene(model, AROUND[change])
    else:
        context = model.module.get_submodule(change).register_forward_hook(flipped)
    with context, vitlens.replay(model, batch) as replay:
        torch.testing.assert_close(replayed(replay, sets), full(model, batch, sets), **TIGHT)


@pytest.mark.parametrize("family", ["ours", "swin"])
def test_in_half_precision_it_is_near_the_full_forward_in_half_precision(family):
    model = shared_model(family)
    batch = of(model, batch=4)
    sets = of_every_kind(model, batch)[::3]
    with torch.autocast("cpu", torch.bfloat16), vitlens.replay(model, batch) as replay:
        logits = replayed(replay, sets)
        assert replay.tensor("blocks.0.heads").dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), full(model, batch, sets), atol=0.05, rtol=0)


class Reaches(nn.Module):
    """A ViT whose head also reads the first block's output: a replay from the second misses it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.layout = inner.layout
        self.patch_embed = inner.patch_embed

    def forward(self, batch: Tensor) -> Tensor:
        tokens = self.inner.tokens(batch)
        first = self.inner.blocks[0](tokens)
        return self.inner.forward_head(
            self.inner.norm(self.inner.blocks[1](first) + first.mean(1, keepdim=True))
        )


class Other(type(ours().module.blocks[0])):
    """Our block's parts, put together in another way."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + 0.5 * self.attn(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class Goes(type(ours().module.blocks[0].attn)):
    """Attention that continues after its projection: changes of heads are not additive."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(tokens, mask).tanh()


def vit_with(change: str) -> Model:
    """Change our ViT so that a replay must not take it for the original."""
    module = ours().module
    if change == "other":
        module.blocks[1].__class__ = Other
    elif change == "goes":
        module.blocks[0].attn.__class__ = module.blocks[1].attn.__class__ = Goes
    else:
        module = Reaches(module)
    return model_of(module, alias=change, size=(32, 48))


def test_a_model_that_cannot_be_replayed_is_run_in_full_and_says_so():
    model = vit_with("reaches")
    batch = of(model, batch=4)
    sets = of_every_kind(model, batch)
    with vitlens.replay(model, batch, **CHUNKS["parts"]) as replay:
        assert not replay.exact
        assert "reaches is run by full forwards" in replay.note
        logits = replayed(replay, sets)
        # the clean pass is that of {}
        assert replay.forward_equivalents == pytest.approx(len(sets))
    torch.testing.assert_close(logits, full(model, batch, sets), **TIGHT)
    assert not vitlens.patch(model, batch, batch.flip(0), "blocks.1").exact


@pytest.mark.parametrize("change", ["other", "goes"])
def test_blocks_that_only_look_like_ours_are_run_as_they_are(change):
    """The last one whole; attention that goes on after its projection again."""
    model = vit_with(change)
    with vitlens.replay(model, of(model)) as replay:
        assert replay.exact
        for layer, head in ((0, 0), (1, 1)):
            (logits,) = replay.run([{f"blocks.{layer}.head.{head}": "zero"}])
            torch.testing.assert_close(logits, without_head(model, layer, head)(of(model)), **TIGHT)


@pytest.mark.parametrize(
    "name", ["ours", "ours-unfused", "siglip", "cait", "torchvision-swin", "cnn", *HANDWRITTEN]
)
def test_patching_a_place_is_a_full_forward_with_the_others_tensor_there(name):
    model = EVERY[name]()
    clean = of(model)
    other = of(model, seed=1)
    listed = changeable(model)
    patched = vitlens.patch(model, clean, other, listed)
    captured = vitlens.capture(model, other, listed)
    assert patched.places == tuple((place,) for place in listed)
    assert patched.exact == (name not in ("cnn", "einsum", "encoder"))
    torch.testing.assert_close(patched.clean, changed(model, clean, {}), **SAME)
    torch.testing.assert_close(patched.other, changed(model, other, {}), **SAME)
    for place in listed:
        torch.testing.assert_close(
            patched[place], changed(model, clean, {place: captured[place]}), **SAME, msg=place
        )


def test_what_was_captured_may_be_patched_in_and_places_together():
    model = timm_model("vit_tiny_patch16_224")
    clean = of(model)
    other = of(model, seed=1)
    captured = vitlens.capture(model, other, "blocks.*.mlp")
    by_images = vitlens.patch(model, clean, other, "blocks.*.mlp")
    assert torch.equal(
        vitlens.patch(model, clean, captured, "blocks.*.mlp").logits, by_images.logits
    )
    together = vitlens.patch(model, clean, other, [("blocks.0", "blocks.1")])
    torch.testing.assert_close(together.logits[0], together.other, **SAME)
    with pytest.raises(UnknownNameError, match=r"blocks.0.residual"):
        vitlens.patch(model, clean, captured, "blocks.0")
    with pytest.raises(InputError, match="found 3 and 2"):
        vitlens.patch(model, clean, other[:2], "blocks.0")
    with pytest.raises(InputError, match="patched by itself, found 'blocks"):
        by_images["blocks.0"]
