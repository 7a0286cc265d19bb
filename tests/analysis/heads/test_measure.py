"""Every statistic against a naive reference: float64, loops over queries and keys, from the same queries and keys."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.analysis.made import made_model, numbered, random_weights, uniform
from tests.lens.oracles import unwindow
from tests.lens.tiny import images, ours, timm_model, torchvision_swin
from vitlens.analysis.heads import rows
from vitlens.analysis.heads.geometry import geometry_of
from vitlens.analysis.heads.registry import token_statistics
from vitlens.analysis.heads.statistics import BatchStatistics, measure
from vitlens.errors import NonFiniteError
from vitlens.lens.call import AttentionCall
from vitlens.lens.capture import capture_attention
from vitlens.lens.observe import observe
from vitlens.lens.site import Site
from vitlens.lens.stages import watching_stream
from vitlens.models.model import Model

COUNTS = {"sinks", "sink_mass", *token_statistics()}  # compared apart


@dataclass(frozen=True)
class Place:
    """What the reference needs to know, said by hand for each model."""

    grid: tuple[int, int]
    pitch: tuple[float, float]
    cls: tuple[int, ...] = ()
    others: tuple[int, ...] = ()  # registers and a distillation token

    @property
    def prefix(self) -> int:
        return len(self.cls) + len(self.others)


def of_row(row: list[float]) -> dict[str, float]:
    """Entropy and sparsity of one row, as the textbooks have them."""
    keys = len(row)
    nats = -sum(p * math.log(p) for p in row if p > 0)
    root = math.sqrt(keys)
    ranked = sum((2 * rank - keys - 1) * p for rank, p in enumerate(sorted(row), 1))
    return {
        "entropy": nats,
        "normalised_entropy": nats / math.log(keys),
        "effective_keys": math.exp(nats),
        "hoyer": (root - sum(row) / math.sqrt(sum(p * p for p in row))) / (root - 1),
        "gini": ranked / (keys * sum(row)),
    }


def of_head(attention: list[list[float]], place: Place, *, renormalise: bool) -> tuple[dict[str, float], np.ndarray]:
    """All statistics of one head on one image, and its mass by offset."""
    (rows, columns), (height, width), prefix = place.grid, place.pitch, place.prefix
    sums: dict[str, float] = {}
    offsets = np.zeros((2 * rows - 1, 2 * columns - 1))

    def add(name: str, value: float) -> None:
        sums[name] = sums.get(name, 0.0) + value / (rows * columns)

    for query, row in enumerate(attention[prefix:]):
        for name, value in of_row(row).items():
            add(name, value)
        mass = away = 0.0
        for key, weight in enumerate(row[prefix:]):
            down, across = key // columns - query // columns, key % columns - query % columns
            mass += weight
            away += weight * math.hypot(down * height, across * width)
            offsets[down + rows - 1, across + columns - 1] += weight / (rows * columns)
            add("self_mass", weight if key == query else 0.0)
            add("neighbour_mass", weight if abs(down) + abs(across) == 1 else 0.0)
            add("energy", weight * weight)
        add("distance", away / mass if renormalise else away)
        if prefix:
            add("prefix_mass", sum(row[:prefix]))
            add("cls_mass", sum(row[key] for key in place.cls))
            add("register_mass", sum(row[key] for key in place.others))
    for at in place.cls:
        sums |= {f"cls_{name}": value for name, value in of_row(attention[at]).items()}
        sums["cls_self_mass"] = attention[at][at]
        sums["cls_register_mass"] = sum(attention[at][key] for key in place.others)
    received = np.mean(attention[prefix:], 0)
    deviation = np.median(np.abs(received - np.median(received)))
    sinks = received > np.median(received) + 5 * deviation
    return {**sums, "sinks": float(sinks.sum()), "sink_mass": float(received[sinks].sum())}, offsets


def exact_weights(model: Model, batch: Tensor) -> dict[int, np.ndarray]:
    """Softmax in float64 of the queries and keys that the lens shows, (images, heads, query, key) by layer."""
    found: dict[int, np.ndarray] = {}

    def keep(call: AttentionCall) -> None:
        assert call.inputs is not None
        assert call.inputs.bias is None
        query, key = call.inputs.query.double().numpy(), call.inputs.key.double().numpy()
        logits = query @ key.swapaxes(-1, -2) * call.inputs.scale
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        found[call.site.layer] = powers / powers.sum(-1, keepdims=True)

    observe(model, batch, keep)
    return found


def reference(
    weights: dict[int, np.ndarray], place: Place, *, renormalise: bool = True
) -> tuple[dict[tuple[str, int], np.ndarray], dict[int, np.ndarray]]:
    """Values (images, heads) by name and layer, and the mass by offset summed over images (heads, down, across)."""
    values: dict[tuple[str, int], list[list[float]]] = {}
    offsets: dict[int, np.ndarray] = {}
    for layer, of_layer in weights.items():
        offsets[layer] = np.zeros((of_layer.shape[1], *(2 * side - 1 for side in place.grid)))
        for of_image in of_layer:
            heads = [of_head(head.tolist(), place, renormalise=renormalise) for head in of_image]
            offsets[layer] += [mass for _, mass in heads]
            for name in heads[0][0]:
                values.setdefault((name, layer), []).append([found[name] for found, _ in heads])
    return {key: np.array(value) for key, value in values.items()}, offsets


def by_offset(found: BatchStatistics, layer: int) -> np.ndarray:
    """The mass by offset summed over images."""
    return found.evidence.sums["offsets", layer].sum(0).numpy()


def differences(model: Model, batch: Tensor, place: Place, *, renormalise: bool = True) -> dict[str, float]:
    """Largest difference of each statistic relative to the reference, image by image; the offsets' too."""
    exact = exact_weights(model, batch)
    expected, offsets = reference(exact, place, renormalise=renormalise)
    found = measure(model, batch, renormalise=renormalise)
    assert {key for key in found.values if key[0] not in token_statistics()} == set(expected)
    largest: dict[str, float] = {}
    for (name, layer), value in expected.items():
        if name not in COUNTS:
            # a weight near 1 has lost its last digits in fp32 whatever is made of it: 1e-6 nats are the floor
            least = 0.1 if "entropy" in name else 1e-9
            apart = np.abs(found.values[name, layer].double().numpy() - value) / np.maximum(np.abs(value), least)
            largest[name] = max(largest.get(name, 0.0), float(apart.max()))
    for layer, mass in offsets.items():
        apart = np.abs(by_offset(found, layer) - mass) / mass
        largest["offsets"] = max(largest.get("offsets", 0.0), float(apart.max()))
    wrong = [float((found.values["sinks", layer].numpy() != expected["sinks", layer]).mean()) for layer in exact]
    largest["share of wrong sinks"] = max(wrong)
    return largest


