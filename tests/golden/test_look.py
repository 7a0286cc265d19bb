"""`vitlens look`: what it writes, which images and model it takes, and what it shows in the terminal."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import vitlens
from tests.kit.commands import refusal, report
from tests.kit.first_page import check_first_page, judged
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.look.record import LookRecord
from vitlens.commands.run.publish import read_folder
from vitlens.uncertainty import Estimate

QUIET = ("--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def record(golden) -> LookRecord:
    """A look at three images."""
    return golden("look").record


def test_its_rows_and_arrays_are_what_the_function_gives(record, tiny_vit, pictures):
    seen = vitlens.look(load(str(tiny_vit)), pictures)
    names, shares = zip(*record.predictions[1].top_classes)
    assert names == seen.names[1]
    assert shares == pytest.approx(seen.probabilities[1].tolist())
    assert [Path(row.image).name for row in record.predictions] == record.names == ["0.png", "1.png", "2.png"]
    heads = record.heads_of(1, most=4)
    assert [(row.layer, row.head) for row in heads] == [(each.layer, each.head) for each in seen.heads(1, most=4)]
    assert [row.delta_loss for row in heads] == pytest.approx([each.delta_loss for each in seen.heads(1, most=4)])
    np.testing.assert_allclose(record.maps.prediction, seen.maps[:, 0])
    np.testing.assert_allclose(record.maps.runner_up, seen.maps[:, 1])
    (row,) = record.look
    assert (row.method, row.replace, row.images, row.heads) == ("best", "resample", 3, 4)


def test_it_claims_the_head_with_the_greatest_effect_and_judges_nothing(record):
    document = report(record)
    check_first_page(document)
    assert not judged(document)
    assert [row[0] for row in document.first.glance.rows] == ["0.png", "1.png", "2.png"]  # files, not paths
    assert set(document.explorer.images[0].maps) == {"prediction", "runner-up"}
    mean = np.mean([row.delta_loss for row in record.heads if (row.layer, row.head) == (1, 0)])
    assert document.explorer.importance[1, 0] == pytest.approx(mean)
    most = max(record.heads, key=lambda row: row.delta_loss)
    claim = next(claim for claim in document.claims if claim.question == "head")
    assert claim.evidence == "intervened"
    assert most.name in claim.says
    harmless = tuple(replace(row, delta_loss=-abs(row.delta_loss)) for row in record.heads)
    told = [each.text for each in report(replace(record, heads=harmless)).first.answer]
    assert not any(row.name in text for text in told for row in harmless)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda m: 0 * m, "all equal"), (lambda m: -np.abs(m) - np.arange(4) / 9, "no value above 0"),
     (lambda m: m * np.nan, "not finite")],
)  # fmt: skip
def test_a_map_that_says_nothing_is_crossed_out_with_the_reason(record, change, reason):
    def crossed(of: LookRecord) -> int:
        figure = report(of).first.picture.draw()
        return [text.get_text() for axes in figure.axes for text in axes.texts].count(reason)

    assert crossed(record) == 0
    assert crossed(replace(record, maps=replace(record.maps, prediction=change(record.maps.prediction)))) == 3


def test_what_is_no_image_is_one_line_each_and_the_others_are_looked_at(tiny_vit, pictures, tmp_path, capsys):
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty").mkdir()
    given = [str(tmp_path / "text.jpg"), str(tmp_path / "empty"), str(tmp_path / "gone.png"), str(pictures / "1.png")]
    assert run(["look", *given, "--model", str(tiny_vit), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out")]
    assert len(lines) == 3
    assert all(sum(Path(name).name in line for line in lines) == 1 for name in given[:3])
    assert read_folder(tmp_path / "out").names == ["1.png"]
    capsys.readouterr()
    assert run(["look", *given[:3], "--model", str(tiny_vit), *QUIET, "--out", str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert "found none" in told[0]
    assert not (tmp_path / "none").exists()


def test_of_many_images_the_first_are_looked_at_and_unreadable_ones_do_not_count(tiny_vit, pictures, tmp_path, capsys):
    (tmp_path / "many").mkdir()
    for number in range(5):
        shutil.copy(pictures / "0.png", tmp_path / "many" / f"{number}.png")
    (tmp_path / "many" / "0.png").write_text("no image")
    line = ["look", str(tmp_path / "many"), "--model", str(tiny_vit), "--limit", "2", "--device", "cpu"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0
    assert "the first 2 of 5 files" in capsys.readouterr().err
    assert read_folder(tmp_path / "out").names == ["1.png", "2.png"]


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of the hubs, without a network; the checkpoints of torch.hub."""
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "huggingface" / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing answers there
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def chosen(folder: Path, image: Path, capsys, *more: str) -> tuple[str, str]:
    """The model that is taken and why, as the record and the terminal say."""
    assert run(["look", str(image), *more, "--device", "cpu", "--out", str(folder)]) == 0
    found = read_folder(folder)
    (row,) = found.look
    assert row.chosen in capsys.readouterr().err
    return found.config.models[0].name, row.chosen


