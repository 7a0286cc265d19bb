"""`vitlens look`: what it writes, which images and model it takes, and what it shows in the terminal."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import vitlens
from tests.kit.first_page import check_first_page, judged
from vitlens import load
from vitlens.analysis.heads.specialisation import HeadLabel, specialise
from vitlens.cli.main import run
from vitlens.commands.look.measure import attends_to, chosen_model, print_look
from vitlens.commands.look.options import LookOptions
from vitlens.commands.look.record import LookRecord
from vitlens.commands.look.report import REPORT
from vitlens.commands.run.options import ModelOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.explorer import sink_rows
from vitlens.errors import InputError
from vitlens.uncertainty import Estimate

QUIET = ("--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def looked(golden) -> Path:
    """The folder of a look at three images."""
    return golden("look").folder


def test_its_rows_and_arrays_are_what_the_function_gives(looked, tiny_vit, pictures):
    record, seen = read_folder(looked), vitlens.look(load(str(tiny_vit)), pictures)
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


def test_it_claims_the_head_with_the_greatest_effect_and_judges_nothing(looked):
    record = read_folder(looked)
    document = REPORT(record)
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
    told = [each.text for each in REPORT(replace(record, heads=harmless)).first.answer]
    assert not any(row.name in text for text in told for row in harmless)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda m: 0 * m, "all equal"), (lambda m: -np.abs(m) - np.arange(4) / 9, "no value above 0"),
     (lambda m: m * np.nan, "not finite")],
)  # fmt: skip
def test_a_map_that_says_nothing_is_crossed_out_with_the_reason(looked, change, reason):
    record = read_folder(looked)

    def crossed(of: LookRecord) -> int:
        figure = REPORT(of).first.picture.draw()
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


def test_the_model_is_the_named_one_then_the_smallest_on_the_disk_then_the_bundled_one(caches):
    name, why = chosen_model(LookOptions(("cat.jpg",), "timm:mine"))
    assert (name.name, why) == ("timm:mine", "")
    name, why = chosen_model(LookOptions(("cat.jpg",)))
    assert name.name == "vit-digits"
    assert "digits 0 to 9 alone" in why
    assert "127.0.0.1:9 does not answer" in why
    assert "--model" in why
    weights = caches / "deit_tiny_patch16_224-a1311bcf.pth"
    weights.write_bytes(b"weights")
    (caches / "deit_base_patch16_224-b5f2ef4d.pth").write_bytes(b"many weights")  # the first by name
    name, why = chosen_model(LookOptions(("cat.jpg",)))
    assert (name.name, name.weights) == ("timm:deit_tiny_patch16_224", str(weights))
    assert "on this disk" in why
    assert "--model" in why
    with pytest.raises(InputError, match="expected --model"):
        chosen_model(LookOptions(("cat.jpg",), model_options=ModelOptions(weights=weights)))


def test_offline_it_says_that_it_looks_with_the_model_of_digits(caches, pictures, tmp_path, capsys):
    line = ["look", str(pictures / "0.png"), "--offline", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert run(line) == 0
    told = [text for text in capsys.readouterr().err.splitlines() if text.startswith("takes vit-digits")]
    assert len(told) == 1
    assert "the digits 0 to 9 alone" in told[0]
    assert "nothing is downloaded offline" in told[0]
    (row,) = read_folder(tmp_path / "out").look
    assert row.digits
    assert row.chosen in told[0]


def test_the_terminal_has_classes_and_heads(looked):
    record, console = read_folder(looked), Console(file=io.StringIO(), width=100)
    print_look(record, console)
    told, first, head = console.file.getvalue(), record.predictions[0], record.heads[0]
    assert f"{100 * first.probability_1:.1f} %  {first.class_1}" in told
    assert f"{head.name}  {100 * head.probability:.1f} %" in told


def test_one_image_cannot_tell_a_place_from_a_sink():
    placed = HeadLabel("position", 0.9, 0.8, 1.0, "position", "sink", 0.2)
    assert "chosen by this image" in attends_to(placed, 1)
    assert attends_to(placed, 8).startswith("position: ")
    assert attends_to(replace(placed, label="mixed"), 1) == attends_to(placed, 1)
    assert attends_to(replace(placed, label="mixed"), 8) == "mixed: position and sink"
    assert attends_to(replace(placed, label="mixed", other="CLS"), 1) == "mixed: position and CLS"
    assert attends_to(None, 1) == "not labelled"


def test_how_it_works_is_told_by_stages_from_labels_and_ablated_heads(looked, tiny_vit, pictures):
    record, seen = read_folder(looked), vitlens.look(load(str(tiny_vit)), pictures)
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
    (section,) = [part for part in REPORT(record).sections if part.title.startswith("How does")]
    assert len(section.sentences) == 2
    harmless = tuple(replace(row, loss=Estimate(-0.1, unit="nats")) for row in record.stages)
    (section,) = [
        part for part in REPORT(replace(record, stages=harmless)).sections if part.title.startswith("How does")
    ]
    assert not any(row.head in sentence.text for row in harmless for sentence in section.sentences)


def test_sinks_are_those_of_the_statistics_and_are_said_where_they_hold_much(looked, tiny_vit, pictures):
    record, model = read_folder(looked), load(str(tiny_vit))
    nowhere = torch.zeros(3, 32, 32, dtype=torch.bool)  # no patch lies on an object: all sinks are off it
    table = vitlens.statistics(model, pictures, masks=nowhere)
    (row,), (arrays,) = record.explorer, record.explorer_arrays.values()
    found = list(sink_rows(row, arrays))
    if all(each.patches < 1 for each in found):  # at most one patch of 16 is kept
        assert np.mean([each.mass for each in found]) == pytest.approx(
            specialise(table).sinks_off_object.value, abs=0.01
        )
    # planted: every patch attends to one patch of the last layer
    weights = np.full(arrays.heads.shape, 1, np.uint8)
    weights[:, -1, :, :, 1 + 5] = 255
    most = np.full_like(arrays.heads_most, 0.5)
    planted = replace(record, explorer_arrays={row.model: replace(arrays, heads=weights, heads_most=most)})
    (claim,) = [claim for claim in REPORT(planted).claims if claim.question == "attention sinks"]
    assert "layer 1" in claim.says
    assert "1 of 16" in claim.says
    flat = replace(record, explorer_arrays={row.model: replace(arrays, heads=np.full_like(weights, 255))})
    assert not [claim for claim in REPORT(flat).claims if claim.question == "attention sinks"]


@pytest.mark.slow
def test_deit_tiny_sees_the_photograph(real_data, tmp_path):
    weights = real_data / "weights" / "deit_tiny_patch16_224.safetensors"
    photo = next((real_data / "photos" / "n02123394").glob("*.jpg"), None) or next(real_data.glob("photos/*/*.jpg"))
    line = ["look", str(photo), "--model", f"timm:deit_tiny_patch16_224@{weights}", *QUIET]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0
    record = read_folder(tmp_path / "out")
    (row,) = record.look
    assert (row.method, row.replace, row.heads, row.digits) == ("best", "zero", 36, False)
    assert (tmp_path / "out" / "report.html").stat().st_size < 3 << 20