MODELS: dict[str, tuple[Callable[[], Model], Place]] = {
    "cls": (lambda: ours(size=(32, 48)), Place((4, 3), (8.0, 16.0), (0,))),
    "registers": (lambda: ours(registers=4), Place((4, 3), (8.0, 16.0), (0,), (1, 2, 3, 4))),
    "distilled": (lambda: ours(distillation=True), Place((4, 3), (8.0, 16.0), (0,), (1,))),
    "mean": (lambda: ours(pooling="mean"), Place((4, 3), (8.0, 16.0))),
    "mean, registers": (lambda: ours(pooling="mean", registers=2), Place((4, 3), (8.0, 16.0), (), (0, 1))),
    "dinov2": (lambda: timm_model("vit_small_patch14_reg4_dinov2"), Place((4, 4), (8.0, 8.0), (0,), (1, 2, 3, 4))),
}


@pytest.mark.parametrize("name", MODELS)
def test_64_images_equal_the_naive_reference(name):
    make, place = MODELS[name]
    model = make()
    found = differences(model, images(model.input_size, batch=64), place, renormalise=name != "cls")
    assert found.pop("share of wrong sinks") <= 0.004
    assert max(found.values()) < 1e-5, found


SINKS = {0: ((3,), (5, 11)), 1: ((0,), (2, 6)), 5: ((1,), (0, 9))}


@pytest.mark.parametrize("prefix", SINKS)
def test_clear_sinks_are_counted_exactly(prefix):
    """Two heads: one key that all look at, and two of them; what is left is spread with a little noise."""
    keys = 12 + prefix
    spread = random_weights(6, 2, keys, sharpness=0.1)
    for head, sinks in enumerate(SINKS[prefix]):
        spread[:, head] *= 0.3
        for key in sinks:
            spread[:, head, :, key] += 0.7 / len(sinks)
    model = made_model(spread, grid=(3, 4), prefix=prefix)
    found = measure(model, numbered(model, 6))
    expected, _ = reference(
        {0: spread.double().numpy()},
        Place((3, 4), (4.0, 4.0), (0,)[:prefix], (1, 2, 3, 4)[: prefix - 1] if prefix else ()),
    )
    assert torch.equal(found.values["sinks", 0], torch.tensor([[1.0, 2.0]]).expand(6, 2))
    np.testing.assert_allclose(found.values["sink_mass", 0].numpy(), expected["sink_mass", 0], rtol=1e-5)
    assert (found.values["sink_mass", 0] > 0.7).all()


