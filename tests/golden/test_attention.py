"""`vitlens attention`: its numbers are those of the functions, for every family of models, and so are its views."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.contradictions import contradictions
from tests.kit.making import save, untrained
from vitlens import load, load_data, rollout
from vitlens.analysis.attention.map_checks import alike, map_bits
from vitlens.analysis.attention.weights import patch_views, window_layers
from vitlens.analysis.faithfulness.localisation import mass_inside, pointing_hits
from vitlens.cli.main import run as main
from vitlens.commands.attention.measure import measure
from vitlens.commands.attention.options import AttentionOptions
from vitlens.commands.attention.record import AttentionRecord, LayerRow, LayoutRow
from vitlens.commands.attention.report import REPORT
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.maps.record import ATTENTION, HEAD, ROLLOUT, OnObjectRow
from vitlens.errors import InputError, UnsupportedError
from vitlens.record import Config, Data, ModelEntry
from vitlens.uncertainty import Estimate

OPTIONS = RunOptions(device="cpu", quiet=True)
OVERVIEW = {"layers", "development", "heads", "layer", "position_maps"}


def run(model: Path | str, out: Path, *, size: tuple[int, int] | None = None, **changes: object) -> AttentionRecord:
    random = ModelOptions(random_weights=":" in str(model), image_size=size)
    options = AttentionOptions(str(model), model_options=random, run=replace(OPTIONS, out=out))
    measure(replace(options, **changes))
    return read_folder(out)


def figures(out: Path) -> set[str]:
    return {path.stem for path in (out / "figures").glob("*.png")}


def pixels(record: AttentionRecord) -> torch.Tensor:
    return torch.from_numpy(record.maps.images).float() / 255


@pytest.fixture(scope="module")
def swin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Swin of three stages, with windows of 4x4 patches."""
    path = tmp_path_factory.mktemp("swin") / "swin.safetensors"
    save(untrained("swin-micro", classes=("a", "b")), path)
    return path


def test_numbers_are_those_of_the_functions(tmp_path):
    shape = {"dim": 16, "depth": 3, "heads": 2, "patch_size": [8, 8]}
    model = untrained("vit-mini", classes=tuple("0123456789"), seed=1, overrides=shape)
    for block in model.module.blocks:
        block.attn.qkv.weight.data *= 30  # maps that differ from layer to layer
    save(model, tmp_path / "three.safetensors")
    out = tmp_path / "out"
    record = run(tmp_path / "three.safetensors", out, data="digits", run=replace(OPTIONS, limit=9, out=out))
    masks, maps = load_data("digits", limit=9).masks, {k: torch.from_numpy(m) for k, m in record.maps.layer.items()}
    model = load(str(tmp_path / "three.safetensors"))
    for layer, weights in enumerate(vitlens.attention(model, pixels(record))):
        assert maps[layer].flatten(2).allclose(weights[:, :, 0, 1:], atol=1e-6)
    np.testing.assert_allclose(record.maps.rollout[:, -1], rollout(model, pixels(record)), atol=1e-6)
    assert {"layers", "layers_more"} <= figures(out)
    rows = {(row.maps, row.layer, row.head): row for row in record.on_object}
    assert len(rows) == 3 + 3 + 6
    for (kind, layer, head), row in rows.items():
        own = torch.from_numpy(record.maps.rollout[:, layer])
        if kind != ROLLOUT:
            own = maps[layer][:, head] if kind == HEAD else maps[layer].mean(1)
        assert row.estimate.value == pytest.approx(float(mass_inside(own, masks).mean()), abs=1e-6)
        assert row.of_baseline.value >= float(masks.float().mean()) - 1e-6  # of a uniform map, one of the baselines
        gain = 100 * (row.estimate.value - row.of_baseline.value)
        assert row.difference.value == pytest.approx(gain, abs=1e-4)
    means = [maps[layer].mean(1) for layer in range(3)]
    for row in record.layers:
        known = rows[ATTENTION, row.layer, None]
        assert (row.share, row.share_of_baseline) == (known.estimate, known.of_baseline)
        assert row.share_difference == known.difference
        assert row.information.value == pytest.approx(map_bits(means[row.layer]).mean().item(), rel=1e-5)
        assert row.alike.value == pytest.approx(alike(maps[row.layer]).mean().item(), rel=1e-5)
        hits = pointing_hits(means[row.layer], masks).float().mean().item()
        assert record.metric(f"localisation/three/pointing/{row.layer}").value == pytest.approx(hits)
    before = [alike(torch.stack(means[at - 1 : at + 1], 1)).mean().item() for at in (1, 2)]
    assert abs(before[1] - alike(torch.stack(means[::2], 1)).mean().item()) > 1e-3
    assert record.layers[0].previous is None
    assert [row.previous.value for row in record.layers[1:]] == pytest.approx(before, rel=1e-5)


