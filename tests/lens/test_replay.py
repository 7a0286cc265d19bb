"""The replay against the model run in full, and against models that are cut by hand."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.lens.test_intervention import projection_input, with_columns
from tests.lens.tiny import CLASSES, EACH_FAMILY, images, model_of, ours, shared_model, timm_model
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.intervene import Change, KnockOut, intervene
from vitlens.lens.replay import Replay, replaying
from vitlens.lens.replay_pass import method_of, rows_read
from vitlens.lens.trace import layers
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet
from vitlens.models.vit import TransformerBlock, VisionTransformer, ViTConfig

BATCH = 4
SAME = {"atol": 1e-4, "rtol": 0.0}
TIGHT = {"atol": 2e-6, "rtol": 1e-5}  # what is really reached on these models, where it tells a mistake
FIRST_ROWS = {"ours": 1, "ours-unfused": 1, "vit": 1, "deit-distilled": 2, "deit3": 1, "dinov2-registers": 1}
RUN_AGAIN = {"torchvision-swin"}  # its module puts windows back in place after the projection: attention runs again


@pytest.fixture(params=EACH_FAMILY)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def of(model: Model) -> Tensor:
    return images(model.input_size, batch=BATCH)


def full(model: Model, batch: Tensor, sets: list[dict[str, Change]]) -> Tensor:
    rows = []
    for changes in sets:
        with torch.no_grad(), intervene(model, changes):
            rows.append(model(batch))
    return torch.stack(rows)


def of_every_kind(replay: Replay) -> list[dict[str, Change]]:
    """All that can be done at each layer, and some of it at once."""
    known, generator = layers(replay.model), torch.Generator().manual_seed(1)
    heads = {layer.index: replay.tensor(f"blocks.{layer.index}.heads") for layer in known}

    def given(layer: int) -> Tensor:
        """The output of one head."""
        own = heads[layer].select(-3, 0)
        return torch.randn(own.shape, generator=generator)

    sets: list[dict[str, Change]] = []
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
    several: list[dict[str, Change]] = [
        {"blocks.0.head.0": "zero", "blocks.0.head.1": mean.select(-3, 1), f"{last}.heads": "zero"},
        {"blocks.0.head.1": "resample", "blocks.1.head.0": "resample", "blocks.0.mlp": "zero"},
        {"blocks.0.head.0": "zero", "blocks.0.attention.weights": knock, "blocks.1": "remove", f"{last}.mlp": "zero"},
        {"blocks.0.tokens[0]": "zero", "blocks.1.tokens[0]": "zero", "blocks.0.head.0": given(0)},
        {f"{last}.attention.weights": KnockOut(queries=0, keys=1), f"{last}.head.0": "zero", "blocks.0.mlp": "zero"},
        {},
    ]
    return sets + several


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
        replayed = replay.run(sets)
        torch.testing.assert_close(replay.logits, model(batch), **TIGHT)
    expected = full(model, batch, sets)
    torch.testing.assert_close(replayed, expected, **SAME)
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


@pytest.mark.parametrize("family", ["ours", "deit-distilled", "cait", "swin", "torchvision-vit", "siglip"])
def test_with_little_memory_the_rest_is_computed_again_and_said(family):
    model = shared_model(family)
    batch = of(model)
    sizes = [BATCH * start.bytes for start in method_of(model).starts]
    all_of_it, spent = sum(sizes), []
    for budget in (all_of_it, all_of_it - 1, all_of_it // 2, 0):
        with replaying(model, batch, budget=budget) as replay:
            sets = of_every_kind(replay)
            kept = sum(_bytes(record) for record in replay._records.values())
            assert kept <= budget
            assert (replay.note == "") == (kept == all_of_it)
            assert ("of the clean pass are kept" in replay.note) == (kept < all_of_it)
            replayed = replay.run(sets)
            spent.append(replay.forward_equivalents)
        torch.testing.assert_close(replayed, full(model, batch, sets), **TIGHT)
    assert spent == sorted(spent)
    assert spent[0] < spent[-1]


def _bytes(record: object) -> int:
    found = [*record.arguments.values(), record.branch, record.heads]
    return sum(value.numel() * value.element_size() for value in found if isinstance(value, Tensor))


def test_what_is_kept_is_the_models_own(name):
    model = shared_model(name)
    batch = of(model)
    with replaying(model, batch) as replay, replaying(model, batch, budget=0) as again:
        for layer in layers(model):
            place = f"blocks.{layer.index}.heads"
            heads, windows = replay.tensor(place), (layer.windows,) if layer.windows > 1 else ()
            assert heads.shape == (BATCH, *windows, layer.heads, layer.queries, layer.head_dim)
            if name not in ("torchvision-vit", "torchvision-swin"):  # whose projections are called as functions
                seen = projection_input(model, layer, batch).flatten(1, -2)  # (calls, tokens, width)
                torch.testing.assert_close(heads.transpose(-3, -2).flatten(-2).reshape(seen.shape), seen, **TIGHT)
            torch.testing.assert_close(again.tensor(place), heads)
            stream = f"blocks.{layer.index}.tokens"
            torch.testing.assert_close(again.tensor(stream), replay.tensor(stream))


def test_streams_and_heads_of_another_run_are_patched_in():
    """Everything that CLS reads in the last block, taken from another run, gives that run's logits."""
    model = ours()
    batch, other = of(model), images(model.input_size, batch=BATCH, seed=5)
    with replaying(model, batch) as replay, replaying(model, other) as second:
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