def test_without_renormalising_the_prefix_counts_as_no_distance():
    """Half of the mass on CLS: half of the distance, as in the variant in circulation."""
    weights = 0.5 * uniform(2, 1, 13)
    weights[..., 0] = 0.5
    weights[..., 1:] = 0.5 / 12
    model = made_model(weights, grid=(4, 3), prefix=1)
    batch = numbered(model, 2)
    alone = measure(model, batch).values["distance", 0]
    variant = measure(model, batch, renormalise=False).values["distance", 0]
    place = geometry_of(capture_attention(model, batch).sites[0], model)
    torch.testing.assert_close(alone.double(), torch.full((2, 1), place.uniform().distance, dtype=torch.float64))
    torch.testing.assert_close(variant, alone / 2)


WINDOWED: dict[str, Callable[[], Model]] = {
    "timm": lambda: timm_model("swin_tiny_patch4_window7_224"),
    "timm, padded": lambda: timm_model("swin_tiny_patch4_window7_224", img_size=(20, 28)),
    "swin v2": lambda: timm_model("swinv2_tiny_window8_256"),
    "torchvision": torchvision_swin,
    "torchvision, padded": lambda: torchvision_swin((20, 28)),
}


def windowed_reference(full: np.ndarray, together: np.ndarray, site: Site, pitch: float) -> dict[str, np.ndarray]:
    """Statistics (images, heads) of weights in image coordinates; a sink is a key that stands out among all keys."""
    rows, columns = site.windows.resolution
    row, column = np.divmod(np.arange(rows * columns), columns)
    down, across = row - row[:, None], column - column[:, None]
    pixels = pitch * np.hypot(down, across)
    received = full.sum(-2) / together.sum(0)
    middle = np.median(received, -1, keepdims=True)
    deviation = np.median(np.abs(received - middle), -1, keepdims=True)
    sinks = received > middle + 5 * deviation
    return {
        "distance": ((full * pixels).sum(-1) / full.sum(-1)).mean(-1),
        "self_mass": full.diagonal(axis1=-2, axis2=-1).mean(-1),
        "neighbour_mass": full[..., np.abs(down) + np.abs(across) == 1].sum(-1) / (rows * columns),
        "sinks": sinks.sum(-1),
        "sink_mass": (full.sum(-2) * sinks).sum(-1) / (rows * columns),
    }


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_in_image_coordinates(name):
    model = WINDOWED[name]()
    batch = images(model.input_size, batch=2)
    found, captured = measure(model, batch), capture_attention(model, batch)
    for site, weights in zip(captured.sites, captured.layers):
        full = unwindow(weights.double(), site.windows).numpy()
        together = unwindow(torch.ones_like(weights[: site.windows.count]), site.windows)[0, 0].bool().numpy()
        expected = windowed_reference(full, together, site, model.input_size[0] / site.windows.resolution[0])
        for statistic, value in expected.items():
            measured = found.values[statistic, site.layer].numpy()
            np.testing.assert_allclose(measured, value, rtol=1e-5, atol=1e-9, err_msg=f"{statistic} {site}")
        # of neighbours in the image, not across the seam of a shift (timm's mask of a padded map lets some of it pass)
        (rows, columns), (height, width) = site.windows.resolution, site.windows.window
        near = unwindow(geometry_of(site, model).pairs()[:, None].double(), site.windows)[0, 0].numpy()
        row, column = np.divmod(np.arange(rows * columns), columns)
        sums = np.zeros((site.heads, 2 * height - 1, 2 * width - 1))
        for query, key in np.argwhere(near):
            offset = row[key] - row[query] + height - 1, column[key] - column[query] + width - 1
            sums[:, offset[0], offset[1]] += full[:, :, query, key].sum(0) / (rows * columns)
        np.testing.assert_allclose(by_offset(found, site.layer), sums, rtol=1e-5, atol=1e-9)


def test_in_bf16_everything_is_computed_in_fp32(monkeypatch):
    model, place = MODELS["registers"][0](), MODELS["registers"][1]
    batch = images((32, 48), batch=8)
    sums: list[Tensor] = []
    plain = rows.FUNCTIONS["entropy"]

    def spy(found: rows.Rows) -> Tensor:
        assert found.weights.dtype == torch.float32
        sums.append((found.weights.sum(-1) - 1).abs().max())
        return plain(found)

    monkeypatch.setitem(rows.FUNCTIONS, "entropy", spy)
    with torch.autocast("cpu", torch.bfloat16):
        kinds: list[torch.dtype] = []
        observe(model, batch, lambda call: kinds.append(call.inputs.query.dtype))
        assert set(kinds) == {torch.bfloat16}
        found = differences(model, batch, place)
    assert max(sums) <= 1e-6
    assert found.pop("share of wrong sinks") <= 0.004
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "cait_xxs24_224"])
def test_a_pooling_query_has_a_row_and_no_place(name):
    model = timm_model(name)
    batch = images(batch=3)
    found, captured = measure(model, batch), capture_attention(model, batch)
    last = captured.sites[-1]
    assert last.kind == "class"
    names = {name for name, layer in found.values if layer == last.layer} - set(token_statistics())
    assert names == {"cls_entropy", "cls_normalised_entropy", "cls_effective_keys", "cls_hoyer", "cls_gini"}
    assert ("offsets", last.layer) not in found.evidence.sums
    for image in range(3):
        for head in range(last.heads):
            row = captured.layers[-1][image, head, 0].double().tolist()
            for statistic, value in of_row(row).items():
                measured = found.values[f"cls_{statistic}", last.layer][image, head].item()
                assert measured == pytest.approx(value, rel=1e-5, abs=1e-7)


