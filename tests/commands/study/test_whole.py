"""The whole study: presets trained first, all analyses in one report, each chapter a complete folder."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from tests.whole_folder import whole_folder
from vitlens.commands.attack import sweep
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.commands.study.measure import chapters, measure
from vitlens.commands.study.measure.depth import USUAL
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.report import report
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.commands.study.report.whole.heads import known_heads
from vitlens.errors import InputError
from vitlens.files import read_run

OPTIONS = RunOptions(device="cpu", limit=10, batch_size=5, quiet=True, command="vitlens study mine resnet20")


@pytest.fixture
def _attacked_a_little(monkeypatch):
    """The attacks of a study, their searches and self-checks are tested where they are made, and so are the checks of
    maps: here few steps and images will do."""
    few = replace(
        USUAL,
        explained=("relevance", "gradcam"),
        attacks=("fgsm",),
        searched=3,
        search_steps=4,
        checked=4,
        panels=6,
        thorough=True,
    )
    monkeypatch.setattr(chapters, "USUAL", few)
    monkeypatch.setattr(sweep, "CHECKED", 2)


def test_a_preset_is_trained_evaluated_and_its_statistics_read(tiny_vit, tmp_path, monkeypatch):
    """The chapters that take long are left out here; with all of them it is the next test, by hand."""
    for chapter in ("_explain", "_compare", "_attack", "_features", "_profile"):
        monkeypatch.setattr(chapters.Chapters, chapter, lambda *_: None)
    out = tmp_path / "out"
    assert measure(StudyOptions((f"mine={tiny_vit}", "resnet20"), epochs=1, run=replace(OPTIONS, out=out)))
    results = json.loads((out / "results.json").read_text())
    folders = [row["folder"] for row in results["tables"]["chapters"]]
    inspections = [f"{word}-mine" for word in ("attention", "rollout", "stats", "ablate")]
    assert folders == [f"chapters/{name}" for name in ("train-resnet20", "evaluate", *inspections)]
    evaluated = json.loads((out / "chapters/evaluate/results.json").read_text())["metrics"]
    for alias in ("mine", "resnet20"):
        assert results["metrics"][f"accuracy/{alias}"] == evaluated[f"accuracy/{alias}"]
    assert "localisation/mine/pointing/rollout-mean" in results["metrics"]
    document = report(read(read_run(out)))
    assert {"attention_mine_development", "head_board_mine"} <= {figure.name for figure in document.figures}
    heads = known_heads(Study.read(read(read_run(out))), "mine")
    assert {tuple(head.ablated) for head in heads.values()} == {("mean", "resample")}
    assert all(head.described and head.objects and head.objects.estimate.n == 10 for head in heads.values())
    assert document.explorer is not None
    ablated = json.loads((out / "chapters/ablate-mine/results.json").read_text())["tables"]["units"]
    (one,) = [row for row in ablated if row["unit"] == "L1.H0"]
    assert document.explorer.importance[1, 0] == pytest.approx(one["loss"]["value"])
    whole_folder(out, "study", drawn=False)


@pytest.mark.slow
@pytest.mark.usefixtures("_attacked_a_little")
def test_a_preset_is_trained_and_then_looked_into(tiny_vit, tmp_path):
    out = tmp_path / "out"
    assert measure(StudyOptions((f"mine={tiny_vit}", "resnet20"), epochs=1, run=replace(OPTIONS, out=out)))
    results = json.loads((out / "results.json").read_text())
    assert results["status"] == "done"
    folders = [row["folder"] for row in results["tables"]["chapters"]]
    inspections = [f"{word}-mine" for word in ("attention", "rollout", "stats", "ablate")]
    rest = ("explain-mine", "explain-resnet20", "compare", "attack", "attack-cw", "features", "profile")
    assert folders == [f"chapters/{name}" for name in ("train-resnet20", "evaluate", *inspections, *rest)]
    assert not any(row["cached"] for row in results["tables"]["chapters"])
    for folder in folders:
        assert json.loads((out / folder / "results.json").read_text())["status"] == "done"
    evaluated = json.loads((out / "chapters/evaluate/results.json").read_text())["metrics"]
    for alias in ("mine", "resnet20"):
        assert results["metrics"][f"accuracy/{alias}"] == evaluated[f"accuracy/{alias}"]
    assert "localisation/mine/pointing/rollout-mean" in results["metrics"]
    assert results["metrics"]["parameters/resnet20"]["value"] == 269_722
    assert results["metrics"]["faithfulness/mine/gap/relevance"]["n"] == 4
    assert "agreement/mine/resnet20/spearman" in results["metrics"]
    document = report(read(read_run(out)))
    titles = [section.title for section in document.sections]
    assert titles[:2] == ["In short", "Introduction"]
    assert [title for title in titles if title in ("What was learned", "Discussion", "Decision table", "Glossary")] == [
        "What was learned", "Discussion", "Decision table", "Glossary",
    ]  # fmt: skip
    assert {verdict.subject.split(" of ")[0] for verdict in document.verdicts} >= {"accuracy", "calibration"}
    assert len(document.limits) <= 5
    assert len(document.findings) <= 7
    drawn = [figure.name for figure in document.figures]
    assert len(drawn) == len(set(drawn))
    assert {"attention_mine_development", "head_board_mine"} <= set(drawn)
    heads = known_heads(Study.read(read(read_run(out))), "mine")
    assert {tuple(head.ablated) for head in heads.values()} == {("mean", "resample")}
    assert all(head.described and head.objects and head.objects.estimate.n == 10 for head in heads.values())
    assert document.explorer is not None  # of the attention chapter's images, with what other chapters found of heads
    assert [image.weights is None for image in document.explorer.images] == [False] * 4 + [True] * 6
    ablated = json.loads((out / "chapters/ablate-mine/results.json").read_text())["tables"]["units"]
    (one,) = [row for row in ablated if row["unit"] == "L1.H0"]
    assert document.explorer.importance[1, 0] == pytest.approx(one["loss"]["value"])
    assert all(all(layer) for layer in document.explorer.labels)
    whole_folder(out, "study", drawn=False)


@pytest.mark.slow
def test_a_second_study_of_the_same_models_repeats_no_chapter(tiny_vit, tiny_cnn, tmp_path, monkeypatch):
    monkeypatch.setenv("VITLENS_CACHE", str(tmp_path / "cache"))
    outs = [tmp_path / name for name in ("first", "second")]
    for out in outs:
        measure(StudyOptions((f"mine={tiny_vit}", f"other={tiny_cnn}"), run=replace(OPTIONS, out=out)))
    first, second = (json.loads((out / "results.json").read_text()) for out in outs)
    assert all(row["cached"] for row in second["tables"]["chapters"])
    assert first["metrics"] == second["metrics"]
    named = [path for path in outs[1].rglob("*.json") if str(outs[0]) in path.read_text()]
    assert named == []
    assert (outs[1] / "report.md").read_text().count("## Appendix") == 1
    changed = replace(OPTIONS, out=tmp_path / "third", seed=1)
    measure(StudyOptions((f"mine={tiny_vit}", f"other={tiny_cnn}"), run=changed))
    third = json.loads((tmp_path / "third" / "results.json").read_text())
    assert not any(row["cached"] for row in third["tables"]["chapters"])


def test_a_study_needs_a_vit(tiny_cnn, tmp_path):
    with pytest.raises(InputError, match="softmax attention"):
        measure(StudyOptions((str(tiny_cnn),), run=replace(OPTIONS, out=tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_classes_that_a_model_does_not_know_are_refused_before_any_chapter(tiny_vit, tmp_path):
    """And the folder that this leaves does not block the next try."""
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "data" / name / "1.png")
    for _ in range(2):
        with pytest.raises(InputError, match="only in the data: 'cat', 'dog'"):
            measure(
                StudyOptions(
                    (f"mine={tiny_vit}",), data=str(tmp_path / "data"), run=replace(OPTIONS, out=tmp_path / "out")
                )
            )
        assert not (tmp_path / "out" / "chapters").exists()