def test_counting_gives_less_than_half_of_the_loop():
    """ViT's 12 blocks: 0.4456 of a full forward for a head, besides what changing its branch and CLS's rows take."""
    shape = {"image_size": (32, 32), "patch_size": (4, 4), "dim": 32, "depth": 12, "heads": 4}
    model = model_of(VisionTransformer(ViTConfig(**shape)))
    with replaying(model, images()) as replay:
        replay.run([{f"blocks.{layer}.head.{head}": "zero"} for layer in range(12) for head in range(4)])
        assert 0.4456 < (replay.forward_equivalents - 1) / 48 < 0.455


def test_interventions_in_force_around_a_replay_stay_in_force():
    model = ours()
    batch = of(model)
    kept: dict[str, Change] = {"blocks.0.head.0": "zero", "blocks.1.mlp": "zero"}
    more: list[dict[str, Change]] = [
        {"blocks.0.head.1": "zero"},
        {"blocks.1.head.0": "zero"},
        {"blocks.0.attention.weights": KnockOut(queries=0, keys=1)},
    ]
    expected = full(model, batch, [{**kept, **changes} for changes in more])
    with intervene(model, kept), replaying(model, batch) as replay:
        torch.testing.assert_close(replay.run(more), expected, **TIGHT)
    for budget in (1 << 30, 0):
        with replaying(model, batch, given=kept, budget=budget) as replay:
            torch.testing.assert_close(replay.logits, full(model, batch, [kept])[0], **TIGHT)
            torch.testing.assert_close(replay.run(more), expected, **TIGHT)


@pytest.mark.parametrize("family", ["ours", "swin"])
def test_in_half_precision_it_is_near_the_full_forward_in_half_precision(family):
    model = shared_model(family)
    batch = of(model)
    with torch.autocast("cpu", torch.bfloat16), replaying(model, batch) as replay:
        sets = of_every_kind(replay)
        replayed = replay.run(sets)
        assert any(record.branch.dtype == torch.bfloat16 for record in replay._records.values())
    expected = full(model, batch, sets)
    torch.testing.assert_close(replayed.float(), expected, atol=0.05, rtol=0)


class Reaches(nn.Module):
    """A ViT whose head reads the first block's output too, past the blocks: a replay from the second would miss it."""

    def __init__(self, inner: VisionTransformer) -> None:
        super().__init__()
        self.inner, self.layout, self.patch_embed = inner, inner.layout, inner.patch_embed

    def forward(self, batch: Tensor) -> Tensor:
        tokens = self.inner.tokens(batch)
        first = self.inner.blocks[0](tokens)
        return self.inner.forward_head(self.inner.norm(self.inner.blocks[1](first) + first.mean(1, keepdim=True)))


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
        replayed = replay.run(sets)
        assert replay.forward_equivalents - before == pytest.approx(len(sets) - 1)  # {} is the clean pass
    torch.testing.assert_close(replayed, full(model, batch, sets), **TIGHT)


class Other(TransformerBlock):
    """Our block's parts, put together in another way."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + 0.5 * self.attn(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


def test_a_last_block_that_only_looks_like_ours_is_run_whole():
    module = small_vit()
    module.blocks[1].__class__ = Other
    model = model_of(module, alias="other", size=(32, 48))
    assert rows_read(model) == 1
    assert method_of(model).exact
    assert method_of(model).rows is None
    assert "other's last block is run whole: its logits would differ by" in method_of(model).note
    batch = of(model)
    with replaying(model, batch) as replay:
        replayed = replay.run([{"blocks.1.head.0": "zero"}])
    torch.testing.assert_close(replayed[0], with_columns(model, layers(model)[1], 0)(batch), **TIGHT)


class Shifted(MultiHeadSelfAttention):
    """Attention that goes on after its projection: a change of heads cannot be added to what it puts out."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(tokens, mask).tanh()


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


REFUSED: dict[str, Callable[[Replay], object]] = {
    "layer": lambda replay: replay.tensor("blocks.7.heads"),
    "head": lambda replay: replay.run([{"blocks.0.head.9": "zero"}]),
    "data": lambda replay: replay.run([{"blocks.0.head.0": "mean"}]),
    "images": lambda replay: replay.run([{"blocks.0.head.0": torch.zeros(BATCH + 1, 13, 8)}]),
    "shape": lambda replay: replay.run([{"blocks.0.head.0": torch.zeros(3, 3)}]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_call_is_refused(case):
    model = ours()
    with replaying(model, of(model)) as replay, pytest.raises(InputError):
        REFUSED[case](replay)


def test_nothing_is_kept_afterwards():
    model = timm_model("vit_tiny_patch16_224")
    with replaying(model, of(model)) as replay:
        assert replay._records
    assert not replay._records