def test_the_model_is_the_named_one_then_the_smallest_on_the_disk_then_the_bundled_one(
    caches, pictures, tmp_path, capsys
):
    name, why = chosen(tmp_path / "none", pictures / "0.png", capsys)
    assert name == "vit-digits"
    for words in ("digits 0 to 9 alone", "127.0.0.1:9 does not answer", "--model"):
        assert words in why
    name, why = chosen(tmp_path / "offline", pictures / "0.png", capsys, "--offline")
    assert "nothing is downloaded offline" in why
    for file in ("deit_base_patch16_224-b5f2ef4d.pth", "deit_tiny_patch16_224-a1311bcf.pth"):  # the first by name
        (caches / file).write_bytes(b"many weights" if "base" in file else b"weights")
    assert run(["look", str(pictures / "0.png"), "--out", str(tmp_path / "disk")]) == 2  # they are broken
    assert "takes timm:deit_tiny_patch16_224, the smallest" in capsys.readouterr().err
    weights = f"look {pictures / '0.png'} --weights {caches / 'deit_tiny_patch16_224-a1311bcf.pth'} --quiet"
    assert "expected --model" in refusal(capsys, weights)
    (row,) = vitlens.read(tmp_path / "offline").table("look")
    assert (row.digits, row.replace) == (True, "zero")  # one image has no other to resample from


def test_the_terminal_has_classes_and_heads(tiny_vit, pictures, tmp_path, capsys):
    assert (
        run(["look", str(pictures), "--model", str(tiny_vit), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    )
    shown, record = capsys.readouterr(), read_folder(tmp_path / "out")
    told, first, head = shown.out + shown.err, record.predictions[0], record.heads[0]
    assert f"{100 * first.probability_1:.1f} %  {first.class_1}" in told
    assert f"{head.name}  {100 * head.probability:.1f} %" in told


def test_how_it_works_is_told_by_stages_from_labels_and_ablated_heads(record, tiny_vit, pictures):
    seen = vitlens.look(load(str(tiny_vit)), pictures)
    assert [row.layers for row in record.stages] == ["0", "1"]
    for layer, row in enumerate(record.stages):
        labels = [given.label for given in seen.labels[layer]]
        clear = [label for label in labels if label not in ("mixed", "unlabelled")]
        assert (row.heads, sum(row.attends.values()), row.unclear) == (2, len(clear), 2 - len(clear))
        assert set(row.attends) == set(clear)
        rises = {f"L{at}.H{head}": seen.delta_loss[:, n].mean() for n, (at, head) in enumerate(seen.places)}
        most = max((name for name in rises if name.startswith(f"L{layer}.")), key=lambda name: float(rises[name]))
        assert (row.head, row.block, row.lens, row.object) == (most, "", None, None)
        assert row.loss.value == pytest.approx(float(rises[most]), abs=1e-6)
        uniform = seen.statistics.uniform_distance()[layer]
        assert row.range == pytest.approx(float((seen.statistics.distance[layer] / uniform).mean()))
    (section,) = [part for part in report(record).sections if part.title.startswith("How does")]
    assert len(section.sentences) == 2
    harmless = tuple(replace(row, loss=Estimate(-0.1, unit="nats")) for row in record.stages)
    (section,) = [
        part for part in report(replace(record, stages=harmless)).sections if part.title.startswith("How does")
    ]
    assert not any(row.head in sentence.text for row in harmless for sentence in section.sentences)
