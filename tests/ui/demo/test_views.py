"""What the tabs show, without a browser and without gradio: the numbers are those of the public functions."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.forms import picture_of, write
from tests.kit.nasty import problems
from tests.kit.pages import page_problems
from tests.kit.saving import saved_figures
from tests.kit.whole_folder import whole_folder
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.run.publish import read_folder
from vitlens.data.decode import quiet_pillow
from vitlens.demo import intervene, tabs
from vitlens.demo.pictures import examples
from vitlens.demo.pool import Pool
from vitlens.demo.report import REPORT
from vitlens.demo.site import DemoSite, pieces, written
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.model import Model

VIT, CNN = vitlens.load("vit-digits"), vitlens.load("cnn-digits")


@pytest.fixture(scope="module")
def picture():
    return picture_of((VIT, CNN), seed=3)


def folder_of(page: Path) -> Path:
    """The report folder of a page, from the archive beside it."""
    shutil.unpack_archive(page.with_suffix(".zip"), page.parent)
    return page.with_suffix("")


def test_look_is_the_report_of_the_command_on_the_picture(picture, tmp_path):
    page = write(VIT, picture, tabs.write_look, tmp_path)
    record = read_folder(folder_of(page))
    shares = VIT(picture.images(VIT)).softmax(-1)[0]
    top = record.predictions[0].top_classes
    assert [name for name, _ in top] == [VIT.classes[index] for index in shares.topk(len(top)).indices]
    assert [share for _, share in top] == pytest.approx(shares.topk(len(top)).values.tolist())
    assert record.config.command_line == "vitlens look scene.png --model vit-digits"
    assert "data-explorer" in page.read_text()
    assert str(tmp_path) not in page.read_text()
    assert "data-explorer" not in write(CNN, picture, tabs.write_look, tmp_path).read_text()


@pytest.mark.parametrize("model", [VIT, CNN], ids=lambda model: model.alias)
def test_only_methods_that_are_quick_are_offered(model):
    offered = tabs.offered_methods(model)
    assert offered
    assert all(ATTRIBUTIONS[name].forwards + ATTRIBUTIONS[name].backwards <= tabs.PASSES for name in offered)


def test_the_class_that_was_typed_is_explained_by_the_chosen_method(picture, tmp_path):
    record = read_folder(folder_of(write(VIT, picture, tabs.write_explain, tmp_path, method="gradcam", target="7")))
    wanted = vitlens.explain(VIT, picture.images(VIT), targets=7, method="gradcam")[0].numpy()
    assert np.allclose(record.maps["vit-digits"].maps[0][0], wanted, atol=1e-6)
    assert [row.target for row in record.shown] == ["7"]
    line = "vitlens explain vit-digits --images scene.png --method gradcam --target 7"
    assert record.config.command_line == line
    with pytest.raises(UnknownNameError, match="no class 'zebra'"):
        write(VIT, picture, tabs.write_explain, tmp_path, method="gradcam", target="zebra")
    with pytest.raises(UnsupportedError):
        write(CNN, picture, tabs.write_explain, tmp_path, method="rollout", target="")


def test_a_class_that_the_second_model_lacks_is_told_from_one_that_both_lack():
    letters = Model(
        VIT.module,
        alias="letters",
        anatomy=VIT.anatomy,
        preprocessing=VIT.preprocessing,
        classes=tuple("abcdefghij"),
        provenance=VIT.provenance,
        architecture=VIT.architecture,
    )
    assert tabs.lacks_class("8", CNN, letters)  # the name of a digit, not the index of another class
    assert tabs.lacks_class("a", letters, CNN)
    assert not tabs.lacks_class("8", CNN, VIT)
    assert not tabs.lacks_class(tabs.PREDICTED, CNN, letters)
    with pytest.raises(UnknownNameError, match="no class 'a'"):
        tabs.lacks_class("a", CNN, letters)


def test_an_attack_stays_within_epsilon(picture, tmp_path):
    record = read_folder(folder_of(write(VIT, picture, tabs.write_attack, tmp_path, attack="pgd", epsilon=16.0)))
    assert [row.fooled for row in record.overall] == [1]
    assert record.config.command_line.endswith("--predicted --attack pgd --epsilon 16")


@pytest.mark.parametrize("epsilon", [-1.0, 17.0, math.nan])
def test_an_epsilon_out_of_range_is_refused(epsilon, picture, tmp_path):
    with pytest.raises(InputError, match="from 0 to 16"):
        write(VIT, picture, tabs.write_attack, tmp_path, attack="pgd", epsilon=epsilon)


def test_an_attack_that_takes_long_is_refused(picture, tmp_path):
    with pytest.raises(UnknownNameError, match=r"no attack on this page 'auto'.*pgd"):
        write(VIT, picture, tabs.write_attack, tmp_path, attack="auto", epsilon=4.0)


def test_a_model_is_named_in_the_command_line_as_it_was_typed(picture, tmp_path):
    model = vitlens.load("vit-digits@random")
    shown = replace(picture, pixels={model.alias: picture.pixels["vit-digits"]})
    site = DemoSite(Pool((model,)), (), tmp_path, {model.alias: "vit-digits@random"})
    page = written(site, model, shown, tabs.write_look, session="one", word="look")
    assert read_folder(folder_of(page)).config.command_line == "vitlens look scene.png --model vit-digits@random"


def test_what_is_off_changes_the_logit_as_a_whole_forward_does(picture):
    switches = intervene.switches_of(VIT)
    off = intervene.read_off({"heads": [[3, 1], [0, 2]], "patches": [9, 10]}, switches)
    assert off == intervene.Off(((0, 2), (3, 1)), (9, 10))
    answer = intervene.answered(VIT, picture, off, switches)
    (row,), images = answer.intervened, picture.images(VIT)
    target = VIT.classes.index(row.target)
    with vitlens.intervene(VIT, intervene.changes_of(VIT, off)), torch.no_grad():
        whole = VIT(images)[0, target]
        weights = vitlens.attention(VIT, images)[2][0, 0, 5]
    assert row.logit_after == pytest.approx(float(whole), abs=1e-4)
    assert weights[1 + 9] == weights[1 + 10] == 0  # after CLS
    assert row.exact
    clean = intervene.answered(VIT, picture, intervene.Off(), switches)
    assert clean.intervened[0].logit_before == clean.intervened[0].logit_after == row.logit_before
    assert np.array_equal(clean.maps.before, clean.maps.after)
    assert not np.array_equal(answer.maps.before, answer.maps.after)


def test_a_click_computes_only_what_it_changes(picture, monkeypatch):
    switches, off = intervene.switches_of(VIT), intervene.Off(((3, 1),))
    whole, wanted = (intervene.answered(VIT, picture, each, switches) for each in (intervene.Off(), off))
    explain, calls = vitlens.explain, []
    monkeypatch.setattr(vitlens, "explain", lambda *args, **options: calls.append(1) or explain(*args, **options))
    answer = intervene.answered(VIT, picture, off, switches, whole=whole)
    assert len(calls) == 1
    assert answer.intervened == wanted.intervened
    assert np.array_equal(answer.maps.before, wanted.maps.before)
    assert np.array_equal(answer.maps.after, wanted.maps.after)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"heads": [[6, 0]]},
        {"heads": [[0, 4]]},
        {"heads": [[0]]},
        {"heads": [["0", 1]]},
        {"heads": "all"},
        {"patches": [64]},
        {"patches": [-1]},
        {"patches": [True]},
        {"patches": [1.5]},
    ],
)
def test_what_a_browser_makes_up_is_refused(data):
    with pytest.raises(InputError, match="expected"):
        intervene.read_off(data, intervene.switches_of(VIT))


def test_a_cnn_has_nothing_to_switch_off():
    with pytest.raises(UnsupportedError):
        intervene.switches_of(CNN)


def test_the_board_has_a_button_a_head_and_a_patch(picture):
    html = intervene.board_html(VIT, picture, intervene.switches_of(VIT))
    assert html.count("data-head=") == 6 * 4
    assert html.count("data-patch=") == 8 * 8
    without = intervene.board_html(VIT, picture, intervene.Switches(((0, 0),), None, "windows"))
    assert "data-patch" not in without
    assert "windows." in without


OFF = intervene.Off(((0, 2), (3, 1)), (9, 10))
OWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "intervene": (intervene.write_intervened, {"off": {"heads": OFF.heads, "patches": OFF.patches}}),
    "nothing": (intervene.write_intervened, {"off": {}}),
}


@pytest.mark.parametrize("word", OWN)
def test_what_intervene_shows_is_a_whole_report_folder(word, picture, tmp_path):
    named = replace(picture, name="[a](b) <i>m`$.png")
    function, options = OWN[word]
    with saved_figures():
        page = write(VIT, named, function, tmp_path, **options)
    out = folder_of(page)
    whole_folder(out, "demo")
    assert problems((out / "report.md").read_text(encoding="utf-8")) == []
    assert page_problems((out / "report.html").read_text(encoding="utf-8")) == []
    assert page.read_bytes() == (out / "report.html").read_bytes()
    record = read_folder(out)
    off = OFF if word == "intervene" else intervene.Off()
    answer = intervene.answered(VIT, named, off, intervene.switches_of(VIT))
    assert (record.intervened, record.classes) == (answer.intervened, answer.classes)
    assert [(each.layer, each.head) for each in record.heads_off] == list(off.heads)
    assert [(each.row, each.column, each.key) for each in record.patches_off] == (
        [(1, 1, 10), (1, 2, 11)] if off.patches else []
    )
    images, target = picture.images(VIT), VIT.classes.index(record.intervened[0].target)
    with vitlens.intervene(VIT, intervene.changes_of(VIT, off)), torch.no_grad():
        assert record.classes[0].logit_after == pytest.approx(float(VIT(images)[0, target]), abs=1e-4)
    assert all(np.array_equal(*pair) for pair in zip(*map(vars_of, (record.maps, answer.maps))))
    assert np.array_equal(record.maps.pixels, picture.pixels["vit-digits"].numpy())


def vars_of(arrays: object) -> list[np.ndarray]:
    return list(vars(arrays).values())


def test_a_changed_prediction_is_the_title():
    switches = intervene.switches_of(VIT)
    everything = intervene.answered(VIT, picture_of((VIT,)), intervene.Off(switches.heads, tuple(range(64))), switches)
    (row,) = everything.intervened
    assert row.predicted != row.target
    document = REPORT(everything)
    assert document.title.startswith(f"vit-digits predicts {row.predicted} without 24 heads and 64 patches")
    assert f"becomes {row.predicted}, was {row.target}" in document.first.answer[0].text
    assert "L1.H1 and 18 more and 64 patches" in document.first.answer[0].text


def test_heads_that_a_model_lacks_are_not_switched_off(picture, tmp_path):
    with pytest.raises(InputError, match=r"of this model \(6 layers of at most 4 heads, 8x8 patches\), found head"):
        write(VIT, picture, intervene.write_intervened, tmp_path, off={"heads": [[6, 0]]})


def test_names_are_escaped_everywhere(picture, tmp_path):
    bad = '<img src=x onerror="alert(1)">'
    named = replace(picture, name=bad)
    page = write(CNN, named, tabs.write_look, tmp_path)
    assert "<img src=x" not in str(pieces.sentence(bad)) + page.read_text()


def test_only_models_with_a_classifier_are_served():
    headless = Model(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 4)),
        alias="features",
        anatomy=CNN.anatomy,
        preprocessing=CNN.preprocessing,
        classes=(),
        provenance=CNN.provenance,
        architecture={},
    )
    with pytest.raises(UnsupportedError, match="no classifier"):
        Pool((headless,))


def test_examples_are_scenes_for_models_of_digits_and_photographs_for_others(tmp_path):
    shown = examples((), (VIT, CNN))
    assert len(shown) == 6
    assert shown[0].pixels["vit-digits"].shape == (1, 3, 32, 32)
    Image.new("RGB", (2000, 1000), "teal").save(tmp_path / "wide.png")
    (tmp_path / "notes.png").write_text("no image")
    with quiet_pillow():
        given = examples((str(tmp_path),), (VIT,))
        assert [each.name for each in given] == ["wide.png"]
        (tmp_path / "wide.png").unlink()
        with pytest.raises(InputError, match="found none"):
            examples((str(tmp_path),), (VIT,))


def test_the_map_that_answers_a_click_is_a_quick_one():
    assert (intervene.live_method(VIT), intervene.live_method(CNN)) == ("relevance", "gradcam")
