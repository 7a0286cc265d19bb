"""Every statistic of `vitlens.statistics` against a naive reference in float64."""

import math
import pickle
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import timm
import torch
from scipy import stats
from torch import Tensor

import vitlens
from tests.kit.made import made_model, numbered, random_weights, uniform
from tests.kit.select import values_of
from tests.kit.splits import split_of
from tests.kit.tiny import images, model_of, ours, timm_model
from tests.kit.windows import WINDOWED, padded_swin_micro, unwindow
from vitlens import Model
from vitlens.analysis.heads.registry import STATISTICS, token_statistics
from vitlens.errors import InputError, NonFiniteError


@dataclass(frozen=True)
class Place:
    """What the reference needs to know, said by hand for each model."""

    grid: tuple[int, int]
    pitch: tuple[float, float]
    cls: tuple[int, ...] = ()
    registers: tuple[int, ...] = ()  # registers and a distillation token

    @property
    def prefix(self) -> int:
        return len(self.cls) + len(self.registers)


def of_rows(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return entropy and sparsity of rows, as in textbooks."""
    keys = rows.shape[-1]
    root = math.sqrt(keys)
    rank = 2 * np.arange(1, keys + 1) - keys - 1
    nats = -np.where(rows > 0, rows * np.log(np.maximum(rows, 1e-300)), 0).sum(-1)
    sparse = (
        (root - rows.sum(-1) / np.sqrt((rows**2).sum(-1))) / (root - 1) if keys > 1 else 0 * nats
    )
    return {
        "entropy": nats,
        "normalised_entropy": nats / math.log(keys) if keys > 1 else nats,
        "effective_keys": np.exp(nats),
        "hoyer": sparse,
        "gini": (np.sort(rows, -1) * rank).sum(-1) / (keys * rows.sum(-1)),
    }


def possible(name: str, keys: int) -> tuple[float, float]:
    """Return the least and the largest value of a statistic, where its intervals end."""
    name = name.removeprefix("cls_")
    ends = {
        "entropy": (0, math.log(keys)),
        "effective_keys": (1, keys),
        "distance": (0, np.inf),
        "sinks": (0, np.inf),
    }
    return ends.get(name, (0, 1))


def of_head(
    attention: np.ndarray, place: Place, *, renormalise: bool
) -> tuple[dict[str, float], np.ndarray]:
    """Return all statistics of one head on one image, and its mass by offset."""
    (rows, columns), (height, width), prefix = place.grid, place.pitch, place.prefix
    queries = attention[prefix:]
    inside, (row, column) = queries[:, prefix:], np.divmod(np.arange(rows * columns), columns)
    down = row - row[:, None]
    across = column - column[:, None]
    offsets = np.zeros((2 * rows - 1, 2 * columns - 1))
    np.add.at(offsets, (down + rows - 1, across + columns - 1), inside / len(queries))
    away = (inside * np.hypot(down * height, across * width)).sum(1)
    received = queries.mean(0)
    apart = received - np.median(received)
    sinks = apart > 5 * np.median(np.abs(apart))
    sums = {
        "self_mass": inside.diagonal().mean(),
        "neighbour_mass": (inside * (np.abs(down) + np.abs(across) == 1)).sum(1).mean(),
        "energy": (inside**2).sum(1).mean(),
        "distance": (away / inside.sum(1) if renormalise else away).mean(),
        "sinks": sinks.sum(),
        "sink_mass": received[sinks].sum(),
    }
    sums |= {name: values.mean() for name, values in of_rows(queries).items()}
    if prefix:
        sums |= {
            "prefix_mass": received[:prefix].sum(),
            "cls_mass": received[list(place.cls)].sum(),
        }
        sums["register_mass"] = received[list(place.registers)].sum()
    for at in place.cls:
        sums |= {f"cls_{name}": value for name, value in of_rows(attention[at]).items()}
        sums |= {
            "cls_self_mass": attention[at, at],
            "cls_register_mass": attention[at, list(place.registers)].sum(),
        }
    return sums, offsets


def exact_weights(model: Model, batch: Tensor) -> list[np.ndarray]:
    """Return softmax in float64 of the lens's queries and keys, by layer.

    Its shape is (images, heads, query, key).
    """
    weights: list[np.ndarray] = []

    def keep(call: vitlens.AttentionCall) -> None:
        query = call.inputs.query.double().numpy()
        key = call.inputs.key.double().numpy()
        logits = query @ key.swapaxes(-1, -2) * call.inputs.scale
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        weights.append(powers / powers.sum(-1, keepdims=True))

    vitlens.observe(model, batch, keep)
    return weights


def check(
    table: vitlens.Statistics,
    weights: list[np.ndarray],
    place: Place,
    *,
    renormalise: bool = True,
    sinks: bool = True,
) -> None:
    """Check that means, Student's intervals and mass by offset are those of the reference.

    sinks: those of which no key is doubtful.
    """
    values: dict[tuple[str, int], list[list[float]]] = {}
    for layer, of_layer in enumerate(weights):
        heads_by_image = []
        for image in of_layer:
            heads_by_image.append([of_head(head, place, renormalise=renormalise) for head in image])
        offsets = np.mean([[mass for _, mass in heads] for heads in heads_by_image], 0)
        np.testing.assert_allclose(table.offset_mass[layer].numpy(), offsets, rtol=1e-5, atol=1e-12)
        for heads in heads_by_image:
            for name in heads[0][0]:
                values.setdefault((name, layer), []).append(
                    [measures[name] for measures, _ in heads]
                )
    exact = {key: np.array(numbers) for key, numbers in values.items()}
    for name in STATISTICS.keys() - token_statistics() - {name for name, _ in exact}:
        assert getattr(table, name).isnan().all(), name
    for (name, layer), of_images in exact.items():
        if sinks or "sink" not in name:
            # a weight near 1 has lost its last digits in fp32 whatever is made of it: 1e-6 nats are
            # the floor
            close = {
                "rtol": 1e-5,
                "atol": 1e-6 if "entropy" in name else 1e-9,
                "err_msg": f"{name} {layer}",
            }
            mean = of_images.mean(0)
            half = stats.t.ppf(0.975, len(of_images) - 1) * stats.sem(of_images)
            np.testing.assert_allclose(getattr(table, name)[layer].numpy(), mean, **close)
            spread = {**close, "rtol": 1e-4, "atol": close["atol"] + 1e-5 * np.abs(mean).max()}
            for end, sign in ((table.high(name), 1), (table.low(name), -1)):
                expected = np.clip(mean + sign * half, *possible(name, table.sites[layer].keys))
                np.testing.assert_allclose(end[layer].numpy(), expected, **spread)
    together = np.concatenate(
        [numbers for (name, _), numbers in exact.items() if name == "entropy"], 1
    ).mean(1)
    assert table.overall.mean(("entropy", 0)).item() == pytest.approx(
        together.mean(), rel=1e-5, abs=1e-6
    )
    half = stats.t.ppf(0.975, len(together) - 1) * stats.sem(together)
    assert table.overall.half_width(("entropy", 0)).item() == pytest.approx(
        half, rel=1e-3, abs=1e-5
    )


@pytest.mark.parametrize(
    ("more", "cls", "registers", "bf16"),
    [
        ({}, (0,), (), False),
        ({"registers": 4}, (0,), (1, 2, 3, 4), True),  # weights are made in fp32
        ({"distillation": True}, (0,), (1,), False),
        ({"pooling": "mean", "registers": 2, "heads": 1}, (), (0, 1), False),
    ],
)
def test_statistics_equal_the_naive_reference(more, cls, registers, bf16):
    model = ours(**more)
    place = Place((4, 3), (8.0, 16.0), cls, registers)
    renormalise = bool(more)
    batch = images(model.input_size, batch=6)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        table = vitlens.statistics(model, batch, renormalise=renormalise, batch_size=4)
        weights = exact_weights(model, batch)
    check(table, weights, place, renormalise=renormalise, sinks=False)
    assert (table.images, table.renormalised) == (6, renormalise)
    for geometry in table.geometries:
        assert (geometry.grid, geometry.pitch, geometry.cls, geometry.registers) == (
            place.grid,
            place.pitch,
            cls,
            registers,
        )


@pytest.mark.parametrize(("prefix", "of_heads"), [(0, ((3,), (5, 11))), (5, ((1,), (0, 9)))])
def test_clear_sinks_are_counted_exactly(prefix, of_heads):
    """Two heads: one key that all look at, and two of them; what is left is spread with a little
    noise.
    """
    spread = random_weights(6, 2, 12 + prefix, sharpness=0.1)
    for head, sinks in enumerate(of_heads):
        spread[:, head] *= 0.3
        for key in sinks:
            spread[:, head, :, key] += 0.7 / len(sinks)
    model = made_model(spread, grid=(3, 4), prefix=prefix)
    table = vitlens.statistics(model, numbered(model, 6))
    check(
        table,
        [spread.double().numpy()],
        Place((3, 4), (4.0, 4.0), (0,)[:prefix], tuple(range(1, prefix))),
    )
    assert table.sinks.tolist() == [[1.0, 2.0]]
    assert (table.sink_mass > 0.7).all()


@pytest.mark.parametrize(("more", "sinks"), [(1e-6, 0), (1e-2, 1)])
def test_rounding_makes_no_sink(more, sinks):
    """Where all other keys receive the same, the median deviation is zero."""
    weights = uniform(2, 1, 197).clone()
    weights[..., 5] *= 1 + more
    model = made_model(weights, grid=(14, 14), prefix=1)
    assert vitlens.statistics(model, numbered(model, 2)).sinks.item() == sinks


@pytest.mark.parametrize(("grid", "prefix"), [((1, 1), 0), ((1, 6), 1), ((6, 1), 5), ((1, 2), 0)])
def test_grids_of_one_row_column_or_patch(grid, prefix):
    weights = random_weights(3, 2, grid[0] * grid[1] + prefix)
    model = made_model(weights, grid=grid, prefix=prefix)
    table = vitlens.statistics(model, numbered(model, 3))
    place = Place(grid, (4.0, 4.0), (0,)[:prefix], tuple(range(1, prefix)))
    check(table, [weights.double().numpy()], place, sinks=False)


def test_a_model_that_looks_evenly_has_the_published_distance():
    """Of patches of 16 px in 224 px."""
    model = made_model(uniform(1, 1, 197), grid=(14, 14), prefix=1, patch_size=(16, 16))
    table = vitlens.statistics(model, numbered(model, 1))
    assert [table.distance.item(), table.uniform_distance().item()] == pytest.approx(
        [116.492] * 2, abs=1e-3
    )
    assert table.low("distance").isnan().all()  # one image has no interval


@pytest.mark.parametrize("spread", [1e-3, 1.0])
def test_nearly_uniform_rows_in_fp32_keep_their_precision(spread):
    """Where the textbooks' formulas subtract almost equal numbers."""
    weights = (
        spread * torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    ).softmax(-1)
    model = made_model(weights, grid=(4, 4))
    table = vitlens.statistics(model, numbered(model, 2))
    exact = weights.double() / weights.double().sum(-1, keepdim=True)
    expected = of_rows(exact.numpy())
    for name in ("entropy", "hoyer", "gini"):
        assert getattr(table, name).item() == pytest.approx(
            expected[name].mean(), rel=3e-6 + 1e-7 / spread
        )


def test_batches_change_nothing_and_memory_does_not_grow_with_the_images():
    layers = [random_weights(9, 3, 17, seed=seed).double() for seed in range(2)]
    model = made_model(*layers, grid=(4, 3), prefix=5)
    at_once = vitlens.statistics(model, numbered(model, 9), batch_size=9)
    parts = vitlens.statistics(model, numbered(model, 9), batch_size=4)
    few = vitlens.statistics(model, numbered(model, 2), batch_size=2)
    for name in STATISTICS:
        torch.testing.assert_close(
            parts.low(name), at_once.low(name), atol=1e-12, rtol=1e-9, equal_nan=True
        )
    sizes = [
        len(pickle.dumps((statistics.moments, statistics.overall, statistics.evidence)))
        for statistics in (few, at_once, parts)
    ]
    # torch names a pickled storage by its address, of more or fewer digits; seven more images of 6
    # heads take 336 bytes
    assert max(sizes) - min(sizes) < 64


def test_intervals_of_a_split_with_groups_are_over_groups():
    """Students over the means of groups: three scenes of two images each, of which one pair is
    alike.
    """
    model = ours()
    batch = images((32, 48), batch=6)
    batch[1] = batch[0]
    groups = torch.tensor([4, 4, 7, 7, 9, 9])
    grouped = vitlens.statistics(model, split_of(batch, groups=groups), batch_size=4)
    alone = [vitlens.statistics(model, split_of(batch[at : at + 1])).entropy for at in range(6)]
    means = torch.stack(alone).view(3, 2, 2, 2).mean(1)
    torch.testing.assert_close(grouped.entropy, means.mean(0), atol=1e-7, rtol=1e-6)
    half = stats.t.ppf(0.975, 2) * stats.sem(means.numpy())
    np.testing.assert_allclose((grouped.high("entropy") - grouped.entropy).numpy(), half, rtol=1e-4)


def test_what_has_no_statistics_is_refused():
    for images_of, options in ((2, {"masks": torch.zeros(3, 32, 48)}), (0, {})):
        with pytest.raises(InputError):
            vitlens.statistics(ours(), images((32, 48), batch=images_of), **options)
    table = vitlens.statistics(ours(pooling="mean"), images((32, 48)))
    assert table.cls_entropy.isnan().all()  # known, and not there
    with pytest.raises(AttributeError, match="known: distance, entropy"):
        _ = table.distanc


@pytest.mark.parametrize("weight", [torch.nan, 3e38])  # the latter finite, and too large
def test_weights_that_are_not_finite_name_their_layer(weight):
    model = ours()
    batch = images((32, 48))
    vitlens.statistics(model, batch)  # surveys the layers
    with torch.no_grad():
        model.module.blocks[1].attn.qkv.weight[0] = weight
    with pytest.raises(NonFiniteError, match=r"layer 1 \(blocks\.1\.attn\)"):
        vitlens.statistics(model, batch)


@pytest.mark.parametrize(
    ("build", "prefix"),
    [(partial(ours, registers=4), 5), (partial(timm_model, "swin_tiny_patch4_window7_224"), 0)],
)
def test_token_norms_are_of_each_blocks_output(build, prefix):
    """Also of tokens far out of line, among the prefix and among the patches."""
    model = build()
    streams = dict[int, Tensor]()
    factors = torch.ones(1, 400, 1).index_fill(1, torch.tensor([0, 7, 9]), 100)
    for index, block in enumerate(map(model.module.get_submodule, model.anatomy.blocks)):
        if index == 1:
            block.register_forward_hook(
                lambda _block, _inputs, x: x * factors[:, : x.shape[1]] if x.dim() == 3 else x
            )
        block.register_forward_hook(
            lambda _block, _inputs, x, index=index: streams.__setitem__(
                index, x.clone().flatten(1, -2).double()
            )
        )
    batch = images(model.input_size, batch=4)
    table = vitlens.statistics(model, batch)
    with torch.no_grad():
        model(batch)
    for index, tokens in streams.items():
        lengths = tokens.square().sum(-1).sqrt().numpy()
        middle = np.median(lengths, 1, keepdims=True)
        high = lengths > middle + 5 * np.median(np.abs(lengths - middle), 1, keepdims=True)
        expected = middle, lengths.max(1), high[:, prefix:].sum(1), high[:, :prefix].sum(1)
        token_norms = (
            table.token_norm,
            table.greatest_norm,
            table.high_norm_patches,
            table.high_norm_prefix,
        )
        for of_tokens, by_hand in zip(token_norms, expected, strict=True):
            assert of_tokens[index].tolist() == pytest.approx([by_hand.mean()], rel=1e-5)


def test_patches_before_the_prefix_comes_in_are_on_the_models_own_grid():
    """The patches need not be square."""
    model = made_model(random_weights(2, 1, 12), grid=(4, 3), prefix=1, patch_size=(8, 16))
    (early,) = vitlens.statistics(model, numbered(model, 2)).geometries
    assert (early.grid, early.pitch, early.prefix) == ((4, 3), (8.0, 16.0), 0)


def test_streams_of_windows_have_no_norms_of_images():
    """A block that puts out windows (MaxViT's) says nothing of the tokens of an image."""
    model = made_model(uniform(4, 1, 12), grid=(4, 3))
    model.module.blocks[0].register_forward_hook(
        lambda _block, _inputs, tokens: tokens.unflatten(1, (2, 6)).flatten(0, 1)
    )
    model.module.register_forward_hook(lambda _model, _inputs, logits: logits[::2])
    table = vitlens.statistics(model, numbered(model, 4))
    assert table.entropy.shape == (1, 1)
    assert table.token_norm.isnan().all()


def weights_of(model: Model, batch: Tensor) -> list[Tensor]:
    weights: list[Tensor] = []
    vitlens.observe(model, batch, lambda call: weights.append(call.weights().double()))
    return weights


@pytest.mark.parametrize("name", ["swin, padded", "torchvision, padded", "maxvit"])
def test_windows_are_measured_in_image_coordinates(name):
    """A sink stands out among all keys, against what uniform attention gives them; offsets are of
    neighbours in the image, not across a seam.
    """
    model = WINDOWED[name]()
    batch = images(model.input_size, batch=2)
    table = vitlens.statistics(model, batch)
    assert len(set(values_of(table.geometries, "pitch"))) > 1  # stages are coarser and coarser
    for layer, (site, weights) in enumerate(
        zip(table.sites, weights_of(model, batch), strict=True)
    ):
        place, (rows, columns) = table.geometries[layer], site.windows.resolution
        full = unwindow(weights, site.windows).numpy()
        allowed = (
            weights[: site.windows.count] > 1e-20
        ).double()  # a masked key has a score of -100 more
        even = unwindow(allowed / allowed.sum(-1, keepdim=True), site.windows)[0].numpy()
        row, column = np.divmod(np.arange(rows * columns), columns)
        down = row - row[:, None]
        across = column - column[:, None]
        height, width = (side / count for side, count in zip(model.input_size, (rows, columns)))
        assert place.pitch == (height, width)
        received = full.sum(-2) / even.sum(-2)  # in units of uniform attention
        middle = np.median(received, -1, keepdims=True)
        sinks = received > middle + 5 * np.median(np.abs(received - middle), -1, keepdims=True)
        for statistic, value in {
            "distance": (
                (full * np.hypot(down * height, across * width)).sum(-1) / full.sum(-1)
            ).mean(-1),
            "self_mass": full.diagonal(axis1=-2, axis2=-1).mean(-1),
            "neighbour_mass": full[..., np.abs(down) + np.abs(across) == 1].sum(-1)
            / (rows * columns),
            "sinks": sinks.sum(-1),
            "sink_mass": (full.sum(-2) * sinks).sum(-1) / (rows * columns),
        }.items():
            measured = getattr(table, statistic)[layer, : site.heads].numpy()
            np.testing.assert_allclose(
                measured, value.mean(0), rtol=1e-5, atol=1e-9, err_msg=f"{statistic} {site}"
            )
            assert getattr(table, statistic)[layer, site.heads :].isnan().all()
        near = unwindow(place.pairs()[:, None].double(), site.windows)[0, 0].numpy()
        tall = table.offset_mass[layer].mT.shape[-1] // 2
        wide = table.offset_mass[layer].shape[-1] // 2
        sums = np.zeros((site.heads, 2 * tall + 1, 2 * wide + 1))
        for query, key in np.argwhere(near):
            offset = down[query, key] + tall, across[query, key] + wide
            sums[:, offset[0], offset[1]] += full[:, :, query, key].mean(0) / (rows * columns)
        np.testing.assert_allclose(table.offset_mass[layer].numpy(), sums, rtol=1e-5, atol=1e-9)


def with_even_attention(model: Model) -> Model:
    """Return the model with the same score for every key that a query may attend to."""
    for module in model.module.modules():
        joint = getattr(module, "qkv", None)
        if isinstance(joint, torch.nn.Linear):
            of_queries_and_keys = slice(0, joint.out_features * 2 // 3)
            joint.weight.data[of_queries_and_keys] = 0
            if joint.bias is not None:
                joint.bias.data[of_queries_and_keys] = 0
        if hasattr(module, "q_bias"):
            module.q_bias.data.zero_()
    for name, parameter in model.module.named_parameters():
        if "bias_table" in name or "cpb_mlp" in name:
            parameter.data.zero_()
    return model


EVEN = {
    name: WINDOWED[name]
    for name in ("swin", "swin, padded", "swinv2, padded", "torchvision, padded")
}
EVEN["swin-micro, padded"] = padded_swin_micro


@pytest.mark.parametrize("name", EVEN)
def test_masked_keys_and_padding_do_not_count_as_sparsity(name):
    model = with_even_attention(EVEN[name]())
    table = vitlens.statistics(model, images(model.input_size, batch=2))
    assert any(any(site.windows.shift) for site in table.sites)
    for statistic, expected in {"normalised_entropy": 1, "hoyer": 0, "gini": 0, "sinks": 0}.items():
        values = getattr(table, statistic)
        measured = values[values.isfinite()].numpy()
        np.testing.assert_allclose(measured, expected, atol=1e-5, err_msg=statistic)


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "cait_xxs24_224"])
def test_a_pooling_query_has_a_row_and_no_place(name):
    model = timm_model(name)
    batch = images(batch=3)
    table = vitlens.statistics(model, batch)
    weights = weights_of(model, batch)[-1]
    last = table.sites[-1]
    assert (last.kind, table.geometries[-1], table.offset_mass[-1]) == ("class", None, None)
    assert table.uniform_distance()[-1].isnan()
    assert table.token_norm[-1].isnan()  # of a block that puts out only CLS
    assert all(
        getattr(table, name)[-1].isnan().all()
        for name in ("distance", "entropy", "self_mass", "sinks")
    )
    first = table.geometries[0]
    # CLS that comes in later is no patch
    assert (first.grid, first.pitch, first.prefix) == (
        (4, 4),
        (8.0, 8.0),
        0,
    )
    for name, expected in of_rows(weights[:, :, 0].numpy()).items():
        actual = getattr(table, f"cls_{name}")[-1, : last.heads].numpy()
        np.testing.assert_allclose(actual, expected.mean(0), rtol=1e-5, atol=1e-7)