def norms_by_hand(tokens: Tensor, prefix: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in token_statistics()}
    for image in tokens.double():
        lengths = np.array([math.sqrt(sum(x * x for x in token)) for token in image.tolist()])
        middle = np.median(lengths)
        high = lengths > middle + 5 * np.median(np.abs(lengths - middle))
        found["token_norm"].append(middle)
        found["greatest_norm"].append(lengths.max())
        found["high_norm_patches"].append(high[prefix:].sum())
        found["high_norm_prefix"].append(high[:prefix].sum())
    return found


@pytest.mark.parametrize(
    ("make", "prefixes"),
    [
        (lambda: ours(registers=4), (5, 5)),
        (lambda: timm_model("deit_tiny_distilled_patch16_224"), (2, 2)),
        (lambda: timm_model("swin_tiny_patch4_window7_224"), (0, 0, 0, 0)),
    ],
    ids=["registers", "distilled", "swin"],
)
def test_token_norms_are_of_each_blocks_output(make, prefixes):
    model = make()
    stretched = model.module.get_submodule(model.anatomy.blocks[1])  # tokens far out of line among prefix and patches
    factors = torch.ones(1, 400, 1).index_fill(1, torch.tensor([0, 7, 9]), 100)
    stretched.register_forward_hook(lambda _block, _inputs, x: x * factors[:, : x.shape[1]] if x.dim() == 3 else x)
    batch, streams = images(model.input_size, batch=4), {}
    with watching_stream(model, lambda block, tokens: streams.__setitem__(block, tokens.clone())), torch.no_grad():
        model(batch)
    found = measure(model, batch).values
    for block, prefix in enumerate(prefixes):
        for name, value in norms_by_hand(streams[block], prefix).items():
            np.testing.assert_allclose(found[name, block][:, 0].numpy(), value, rtol=1e-5, err_msg=name)


def test_streams_of_windows_have_no_norms_of_images():
    """A block that puts out windows (MaxViT's) says nothing of the tokens of an image."""
    model = made_model(uniform(4, 1, 12), grid=(4, 3))
    model.module.blocks[0].register_forward_hook(
        lambda _block, _inputs, tokens: tokens.unflatten(1, (2, 6)).flatten(0, 1)
    )
    model.module.register_forward_hook(lambda _model, _inputs, logits: logits[::2])
    found = measure(model, numbered(model, 4)).values
    assert found["entropy", 0].shape == (4, 1)
    assert not any(name in token_statistics() for name, _ in found)


@pytest.mark.parametrize(("grid", "prefix"), [((1, 1), 0), ((1, 6), 1), ((6, 1), 5), ((1, 2), 0)])
def test_grids_of_one_row_column_or_patch(grid, prefix):
    tokens = grid[0] * grid[1] + prefix
    weights = random_weights(3, 2, tokens)
    model = made_model(weights, grid=grid, prefix=prefix)
    found = measure(model, numbered(model, 3))
    if tokens == 1:
        assert {value.sum().item() for (name, _), value in found.values.items() if name in ("distance", "entropy")} == {
            0
        }
        return
    place = Place(grid, (4.0, 4.0), (0,)[:prefix], tuple(range(1, prefix)))
    expected, offsets = reference({0: weights.double().numpy()}, place)
    for (name, layer), value in expected.items():
        if name not in ("sinks", "sink_mass"):
            np.testing.assert_allclose(found.values[name, layer].numpy(), value, rtol=1e-5, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(by_offset(found, 0), offsets[0], rtol=1e-5)


@pytest.mark.parametrize("surveyed", [False, True])
def test_weights_that_are_not_finite_name_their_layer(surveyed):
    model, batch = ours(), images((32, 48))
    if surveyed:
        measure(model, batch)
    with torch.no_grad():
        model.module.blocks[1].attn.qkv.weight[0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"NaN or infinity in layer 1 \(blocks\.1\.attn\)|logits"):
        measure(model, batch)
    if surveyed:
        with pytest.raises(NonFiniteError, match=r"layer 1 \(blocks\.1\.attn\)"):
            measure(model, batch)
