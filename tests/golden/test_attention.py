"""`vitlens attention` and `rollout`: the functions' numbers, and reports without overclaims."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import vitlens
from tests.kit.commands import figures, ran, report
from tests.kit.making import digits, save, untrained
from tests.kit.planted_maps import attention, enlarged, on_highest, rollout, said
from tests.kit.select import index_by, select_one, values_of
from tests.kit.training_runs import kept_run
from vitlens import load, load_data
from vitlens.commands.attention.record import AttentionRecord
from vitlens.uncertainty import Estimate

OVERVIEW = {"layers", "development", "heads", "layer", "position_maps"}


@pytest.mark.usefixtures("undrawn")
def test_maps_over_a_training_are_the_rollout_of_every_checkpoint(tmp_path):
    trained = kept_run(tmp_path / "taught", saved_after=(0, 2), epochs=3)
    record = ran(tmp_path / "out", f"attention {trained} --limit 8 --over-training")
    files = [trained / "kept" / f"epoch-{epochs:04}.safetensors" for epochs in (0, 2)]
    files.append(trained / "model.safetensors")
    assert values_of(record.over_training, "epochs") == [0, 2, 3]
    expected = [vitlens.rollout(load(str(file)), pixels(record)).numpy() for file in files]
    maps = record.training_maps.maps
    assert maps.shape[:2] == (6, 3)
    for checkpoint, values in enumerate(expected):
        np.testing.assert_allclose(maps[:, checkpoint], values[:6], atol=1e-6)
    correlations = []
    for first_map, last_map in zip(expected[0], expected[-1]):
        correlations.append(np.corrcoef(first_map.ravel(), last_map.ravel())[0, 1])
    first, _, last = record.over_training
    assert first.final.value == pytest.approx(np.mean(correlations), abs=1e-4)
    assert last.final.value == pytest.approx(1.0)


def pixels(record: AttentionRecord) -> torch.Tensor:
    return torch.from_numpy(record.maps.images).float() / 255


@pytest.mark.usefixtures("undrawn")
def test_numbers_are_those_of_the_functions(golden, tmp_path):
    """Information and how alike heads and layers are: tests/public/attention."""
    shape = {"dim": 16, "depth": 3, "heads": 2, "patch_size": [8, 8], "registers": 2}
    model = untrained("vit-mini", classes=tuple("0123456789"), seed=1, overrides=shape)
    for block in model.module.blocks:
        block.attn.qkv.weight.data *= 30  # maps that differ from layer to layer
    save(model, tmp_path / "three.safetensors")
    record = ran(
        tmp_path / "out", f"attention {tmp_path / 'three.safetensors'} --data digits --limit 9"
    )
    model = load(str(tmp_path / "three.safetensors"))
    maps = record.maps.layer
    for layer, weights in enumerate(vitlens.attention(model, pixels(record))):
        patch_weights = weights[:, :, 0, 3:].numpy()
        np.testing.assert_allclose(
            maps[layer].reshape(patch_weights.shape), patch_weights, atol=1e-6
        )
        assert record.layers[layer].prefix_mass == pytest.approx(
            weights[:, :, 0, :3].sum(-1).mean().item(), rel=1e-4
        )
    np.testing.assert_allclose(
        record.maps.rollout[:, -1], vitlens.rollout(model, pixels(record)), atol=1e-6
    )
    assert {"layers", "layers_more"} <= figures(record)
    masks = load_data("digits", limit=9).masks.numpy()
    rows = index_by(record.on_object, "maps", "layer", "head")
    assert len(rows) == 3 + 3 + 6
    for (kind, layer, head), row in rows.items():
        patch_weights = record.maps.rollout[:, layer] if kind == "rollout" else maps[layer].mean(1)
        large = enlarged(maps[layer][:, head] if kind == "head" else patch_weights, masks.shape[1:])
        expected = (large * masks).sum((1, 2)) / large.sum((1, 2))
        assert row.estimate.value == pytest.approx(expected.mean(), abs=1e-6)
        # of a uniform map, one of the baselines
        assert row.of_baseline.value >= masks.mean() - 1e-6
        gain = 100 * (row.estimate.value - row.of_baseline.value)
        assert row.difference.value == pytest.approx(gain, abs=1e-4)
    for row in record.layers:
        on_object = rows["attention", row.layer, None]
        assert (row.share, row.share_of_baseline) == (on_object.estimate, on_object.of_baseline)
        assert row.share_difference == on_object.difference
        hits = on_highest(maps[row.layer].mean(1), masks).mean()
        assert record.metric(f"localisation/three/pointing/{row.layer}").value == pytest.approx(
            hits
        )
    overview = golden("attention").record
    assert record.layers[0].previous is None
    assert figures(overview) == OVERVIEW
    for row in overview.layers:  # no interval beyond 1
        for estimate in (row.alike, row.previous):
            assert (
                estimate is None
                or -1 <= estimate.low <= estimate.value <= estimate.high <= 1 + 1e-12
            )


def test_views_of_a_patch(golden, tiny_vit):
    record = golden("attention of a patch").record  # --query 1,2 --key 0,3
    assert figures(record) == OVERVIEW | {"query", "key"}
    query = 1 + 4 + 2
    key = 1 + 3
    for layer, weights in enumerate(vitlens.attention(load(str(tiny_vit)), pixels(record))):
        looks = weights[:, :, query]
        seen = weights[:, :, 1:, key]
        for name, view in (("query", looks[:, :, 1:]), ("key", seen)):
            mean = record.views[name].mean[layer]
            np.testing.assert_allclose(mean, view.mean(1).reshape(mean.shape), atol=1e-7)
        row = select_one(record.query, layer=layer)
        assert (row.row, row.column, row.grid) == (1, 2, (4, 4))
        assert row.prefix == pytest.approx(looks[:, :, 0].mean().item())
        assert row.itself == pytest.approx(looks[:, :, query].mean().item())
        row = select_one(record.key, layer=layer)
        assert row.received == pytest.approx(seen.sum(2).mean().item())


@pytest.mark.slow
def test_attention_to_padding_is_recorded(pictures, tmp_path):
    """10x10 patches in windows of 7x7."""
    line = (
        "attention torchvision:swin_t --random-weights --image-size 40 --images "
        f"{pictures / '0.png'}"
    )
    record = ran(tmp_path / "out", f"{line} --query 9,9 --key 9,9")
    assert record.query[0].grid == (10, 10)
    assert 0.1 < record.query[0].padding < 1


@pytest.mark.slow
def test_values_by_image_are_those_of_metrics(golden, pictures, tmp_path):
    """Also without prefix tokens, which no head can attend to."""
    line = "attention torchvision:swin_t --random-weights --image-size 40 --images "
    windowed = ran(tmp_path / "out", f"{line}{pictures / '0.png'}")
    for record in (golden("attention").record, windowed):
        values = record.values_by_image()
        assert values
        for name, by_image in values.items():
            assert record.metric(name).value == pytest.approx(by_image.values.mean(), abs=1e-6)


def test_the_order_of_positions_is_a_number(tiny_vit, pictures, tmp_path):
    """Of a model whose positions were made so that near ones are alike."""
    model = load(str(tiny_vit))
    rows, columns = (
        part.flatten().float() for part in torch.meshgrid(*[torch.arange(4)] * 2, indexing="ij")
    )
    apart = (rows[:, None] - rows[None]) ** 2 + (columns[:, None] - columns[None]) ** 2
    model.module.pos_embed.data[0, 1:] = torch.linalg.cholesky(
        torch.exp(-apart / 8) + 1e-4 * torch.eye(16)
    )
    save(model, tmp_path / "ordered.safetensors")
    similar = torch.exp(-apart / 8) / (1 + 1e-4) + torch.eye(16) * 1e-4 / (1 + 1e-4)
    upper = torch.ones(16, 16).triu(1) > 0
    expected = torch.corrcoef(torch.stack((similar[upper], apart[upper].sqrt())))[0, 1].item()
    record = ran(
        tmp_path / "out",
        f"attention {tmp_path / 'ordered.safetensors'} --images {pictures / '0.png'}",
    )
    metric = record.metric("positions/ordered/distance_correlation")
    assert (metric.value, metric.n) == (pytest.approx(expected, abs=1e-3), 16)
    for pairs in ("all", "rows", "columns"):
        assert record.metric(f"positions/ordered/rank_correlation/{pairs}").value == pytest.approx(
            1, abs=1e-3
        )
    (claim,) = report(record).claims  # of one image nothing else is said
    assert " more similar" in claim.says


def test_layers_without_a_place_are_named_and_the_others_keep_their_numbers(pictures, tmp_path):
    line = (
        "attention timm:gcvit_xxtiny --random-weights --image-size 64 --images "
        f"{pictures / '0.png'}"
    )
    record = ran(tmp_path / "out", line)
    assert values_of(record.layers, "layer") == list(range(4, 12))
    assert values_of(record.without_map, "layer") == list(range(4))


def test_the_windows_of_a_swin_and_a_patch_through_its_stages(pictures, tmp_path):
    """Of three stages, with windows of 4x4 patches."""
    save(untrained("swin-micro", classes=("a", "b")), tmp_path / "swin.safetensors")
    line = f"attention {tmp_path / 'swin.safetensors'} --images {pictures / '0.png'} --query 13,7"
    record = ran(tmp_path / "out", line)
    assert values_of(record.windows, "shift") == [(0, 0), (2, 2), (0, 0), (2, 2), (0, 0), (0, 0)]
    arrays = record.window_maps
    assert record.windows[0].patch == (7, 7)
    assert [int(arrays.reach[index].sum()) for index in range(4)] == [16, 64, 16, 64]
    assert arrays.mask[1].sum() == 4 * 4 * 4  # the corner's window: four parts of four patches
    assert record.windows[0].pairs == 16 * 16**2  # each of 256 patches with the 16 of its window
    assert (record.windows[0].new, record.windows[1].new > 0) == (record.windows[2].new, True)
    assert {"windows", "receptive_field", "receptive_maps", "heads_1", "heads_3"} <= figures(record)
    assert values_of(record.receptive_fields[:2], "seen") == [8 * 8 / 32**2, 16 * 16 / 32**2]
    assert record.field_maps.field[0].shape == (32, 32)
    places = values_of(record.query[::2], "grid", "row", "column")
    assert places == [((16, 16), 13, 7), ((8, 8), 6, 3), ((4, 4), 3, 1)]
    for row in record.query:
        assert row.prefix is None
        assert row.padding is None or row.padding < 1e-5


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("preset", ["swin-micro", "vit-micro"])
def test_images_of_another_size_than_the_models_are_resized_by_it(preset, tmp_path):
    """Digits keep their 32 px, and the model resizes them to its 40."""
    record = ran(
        tmp_path / "out",
        f"attention {preset} --random-weights --image-size 40 --data digits --limit 2",
    )
    assert record.layers[0].map == ((20, 20) if preset == "swin-micro" else (10, 10))
    for row in record.layout:
        assert row.image_size == tuple(
            side * patch for side, patch in zip(row.grid, row.patch_size)
        )
    assert values_of(record.windows[:1], "map") == [(20, 20)] * (preset == "swin-micro")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("command", ["attention", "rollout"])
def test_weights_before_talking_heads_are_said_to_be(golden, pictures, tmp_path, command):
    line = (
        f"{command} timm:cait_xxs24_224 --random-weights --image-size 32 --images "
        f"{pictures / '0.png'}"
    )
    for record in (ran(tmp_path / "out", line), golden(command).record):
        mixed = record.folder == tmp_path / "out"
        assert bool(record.mixed_heads) == mixed
        text = (record.folder / "report.md").read_text()
        assert ("talking heads" in text) == mixed


def test_what_was_planted_is_found():
    sentences = said(attention())
    assert sentences.keys() == {"attention on the object", "information", "position embeddings"}
    assert "In 1 of 3 layers" in sentences["attention on the object"]
    assert re.search(r"layer 1\b[^.\d]+50\.0 %", sentences["attention on the object"])
    assert "layer 2" in sentences["information"]
    assert "no more similar" in sentences["position embeddings"]


@pytest.mark.parametrize(
    ("question", "column", "layers_shown", "not_shown"),
    [
        ("uniform maps", "information", (0.2, 0.1, 0.3), (0.4, 0.2, 0.6)),
        ("fixed places", "by_place", (0.95, 0.93, 0.97), (0.8, 0.7, 0.9)),
        ("collapse", "previous", (0.957, 0.953, 0.961), (0.952, 0.948, 0.956)),
    ],
)
def test_a_fault_is_claimed_beyond_its_limit_alone(question, column, layers_shown, not_shown):
    assert "layers 1 to 2" in said(attention(**{column: Estimate(*layers_shown, 40)}))[question]
    assert question not in said(attention(**{column: Estimate(*not_shown, 40)}))


def test_of_few_images_nothing_is_claimed():
    few = attention(images=19)
    rolled = rollout(images=19)
    assert said(few).keys() == {"position embeddings"}
    assert not said(rolled)
    sections = (*report(few).sections, *report(rolled).sections)
    titles = set(values_of(sections, "title"))
    assert not titles & {
        "Which layers attend to the object?",
        "How do the maps change over the layers?",
        "Do the maps find the object?",
        "Do the maps agree?",
    }


def test_numbers_of_rollout_are_those_of_the_function(tiny_vit, golden):
    """Information and other methods: tests/public/attention."""
    record = golden("rollout").record
    split = digits("test").limit(12)
    model = load(str(tiny_vit))
    by_fusion = {fusion: vitlens.rollout(model, split, fusion=fusion) for fusion in ("max", "min")}
    torch.testing.assert_close(
        torch.from_numpy(record.maps.maps[:, 0]), by_fusion["max"], atol=1e-6, rtol=0
    )
    for at, row in enumerate(record.methods):
        shares = on_highest(record.maps.maps[:, at], split.masks.numpy())
        assert record.maps.hits[:, at].tolist() == (shares > 0.5).tolist()
        metric = record.metric(f"localisation/tiny-vit/pointing/{row.maps}")
        assert (metric, metric.n, metric.value) == (row.pointing, 12, pytest.approx(shares.mean()))
        assert row.difference.value == pytest.approx(
            100 * (row.pointing.value - row.of_baseline.value)
        )
        # of a uniform map, one of them
        assert row.of_baseline.value >= split.masks.float().mean().item() - 1e-6
    assert values_of(record.methods, "name") == ["rollout (max)", "rollout (min)"]
    mass = by_fusion["max"].flatten(1).sum(1).mean().item()
    assert record.metric("rollout/tiny-vit/patch_mass/max").value == pytest.approx(mass, rel=1e-5)
    (pair,) = record.pairs
    ranked = [
        stats.spearmanr(*map(torch.flatten, both)).statistic
        for both in zip(by_fusion["max"], by_fusion["min"])
    ]
    assert pair.agreement.value == pytest.approx(sum(ranked) / len(ranked), rel=1e-5)


def test_own_images_are_shown_and_have_no_pointing_game(tiny_vit, pictures, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_text("no image")
    record = ran(tmp_path / "all", f"rollout {tiny_vit} --images {pictures} {broken}")
    assert not [name for name in record.metrics if name.startswith("localisation")]
    assert [Path(row.image).name for row in record.shown] == ["0.png", "1.png", "2.png"]
    every_method = ["rollout-mean", "rollout-max", "rollout-min", "relevance"]
    assert values_of(record.methods, "maps") == every_method  # none was asked for
    assert "broken.jpg" in record.config.data.skipped[0].file


def test_maps_that_are_zero_everywhere_are_said(tmp_path):
    model = load("vit-digits")
    model.module.head.weight.data.zero_()  # no weight of attention changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    record = ran(
        tmp_path / "out", f"rollout {tmp_path / 'blind'} --data digits --limit 12 --fusion mean"
    )
    assert {row.name: row.zero for row in record.methods} == {"rollout (mean)": 0, "relevance": 12}
    area = digits("test").limit(12).masks.float().mean().item()
    hits = record.metric("localisation/blind/pointing/relevance").value
    assert hits == pytest.approx(area, abs=1e-6)  # all points tie: no better than a random one
    (sentence,) = report(record).first.answer
    assert "12 of 12 maps of **relevance** are zero" in sentence.text


def test_what_was_planted_is_found_and_nothing_beyond_its_limit():
    sentences = said(rollout())
    assert sentences.keys() == {"pointing game", "information", "fusion of heads"}
    assert "1 of 3" in sentences["pointing game"]
    assert "**relevance**" in sentences["pointing game"]
    flat = said(rollout(information=Estimate(0.2, 0.2 - 0.1, 0.2 + 0.1, 40, "bits")))
    not_flat = said(rollout(information=Estimate(0.45, 0.45 - 0.1, 0.45 + 0.1, 40, "bits")))
    assert "**mean-map** is nearly uniform" in flat["information"]
    assert "nearly uniform" not in not_flat["information"]
    fixed = said(rollout(by_place=Estimate(0.95, 0.95 - 0.03, 0.95 + 0.03, 40)))
    not_fixed = said(rollout(by_place=Estimate(0.77, 0.77 - 0.03, 0.77 + 0.03, 40)))
    assert "**mean-map**" in fixed["fixed places"]
    assert "fixed places" not in not_fixed
    missing = said(rollout(difference=Estimate(-40.0, -50.0, -30.0, 40, "points")))
    assert "**mean-map**" in missing["maps that miss the object"]
    none = rollout()
    # gains of 0 and 1 points
    assert "None of 2" in said(replace(none, methods=none.methods[:2]))["pointing game"]
