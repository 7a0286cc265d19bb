"""The replay and patching against the model run in full, and against models that are cut by hand."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.lens.oracles import EVERY, projection_input, with_columns
from tests.lens.tiny import CLASSES, EACH_FAMILY, images, model_of, ours, shared_model, timm_model
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.capture import capture
from vitlens.lens.intervene import Change, KnockOut, intervene, prepared
from vitlens.lens.places import places
from vitlens.lens.replay import Replay, patch, replaying
from vitlens.lens.replay_pass import method_of, rows_read
from vitlens.lens.trace import layers
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet
from vitlens.models.vit import TransformerBlock, VisionTransformer

BATCH = 4
SAME = {"atol": 1e-5, "rtol": 1e-4}
TIGHT = {"atol": 2e-6, "rtol": 1e-5}  # what is really reached on these models, where it tells a mistake
FIRST_ROWS = {"ours": 1, "ours-unfused": 1, "vit": 1, "deit-distilled": 2, "deit3": 1, "dinov2-registers": 1}
RUN_AGAIN = {"torchvision-swin"}  # its module puts windows back in place after the projection: attention runs again
Sets = list[dict[str, Change]]


@pytest.fixture(params=EACH_FAMILY)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def of(model: Model, seed: int = 0) -> Tensor:
    return images(model.input_size, batch=BATCH, seed=seed)


def full(model: Model, batch: Tensor, sets: Sets) -> Tensor:
    rows = []
    for changes in sets:
        with torch.no_grad(), intervene(model, changes, reference=of(model, 2), seed=3):
            rows.append(model(batch))
    return torch.stack(rows)


def of_every_kind(replay: Replay) -> Sets:
    """All that can be done at each layer, and some of it at once."""
    known, generator = layers(replay.model), torch.Generator().manual_seed(1)
    heads = {layer.index: replay.tensor(f"blocks.{layer.index}.heads") for layer in known}

    def given(layer: int) -> Tensor:
        """The output of one head."""
        return torch.randn(heads[layer].select(-3, 0).shape, generator=generator)

    sets: Sets = []
    for layer in known:
        name, mean = f"blocks.{layer.index}", heads[layer.index].mean(0)
        for head in range(layer.heads):
            for change in ("zero", mean.select(-3, head), "resample", given(layer.index)):
                sets.append({f"{name}.head.{head}": change})
        stream = replay.tensor(f"{name}.tokens")[:, :1].flip(0)
        sets += [{f"{name}.tokens[0]": stream}, {f"{name}.mlp": torch.tensor(0.1)}, {f"{name}.mlp": "zero"}]
        sets += [{f"{name}.heads": heads[layer.index].flip(0)}]
        sets += [{f"{name}.attention.weights": KnockOut(queries=0, keys=[1, 2])}]
        sets += [{name: "remove"}] if layer.removable else []
    last, mean = f"blocks.{known[-1].index}", heads[0].mean(0)
    knock = KnockOut(keys=1)
    # the values of functions and means may depend on all images
    sets += [{f"blocks.{block}.{part}": torch.neg} for block in (0, 1) for part in ("attention", "mlp")]
    return [
        *sets,
        {"blocks.0.head.0": "zero", "blocks.0.head.1": mean.select(-3, 1), f"{last}.heads": "zero"},
        {"blocks.0.head.1": "resample", "blocks.1.head.0": "resample", "blocks.0.mlp": "zero"},
        {"blocks.0.head.0": "zero", "blocks.0.attention.weights": knock, "blocks.1": "remove", f"{last}.mlp": "zero"},
        {"blocks.0.tokens[0]": "zero", "blocks.1.tokens[0]": "zero", "blocks.0.head.0": given(0)},
        {f"{last}.attention.weights": KnockOut(queries=0, keys=1), f"{last}.head.0": "zero", "blocks.0.mlp": "zero"},
        {"blocks.1.attention.weights": torch.square},
        {"blocks.1": torch.neg},
        {"blocks.1": "resample"},
        {"blocks.0.mlp": "mean", "blocks.0.head.0": "mean"},
        {"blocks.1": "remove", "blocks.0.mlp": torch.neg},
        {"blocks.0.head.0": torch.neg, "blocks.1.attention.scores": lambda scores: 0.5 * scores},
        {},
    ]


def test_every_family_is_replayed(name):
    method = method_of(shared_model(name))
    assert method.exact, method.note
    assert method.note == ""
    assert method.rows == FIRST_ROWS.get(name)
    blocks = [start.branch for start in method.starts][: 4 if "swin" in name or name == "cait" else 2]
    assert all(blocks) != (name in RUN_AGAIN)


CHUNKS = {"whole": {}, "parts": {"chunk": 3}, "stacked": {"chunk": 9}}


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        pytest.param(*family.values, chunks, marks=family.marks if (row + column) % 3 == 0 else pytest.mark.slow)
        for row, family in enumerate(EACH_FAMILY)
        for column, chunks in enumerate(CHUNKS)
    ],  # by default every mechanism once, and every way of cutting several times
)
def test_logits_are_those_of_the_full_forward(name, chunks):
    model, options = shared_model(name), CHUNKS[chunks]
    batch = of(model)
    with replaying(model, batch, **options) as replay:
        sets = of_every_kind(replay)
        replayed = replay.run(sets, reference=of(model, 2), seed=3)
        torch.testing.assert_close(replay.logits, model(batch), **TIGHT)
        assert replay._records
    assert not replay._records
    expected = full(model, batch, sets)
    torch.testing.assert_close(replayed, expected, **TIGHT)
    touched = [what for what in range(len(sets)) if not torch.allclose(expected[what], expected[-1])]
    assert len(touched) > 0.6 * len(sets)


def test_heads_are_as_if_their_columns_were_cut(name):
    """The oracle knows nothing of interventions: a copy of the model with columns of its weights set to zero."""
    model = shared_model(name)
    batch = of(model)
    heads = [(layer, head) for layer in layers(model) for head in range(layer.heads)]
    with replaying(model, batch) as replay:
        replayed = replay.run([{f"blocks.{layer.index}.head.{head}": "zero"} for layer, head in heads])
        pair = replay.run([{f"blocks.{layer.index}.head.0": "zero" for layer in layers(model)}])
    for logits, (layer, head) in zip(replayed, heads):
        torch.testing.assert_close(logits, with_columns(model, layer, head)(batch), **TIGHT)
    cut = model
    for layer in layers(model):
        cut = with_columns(cut, layer, 0)
    torch.testing.assert_close(pair[0], cut(batch), **TIGHT)


def _bytes(record: object) -> int:
    found = [*record.arguments.values(), record.branch, record.heads]
    return sum(value.numel() * value.element_size() for value in found if isinstance(value, Tensor))


@pytest.mark.parametrize("family", ["ours", "deit-distilled", "cait", "swin", "torchvision-vit", "siglip"])
def test_with_little_memory_the_rest_is_computed_again_and_said(family):
    model = shared_model(family)
    batch = of(model)
    all_of_it, spent = BATCH * sum(start.bytes for start in method_of(model).starts), []
    for budget in (all_of_it, all_of_it - 1, all_of_it // 2, 0):
        with replaying(model, batch, budget=budget) as replay:
            sets = of_every_kind(replay)
            kept = sum(_bytes(record) for record in replay._records.values())
            assert kept <= budget
            assert (replay.note == "") == (kept == all_of_it)
            assert ("of the clean pass are kept" in replay.note) == (kept < all_of_it)
            replayed = replay.run(sets, reference=of(model, 2), seed=3)
            spent.append(replay.forward_equivalents)
        torch.testing.assert_close(replayed, full(model, batch, sets), **TIGHT)
    assert spent == sorted(spent)
    assert spent[0] < spent[-1]


def test_what_is_kept_is_the_models_own(name):
    model = shared_model(name)
    batch = of(model)
    with replaying(model, batch) as replay, replaying(model, batch, budget=0) as again:
        for layer in layers(model):
            place, stream = f"blocks.{layer.index}.heads", f"blocks.{layer.index}.tokens"
            heads, windows = replay.tensor(place), (layer.windows,) if layer.windows > 1 else ()
            assert heads.shape == (BATCH, *windows, layer.heads, layer.queries, layer.head_dim)
            if name not in ("torchvision-vit", "torchvision-swin"):  # whose projections are called as functions
                seen = projection_input(model, layer, batch).flatten(1, -2)  # (calls, tokens, width)
                torch.testing.assert_close(heads.transpose(-3, -2).flatten(-2).reshape(seen.shape), seen, **TIGHT)
            torch.testing.assert_close(again.tensor(place), heads)
            torch.testing.assert_close(again.tensor(stream), replay.tensor(stream))


def test_streams_and_heads_of_another_run_are_patched_in():
    """Everything that CLS reads in the last block, taken from another run, gives that run's logits."""
    model = ours()
    with replaying(model, of(model)) as replay, replaying(model, of(model, 5)) as second:
        stream, heads = second.tensor("blocks.1.input"), second.tensor("blocks.1.heads")
        cls = {"blocks.1.input[cls]": stream[:, :1], "blocks.1.heads": heads}
        logits = replay.run([{"blocks.1.input": stream}, cls])
        torch.testing.assert_close(logits, second.logits.expand(2, -1, -1), **TIGHT)