def test_attention_of_channels_has_no_statistics():
    """XCiT's blocks attend over channels, its class attention at the end over tokens."""
    shape = {
        "img_size": 32,
        "patch_size": 16,
        "embed_dim": 32,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 5,
    }
    table = vitlens.statistics(
        model_of(timm.create_model("xcit_nano_12_p16_224", **shape)), images()
    )
    kinds = [site.kind for site in table.sites]
    assert kinds == ["channel", "class", "class"]
    assert table.entropy.isnan().all()
    assert table.cls_entropy.isfinite().any(1).tolist() == [False, True, True]


def test_a_head_that_is_changed_after_its_attention_counts_as_changed():
    """Its share in the labels' evidence is the norm of what the projection reads."""
    model = ours()
    batch = images(model.input_size, batch=3)
    plain = vitlens.statistics(model, batch).evidence.sums["output", 1]
    with vitlens.intervene(
        model, {"blocks.1.head.0": "zero", "blocks.1.head.1": lambda head: 2 * head}
    ):
        changed = vitlens.statistics(model, batch).evidence.sums["output", 1]
    torch.testing.assert_close(changed, plain * torch.tensor([0.0, 2.0]))


def test_a_mask_of_queries_and_keys_alone_does_not_count():
    model = ours()
    batch = images(model.input_size, batch=2)
    tokens = model.layout.tokens
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    mask[:, [1, 3]] = False
    model.module.blocks[1].attn.register_forward_pre_hook(lambda _attention, args: (*args, mask))
    actual = vitlens.statistics(model, batch).normalised_entropy[1]
    entropy = torch.special.entr(weights_of(model, batch)[1]).sum(-1)[
        :, :, len(model.layout.prefix) :
    ]
    expected = entropy.mean((0, 2)) / math.log(tokens - 2)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_intervals_over_two_images_end_at_the_numbers_of_tokens():
    model = vitlens.load("vit-digits")
    scenes = next(vitlens.load_data("digits", part="test", limit=4).batches(4)).images
    results = [vitlens.statistics(model, pair) for pair in scenes.split(2)]
    tokens = model.layout.tokens
    most = {
        "sinks": tokens,
        "effective_keys": tokens,
        "high_norm_patches": model.layout.patches,
        "high_norm_prefix": len(model.layout.prefix),
    }
    for name, greatest in most.items():
        assert max(float(result.high(name).nan_to_num(0).max()) for result in results) <= greatest
        assert min(float(result.low(name).nan_to_num(0).min()) for result in results) >= 0
