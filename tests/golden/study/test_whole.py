"""The whole study: presets trained first, each chapter a complete folder, and one page that is written from all."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from tests.kit.contradictions import contradictions
from tests.kit.first_page import check_first_page
from tests.kit.whole_folder import whole_folder
from vitlens.commands.attack import sweep
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study import chapters
from vitlens.commands.study.measure import measure
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.report import REPORT
from vitlens.errors import InputError

OPTIONS = RunOptions(device="cpu", limit=10, batch_size=5, quiet=True, command="vitlens study mine resnet20")
INSPECTED = [f"{word}-mine" for word in ("attention", "rollout", "stats", "ablate")]


@pytest.fixture(scope="module")
def inspected(tiny_vit, tmp_path_factory):
    """A study of a ViT and a preset; the chapters that take long are left out here: with all of them it is the next
    test, by hand."""
    out = tmp_path_factory.mktemp("study") / "out"
    with pytest.MonkeyPatch.context() as patch:
        run, left_out = chapters.Chapters.run, ("explain", "compare", "attack", "features", "profile")
        patch.setattr(
            chapters.Chapters, "run",
            lambda self, word, *given, **part: None if word in left_out else run(self, word, *given, **part),
        )  # fmt: skip
        measure(StudyOptions((f"mine={tiny_vit}", "resnet20"), epochs=1, run=replace(OPTIONS, out=out)))
    return out


def test_a_preset_is_trained_and_every_chapter_is_a_folder_of_its_own(inspected):
    record = read_folder(inspected)
    assert [row.folder for row in record.chapters] == [
        f"chapters/{name}" for name in ("train-resnet20", "evaluate", *INSPECTED)
    ]
    assert not any(row.cached for row in record.chapters)
    whole_folder(inspected, "study", drawn=False)


def test_the_metrics_are_those_of_the_chapters(inspected):
    metrics = json.loads((inspected / "results.json").read_text())["metrics"]
    evaluated = json.loads((inspected / "chapters/evaluate/results.json").read_text())["metrics"]
    for alias in ("mine", "resnet20"):
        assert metrics[f"accuracy/{alias}"] == evaluated[f"accuracy/{alias}"]
    assert "localisation/mine/pointing/rollout-mean" in metrics
    record = read_folder(inspected)
    assert record.better("accuracy/mine") == "higher"
    assert record.better("calibration_error/mine") == "lower"


def test_how_the_vit_works_follows_from_its_chapters(inspected):
    record = read_folder(inspected)
    stats, ablate = record.about("stats", "mine").record, record.about("ablate", "mine").record
    assert sum(row.heads for row in record.stages) == len(stats.heads)
    for row in record.stages:
        assert sum(row.attends.values()) + row.unclear == row.heads
        (block,) = [unit for unit in ablate.units if unit.unit == row.block]
        assert row.loss == block.loss
    assert record.stages[-1].lens == ablate.lens[-1].accuracy
    assert [section.title for section in REPORT(record).sections if "work" in section.title]


def test_the_explorer_has_the_labels_and_the_importance_of_the_heads(inspected):
    record = read_folder(inspected)
    explorer = REPORT(record).explorer
    assert explorer is not None
    for row in record.about("ablate", "mine").record.heads:
        assert explorer.importance[row.layer, row.head] == pytest.approx(row.loss.value)
        assert explorer.labels[row.layer][row.head] == (row.label or "")


@pytest.mark.slow
def test_a_whole_study(tiny_vit, tmp_path, monkeypatch):
    """Attacks, searches and checks of maps are tested where they are made: here few steps and images will do."""
    few = replace(
        chapters.USUAL, explained=("relevance", "gradcam"), attacks=("fgsm",), searched=3, search_steps=4, checked=4,
        panels=6, thorough=True,
    )  # fmt: skip
    monkeypatch.setattr(chapters, "USUAL", few)
    monkeypatch.setattr(sweep, "CHECKED", 2)
    out = tmp_path / "out"
    measure(StudyOptions((f"mine={tiny_vit}", "resnet20"), epochs=1, run=replace(OPTIONS, out=out)))
    record = read_folder(out)
    rest = ("explain-mine", "explain-resnet20", "compare", "attack", "attack-cw", "features", "profile")
    assert [row.folder for row in record.chapters] == [
        f"chapters/{name}" for name in ("train-resnet20", "evaluate", *INSPECTED, *rest)
    ]
    assert record.metric("parameters/resnet20").value == 269_722
    assert record.metric("faithfulness/mine/gap/relevance").n == 4
    document = REPORT(record)
    check_first_page(document)
    assert not list(contradictions(claim for chapter in record.parts for claim in chapter.claims))
    assert {section.more for section in document.sections} <= {chapter.report for chapter in record.parts}
    assert len(document.figures) <= 12
    whole_folder(out, "study", drawn=False)


@pytest.mark.slow
def test_a_second_study_of_the_same_models_repeats_no_chapter(tiny_vit, tiny_cnn, tmp_path, monkeypatch):
    monkeypatch.setenv("VITLENS_CACHE", str(tmp_path / "cache"))
    outs = [tmp_path / name for name in ("first", "second")]
    for out in outs:
        measure(StudyOptions((f"mine={tiny_vit}", f"other={tiny_cnn}"), run=replace(OPTIONS, out=out)))
    first, second = map(read_folder, outs)
    assert all(row.cached for row in second.chapters)
    assert first.metrics == second.metrics
    named = [path for path in outs[1].rglob("*.json") if str(outs[0]) in path.read_text()]
    assert named == []
    changed = replace(OPTIONS, out=tmp_path / "third", seed=1)
    measure(StudyOptions((f"mine={tiny_vit}", f"other={tiny_cnn}"), run=changed))
    assert not any(row.cached for row in read_folder(tmp_path / "third").chapters)


def test_a_study_needs_a_vit(tiny_cnn, tmp_path):
    with pytest.raises(InputError, match="softmax attention"):
        measure(StudyOptions((str(tiny_cnn),), run=replace(OPTIONS, out=tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_classes_that_a_model_does_not_know_are_refused_before_any_chapter(tiny_vit, tmp_path):
    """And the folder that this leaves does not block the next try."""
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "data" / name / "1.png")
    run = replace(OPTIONS, out=tmp_path / "out")
    for _ in range(2):
        with pytest.raises(InputError, match="only in the data: 'cat', 'dog'"):
            measure(StudyOptions((f"mine={tiny_vit}",), data=str(tmp_path / "data"), run=run))
        assert not (tmp_path / "out" / "chapters").exists()