def test_the_work_is_what_counting_says():
    """ours: 13 tokens of 16 numbers, 2 blocks of 12 dim², 5 classes; CLS alone after keys and values of the last."""
    model, square = ours(), 16 * 16
    full_forward = 2 * 13 * 12 * square + 16 * 5
    last, delta = 13 * 2 * square + (2 + 8) * square + 16 * 5, 8 * 16
    first = 13 * delta + 13 * 8 * square + last
    with replaying(model, of(model)) as replay:
        assert replay.forward_equivalents == 1
        replay.run([{"blocks.0.head.0": "zero"}])
        assert replay.forward_equivalents == pytest.approx(1 + first / full_forward)
        replay.run([{"blocks.1.head.0": "zero"}])
        only_rows = delta + 8 * square + 16 * 5
        assert replay.forward_equivalents == pytest.approx(1 + (first + only_rows) / full_forward)
        replay.run([{}])
        assert replay.forward_equivalents == pytest.approx(1 + (first + only_rows) / full_forward)


def test_interventions_in_force_around_a_replay_stay_in_force():
    model = ours()
    batch = of(model)
    kept: dict[str, Change] = {"blocks.0.head.0": "zero", "blocks.1.mlp": "zero"}
    outer: dict[str, Change] = {**kept, "blocks.0.attention.weights": torch.square}
    more: Sets = [
        {"blocks.0.head.1": "zero"},
        {"blocks.1.head.0": "zero"},
        {"blocks.0.attention.weights": KnockOut(queries=0, keys=1)},
        {"blocks.0.input[0]": "zero"},
        {"blocks.0.attention.queries": torch.neg},
    ]
    with intervene(model, outer):
        expected = full(model, batch, more)
        with replaying(model, batch) as replay:
            torch.testing.assert_close(replay.run(more), expected, **TIGHT)
    expected = full(model, batch, [{**kept, **changes} for changes in more])
    for budget in (1 << 30, 0):
        with replaying(model, batch, given=prepared(model, kept), budget=budget) as replay:
            torch.testing.assert_close(replay.logits, full(model, batch, [kept])[0], **TIGHT)
            torch.testing.assert_close(replay.run(more), expected, **TIGHT)