def test_the_number_of_images_left_out_is_reported(tiny_vit, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitlens.commands.attention.measure.DRAWN", 2)
    line = ["attention", str(tiny_vit), "--images", str(pictures), "--device", "cpu"]
    assert main([*line, "--out", str(tmp_path / "two")]) == 0
    assert len(vitlens.read(tmp_path / "two").arrays["attention"]["images"]) == 2
    assert "2 of the 3 images" in capsys.readouterr().err
    assert figures(tmp_path / "two") == OVERVIEW
    assert main([*line, "--limit", "3", "--out", str(tmp_path / "three")]) == 0  # what is asked for is done
    assert len(vitlens.read(tmp_path / "three").table("shown")) == 3
    assert "of the 3 images" not in capsys.readouterr().err


def test_views_of_a_patch(tiny_vit, pictures, tmp_path):
    asked = {"query": (1, 2), "key": (0, 3), "layer": 0}
    record = run(tiny_vit, tmp_path / "out", images=(str(pictures),), **asked)
    assert figures(tmp_path / "out") == OVERVIEW | {"query", "key"}
    model, images = load(str(tiny_vit)), pixels(record)
    looks = patch_views(model, images, side="query", patch=(1, 2))
    seen = patch_views(model, images, side="key", patch=(0, 3))
    for name, expected in (("query", looks), ("key", seen)):
        for layer, view in enumerate(expected):
            np.testing.assert_allclose(record.views[name].mean[layer], view.maps.mean(1), atol=1e-7)
    for row, view in zip(record.query, looks, strict=True):
        assert (row.row, row.column, row.grid) == (1, 2, (4, 4))
        assert row.prefix == pytest.approx(view.prefix.mean().item())
        assert row.itself == pytest.approx(view.maps[:, :, 1, 2].mean().item())
    for row, view in zip(record.key, seen, strict=True):
        assert row.received == pytest.approx(view.maps.sum((2, 3)).mean().item())


@pytest.mark.slow
def test_attention_to_padding_is_recorded(pictures, tmp_path):
    out, size = tmp_path / "out", (40, 40)  # 10x10 patches in windows of 7x7
    record = run("torchvision:swin_t", out, size=size, images=(str(pictures / "0.png"),), query=(9, 9), key=(9, 9))
    assert record.query[0].grid == (10, 10)
    assert 0.1 < record.query[0].padding < 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layer": 2}, "expected --layer with a layer from 0 to 1, found 2"),
        ({"layer": -1}, "expected --layer with a layer from 0 to 1, found -1"),
        ({"query": (4, 0)}, r"expected --query ROW,COL inside the 4x4 grid \(0,0 to 3,3\), found 4,0"),
        ({"key": (0, 9)}, r"expected --key ROW,COL inside the 4x4 grid \(0,0 to 3,3\), found 0,9"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_written(asked, message, tiny_vit, pictures, tmp_path):
    with pytest.raises(InputError, match=message):
        run(tiny_vit, tmp_path / "out", images=(str(pictures),), **asked)
    assert not (tmp_path / "out").exists()


def test_what_a_model_does_not_have_is_refused(tiny_cnn, pictures, tmp_path):
    for asked in ({}, {"query": (0, 0)}):
        with pytest.raises(UnsupportedError, match="softmax attention"):
            run(tiny_cnn, tmp_path / "out", images=(str(pictures / "0.png"),), **asked)
    assert not (tmp_path / "out").exists()


def test_the_order_of_positions_is_a_number(tiny_vit, pictures, tmp_path):
    """Of a model whose positions were made so that near ones are alike, and of one that learned some of that order."""
    model = load(str(tiny_vit))
    rows, columns = (part.flatten().float() for part in torch.meshgrid(*[torch.arange(4)] * 2, indexing="ij"))
    apart = (rows[:, None] - rows[None]) ** 2 + (columns[:, None] - columns[None]) ** 2
    model.module.pos_embed.data[0, 1:] = torch.linalg.cholesky(torch.exp(-apart / 8) + 1e-4 * torch.eye(16))
    save(model, tmp_path / "ordered.safetensors")
    similar = torch.exp(-apart / 8) / (1 + 1e-4) + torch.eye(16) * 1e-4 / (1 + 1e-4)
    upper = torch.ones(16, 16).triu(1) > 0
    expected = torch.corrcoef(torch.stack((similar[upper], apart[upper].sqrt())))[0, 1].item()
    record = run(tmp_path / "ordered.safetensors", tmp_path / "out", images=(str(pictures / "0.png"),))
    metric = record.metric("positions/ordered/distance_correlation")
    assert (metric.value, metric.n) == (pytest.approx(expected, abs=1e-3), 16)
    for pairs in ("all", "rows", "columns"):
        assert record.metric(f"positions/ordered/rank_correlation/{pairs}").value == pytest.approx(1, abs=1e-3)
    (claim,) = REPORT.claims(record)  # of one image nothing else is said
    assert "have more similar" in claim.says


def test_layers_without_a_place_are_named_and_the_others_keep_their_numbers(pictures, tmp_path):
    record = run("timm:gcvit_xxtiny", tmp_path / "out", images=(str(pictures / "0.png"),), size=(64, 64))
    assert [row.layer for row in record.layers] == list(range(4, 12))
    assert [row.layer for row in record.without_map] == list(range(4))


def test_the_windows_of_a_swin_and_a_patch_through_its_stages(swin, pictures, tmp_path):
    out = tmp_path / "out"
    record = run(swin, out, images=(str(pictures),), query=(13, 7))
    model = load(str(swin)).eval()
    expected = window_layers(model, vitlens.images(str(pictures), model))
    assert [(row.pairs, row.new, row.reach) for row in record.windows] == [
        (each.pairs, each.new, each.reach) for each in expected
    ]
    assert [row.shift for row in record.windows] == [(0, 0), (2, 2), (0, 0), (2, 2), (0, 0), (0, 0)]
    arrays = record.window_maps
    assert record.windows[0].patch == (7, 7)
    assert [int(arrays.reach[index].sum()) for index in range(4)] == [16, 64, 16, 64]
    assert arrays.mask[1].sum() == 4 * 4 * 4  # the corner's window: four parts of four patches
    assert {"windows", "receptive_field", "receptive_maps", "heads_1", "heads_3"} <= figures(out)
    assert [row.seen for row in record.receptive_fields[:2]] == [8 * 8 / 32**2, 16 * 16 / 32**2]
    assert record.field_maps.field[0].shape == (32, 32)
    places = [(row.grid, row.row, row.column) for row in record.query[::2]]
    assert places == [((16, 16), 13, 7), ((8, 8), 6, 3), ((4, 4), 3, 1)]
    assert all(row.prefix is None and (row.padding is None or row.padding < 1e-5) for row in record.query)


def test_images_of_another_size_than_the_model_s_input(tmp_path):
    """Digits keep their 32 px, and the model resizes them to its 40."""
    random = ModelOptions(random_weights=True, image_size=(40, 40))
    record = run("swin-micro", tmp_path / "out", data="digits", model_options=random)
    assert record.windows[0].map == (20, 20)
    assert record.field_maps.field[0].shape == (32, 32)


@pytest.mark.parametrize(
    ("command", "name", "mixed"),
    [("attention", "cait_xxs24_224", True), ("attention", "vit_tiny_patch16_224", False),
     ("rollout", "cait_xxs24_224", True)],
)  # fmt: skip
def test_weights_before_talking_heads_are_said_to_be(pictures, tmp_path, command, name, mixed):
    line = f"{command} timm:{name} --random-weights --image-size 32 --images {pictures} --device cpu --quiet"
    assert main([*line.split(), "--out", str(tmp_path / "out")]) == 0
    assert bool(read_folder(tmp_path / "out").mixed_heads) == mixed
    assert ("before a linear map mixes them over heads" in (tmp_path / "out" / "report.md").read_text()) == mixed


def planted(images: int = 40, **changes: object) -> AttentionRecord:
    """Three layers, of which the second attends to the object; changes: of the last two layers' rows."""

    def layer(number: int) -> LayerRow:
        row = LayerRow(
            model="vit", maps=str(number), layer=number, module=f"blocks.{number}", kind="patch", heads=2, map=(4, 4),
            reading="the CLS token", prefix_mass=0.1, alike=Estimate(0.3, 0.2, 0.4, images, ""),
            information=Estimate(2.0 + number / 10, 1.9, 2.3, images, "bits"),
            by_place=Estimate(0.3, 0.2, 0.4, images),
            previous=Estimate(0.5, 0.4, 0.6, images, "") if number else None,
        )  # fmt: skip
        return replace(row, **changes) if number else row

    def mass(number: int) -> OnObjectRow:
        gain = 20.0 if number == 1 else 0.0
        return OnObjectRow(
            "vit", ATTENTION, "mass", Estimate(0.3 + gain / 100, 0.2, 0.6, images), "a map of the centre",
            Estimate(0.3), Estimate(gain, gain - 8, gain + 8, images, "points"), number,
        )  # fmt: skip

    config = Config(models=(ModelEntry("vit", "vit"),), data=Data("scenes", images=images))
    layout = LayoutRow("vit", (4, 4), ("cls",), (8, 8), (32, 32), Estimate(0.05, n=16, unit=""))
    return AttentionRecord(
        config=config, layers=tuple(map(layer, range(3))), on_object=tuple(map(mass, range(3))), layout=(layout,)
    )


def said(record: AttentionRecord) -> dict[str, str]:
    claims = list(REPORT.claims(record))
    assert not list(contradictions(claims))
    return {claim.question: claim.says for claim in claims if claim.is_shown}


def test_what_was_planted_is_found():
    found = said(planted())
    assert found.keys() == {"attention on the object", "information", "position embeddings"}
    assert "In 1 of 3 layers" in found["attention on the object"]
    assert "layer 1, 50.0 %" in found["attention on the object"]
    assert "layer 2" in found["information"]
    assert "no more similar" in found["position embeddings"]


@pytest.mark.parametrize(
    ("question", "column", "shown", "not_shown"),
    [
        ("uniform maps", "information", (0.2, 0.1, 0.3), (0.4, 0.2, 0.6)),
        ("fixed places", "by_place", (0.95, 0.93, 0.97), (0.8, 0.7, 0.9)),
        ("collapse", "previous", (0.957, 0.953, 0.961), (0.952, 0.948, 0.956)),
    ],
)
def test_a_fault_is_claimed_beyond_its_limit_alone(question, column, shown, not_shown):
    assert "layers 1 to 2" in said(planted(**{column: Estimate(*shown, 40)}))[question]
    assert question not in said(planted(**{column: Estimate(*not_shown, 40)}))


def test_of_few_images_nothing_is_claimed():
    few = planted(images=19)
    assert said(few).keys() == {"position embeddings"}
    titles = {part.title for part in REPORT(few).sections}
    assert not {"Which layers attend to the object?", "How do the maps change over the layers?"} & titles


@pytest.mark.parametrize("preset", ["swin-micro", "vit-micro"])
def test_images_of_another_size_than_the_models_are_resized_by_it(preset, tmp_path):
    line = ["attention", preset, "--random-weights", "--image-size", "40", "--limit", "2", "--quiet"]
    assert main([*line, "--out", str(tmp_path / "out")]) == 0
    record = read_folder(tmp_path / "out")
    assert record.layers[0].map == ((20, 20) if preset == "swin-micro" else (10, 10))
    for row in record.layout:
        assert row.image_size == tuple(side * patch for side, patch in zip(row.grid, row.patch_size))