@pytest.mark.parametrize("family", ["ours", "swin"])
def test_in_half_precision_it_is_near_the_full_forward_in_half_precision(family):
    model = shared_model(family)
    batch = of(model)
    with torch.autocast("cpu", torch.bfloat16), replaying(model, batch) as replay:
        sets = of_every_kind(replay)
        replayed = replay.run(sets, reference=of(model, 2), seed=3)
        assert any(record.branch.dtype == torch.bfloat16 for record in replay._records.values())
    torch.testing.assert_close(replayed.float(), full(model, batch, sets), atol=0.05, rtol=0)


class Reaches(nn.Module):
    """A ViT whose head reads the first block's output too, past the blocks: a replay from the second would miss it."""

    def __init__(self, inner: VisionTransformer) -> None:
        super().__init__()
        self.inner, self.layout, self.patch_embed = inner, inner.layout, inner.patch_embed

    def forward(self, batch: Tensor) -> Tensor:
        tokens = self.inner.tokens(batch)
        first = self.inner.blocks[0](tokens)
        return self.inner.forward_head(self.inner.norm(self.inner.blocks[1](first) + first.mean(1, keepdim=True)))


class Other(TransformerBlock):
    """Our block's parts, put together in another way."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + 0.5 * self.attn(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class Shifted(MultiHeadSelfAttention):
    """Attention that goes on after its projection: a change of heads cannot be added to its output."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(tokens, mask).tanh()


def small_vit() -> VisionTransformer:
    inner: VisionTransformer = copy.deepcopy(ours().module)
    return inner


def test_a_family_that_cannot_be_replayed_is_run_in_full_and_says_so():
    model = model_of(Reaches(small_vit()), alias="reaches", size=(32, 48))
    batch = of(model)
    with replaying(model, batch) as replay:
        assert not replay.exact
        assert "reaches is run by full forwards, not replayed: its logits would differ by" in replay.note
        sets = of_every_kind(replay)
        before = replay.forward_equivalents  # the clean pass, and what is read of it
        replayed = replay.run(sets, reference=of(model, 2), seed=3)
        means = sum("mean" in (each for each in changes.values() if isinstance(each, str)) for changes in sets)
        spent = replay.forward_equivalents - before
        assert spent == pytest.approx(len(sets) - 1)  # {} is the clean pass
        assert means == 1  # whose passes over reference images do not count
    torch.testing.assert_close(replayed, full(model, batch, sets), **TIGHT)
    assert not patch(model, batch, batch.flip(0), "blocks.1").exact


def test_a_last_block_that_only_looks_like_ours_is_run_whole():
    module = small_vit()
    module.blocks[1].__class__ = Other
    model = model_of(module, alias="other", size=(32, 48))
    assert rows_read(model) == 1
    method = method_of(model)
    assert (method.exact, method.rows) == (True, None)
    assert "other's last block is run whole: its logits would differ by" in method.note
    batch = of(model)
    with replaying(model, batch) as replay:
        replayed = replay.run([{"blocks.1.head.0": "zero"}])
    torch.testing.assert_close(replayed[0], with_columns(model, layers(model)[1], 0)(batch), **TIGHT)


def test_attention_that_goes_on_after_its_projection_is_run_again():
    module = small_vit()
    for block in module.blocks:
        block.attn.__class__ = Shifted
    model = model_of(module, alias="shifted", size=(32, 48))
    assert [start.branch for start in method_of(model).starts] == [False, False]
    batch = of(model)
    with replaying(model, batch) as replay:
        assert replay.exact
        replayed = replay.run([{"blocks.0.head.0": "zero"}, {"blocks.1.head.1": "zero"}])
    for logits, (layer, head) in zip(replayed, ((0, 0), (1, 1))):
        torch.testing.assert_close(logits, with_columns(model, layers(model)[layer], head)(batch), **TIGHT)


def test_a_model_without_attention_is_refused():
    cnn = model_of(build_resnet("resnet20", classes=len(CLASSES), image_size=(32, 32)), alias="cnn")
    with pytest.raises(UnsupportedError, match="expected softmax attention"), replaying(cnn, images()):
        pytest.fail("it was not refused")


@pytest.mark.parametrize("name", EVERY)
def test_patching_a_place_is_a_full_forward_with_the_others_tensor_there(name):
    model = EVERY[name]()
    clean, other = of(model), of(model, 1)
    listed = [place.name for place in places(model) if place.changeable]
    patched, captured = patch(model, clean, other, listed), capture(model, other, listed)
    assert patched.places == tuple((place,) for place in listed)
    assert patched.exact == (name not in ("cnn", "einsum", "encoder"))
    with torch.no_grad():
        torch.testing.assert_close(patched.clean, model(clean), **SAME)
        torch.testing.assert_close(patched.other, model(other), **SAME)
        for place in listed:
            with intervene(model, {place: captured[place]}):
                torch.testing.assert_close(patched[place], model(clean), **SAME, msg=place)


def test_what_was_captured_may_be_patched_in():
    model = timm_model("vit_tiny_patch16_224")
    clean, other = of(model), of(model, 1)
    captured, by_images = capture(model, other, "blocks.*.mlp"), patch(model, clean, other, "blocks.*.mlp")
    assert torch.equal(patch(model, clean, captured, "blocks.*.mlp").logits, by_images.logits)
    with pytest.raises(UnknownNameError, match=r"no captured place 'blocks.0.residual'"):
        patch(model, clean, captured, "blocks.0")
    together = patch(model, clean, other, [("blocks.0", "blocks.1")])
    torch.testing.assert_close(together.logits[0], together.other, **SAME)
    with pytest.raises(InputError, match="two runs of as many images, found 4 and 2"):
        patch(model, clean, other[:2], "blocks.0")
    with pytest.raises(InputError, match="that was patched alone, found 'blocks"):
        by_images["blocks.0"]
