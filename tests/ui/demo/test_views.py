"""The tabs, without a browser and without gradio: their numbers are the public functions'."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.axes import array, shown
from tests.kit.forms import picture_of, write
from tests.kit.nasty import problems
from tests.kit.pages import page_problems
from tests.kit.saving import saved_figures
from tests.kit.select import values_of
from tests.kit.tiny import ours
from tests.kit.whole_folder import whole_folder
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.run.publish import read_folder
from vitlens.data.decode import quiet_pillow
from vitlens.demo import intervene, tabs
from vitlens.demo.pictures import examples
from vitlens.demo.pool import Pool
from vitlens.demo.report import REPORT
from vitlens.demo.site import DemoSite, pieces, write_page
from vitlens.errors import InputError, UnknownNameError, UnsupportedError, typed_flags
from vitlens.models.model import Model

VIT = vitlens.load("vit-digits")
CNN = vitlens.load("cnn-digits")
SWITCHES = intervene.switches_of(VIT)
OFF = intervene.Off(((0, 2), (3, 1)), (9, 10))


@pytest.fixture(scope="module")
def picture():
    return picture_of((VIT, CNN), seed=3)


def folder_of(page: Path) -> Path:
    """Return the report folder of a page, from the archive next to it."""
    shutil.unpack_archive(page.with_suffix(".zip"), page.parent)
    return page.with_suffix("")


def with_classes(model: Model, alias: str, classes: tuple[str, ...]) -> Model:
    fields = {
        name: getattr(model, name)
        for name in ("anatomy", "preprocessing", "provenance", "architecture")
    }
    return Model(model.module, alias=alias, classes=classes, **fields)


def test_look_is_the_report_of_the_command_on_the_picture(picture, tmp_path):
    page = write(VIT, picture, tabs.write_look, tmp_path)
    record = read_folder(folder_of(page))
    shares = VIT(picture.images(VIT)).softmax(-1)[0]
    top = record.predictions[0].top_classes
    assert [name for name, _ in top] == [
        VIT.classes[index] for index in shares.topk(len(top)).indices
    ]
    assert [share for _, share in top] == pytest.approx(shares.topk(len(top)).values.tolist())
    assert record.config.command_line == "vitlens look scene.png --model vit-digits"
    assert "data-explorer" in page.read_text()
    assert str(tmp_path) not in page.read_text()
    bad = '<img src=x onerror="alert(1)">'
    text = write(CNN, replace(picture, name=bad), tabs.write_look, tmp_path).read_text()
    assert "data-explorer" not in text
    assert "<img src=x" not in str(pieces.sentence(bad)) + text


def test_the_class_that_was_typed_is_explained_by_the_chosen_method_of_those_that_are_quick(
    picture, tmp_path
):
    for model, live in ((VIT, "relevance"), (CNN, "gradcam")):
        offered = [ATTRIBUTIONS[name] for name in tabs.offered_methods(model)]
        assert 0 < max(method.forwards + method.backwards for method in offered) <= tabs.PASSES
        assert intervene.live_method(model) == live
    record = read_folder(
        folder_of(write(VIT, picture, tabs.write_explain, tmp_path, method="gradcam", target="7"))
    )
    expected = vitlens.explain(VIT, picture.images(VIT), targets=7, method="gradcam")[0].numpy()
    assert np.allclose(record.maps["vit-digits"].maps[0][0], expected, atol=1e-6)
    assert values_of(record.shown, "target") == ["7"]
    line = "vitlens explain vit-digits --images scene.png --method gradcam --target 7"
    assert record.config.command_line == line


def test_a_class_that_the_second_model_lacks_is_told_from_one_that_both_lack():
    letters = with_classes(VIT, "letters", tuple("abcdefghij"))
    # the name of a digit, not the index of another class
    assert tabs.lacks_class("8", CNN, letters)
    assert tabs.lacks_class("a", letters, CNN)
    assert not tabs.lacks_class("8", CNN, VIT)
    assert not tabs.lacks_class(tabs.PREDICTED, CNN, letters)
    with pytest.raises(UnknownNameError, match="'a'"):
        tabs.lacks_class("a", CNN, letters)
    with pytest.raises(UnsupportedError, match="no classifier"):  # is not served
        Pool((with_classes(CNN, "features", ()),))


def test_an_attack_stays_within_epsilon_and_a_model_is_named_as_it_was_typed(picture, tmp_path):
    record = read_folder(
        folder_of(write(VIT, picture, tabs.write_attack, tmp_path, attack="pgd", epsilon=16.0))
    )
    assert values_of(record.overall, "fooled") == [1]
    assert record.config.command_line.endswith("--predicted --attack pgd --epsilon 16")
    site = DemoSite(Pool((CNN,)), (), tmp_path, {CNN.alias: "cnn-digits@random"})
    page = write_page(site, CNN, picture, tabs.write_look, session="two", word="look")
    assert (
        read_folder(folder_of(page)).config.command_line
        == "vitlens look scene.png --model cnn-digits@random"
    )


ATTACK = tabs.write_attack
EXPLAIN = tabs.write_explain


@pytest.mark.parametrize(
    ("model", "function", "options", "error", "words"),
    [
        *(
            (VIT, ATTACK, {"attack": "pgd", "epsilon": at}, InputError, "from 0 to 16")
            for at in (-1, 17, math.nan)
        ),
        (VIT, ATTACK, {"attack": "auto", "epsilon": 4.0}, UnknownNameError, "'auto'.*pgd"),
        (VIT, EXPLAIN, {"method": "gradcam", "target": "zebra"}, UnknownNameError, "'zebra'"),
        (CNN, EXPLAIN, {"method": "rollout", "target": ""}, UnsupportedError, None),
        (
            VIT,
            intervene.write_intervened,
            {"off": {"heads": [[6, 0]]}},
            InputError,
            "6 layers of at most 4 heads",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(model, function, options, error, words, picture, tmp_path):
    with pytest.raises(error, match=words):
        write(model, picture, function, tmp_path, **options)


def test_what_a_browser_makes_up_is_refused():
    heads = [[[6, 0]], [[0, 4]], [[0]], [["0", 1]], "all"]
    for data in (
        None,
        *({"heads": head} for head in heads),
        *({"patches": [patch]} for patch in (64, -1, True, 1.5)),
    ):
        with pytest.raises(InputError):
            intervene.read_off(data, SWITCHES)


def test_what_is_off_changes_the_logit_as_a_whole_forward_does(picture, monkeypatch):
    off = intervene.read_off({"heads": [[3, 1], [0, 2]], "patches": [9, 10]}, SWITCHES)
    assert off == OFF
    answer = intervene.measure_intervention(VIT, picture, off, SWITCHES)
    (row,), images = answer.intervened, picture.images(VIT)
    with vitlens.intervene(VIT, intervene.changes_of(VIT, off)), torch.no_grad():
        logit = VIT(images)[0, VIT.classes.index(row.target)]
        weights = vitlens.attention(VIT, images)[2][0, 0, 5]
    assert row.logit_after == pytest.approx(float(logit), abs=1e-4)
    assert weights[1 + 9] == weights[1 + 10] == 0  # after CLS
    assert row.exact
    clean = intervene.measure_intervention(VIT, picture, intervene.Off(), SWITCHES)
    assert clean.intervened[0].logit_before == clean.intervened[0].logit_after == row.logit_before
    assert np.array_equal(clean.maps.before, clean.maps.after)
    assert not np.array_equal(answer.maps.before, answer.maps.after)
    # a click computes only what it changes
    explain = vitlens.explain
    calls = []
    monkeypatch.setattr(
        vitlens, "explain", lambda *args, **options: calls.append(1) or explain(*args, **options)
    )
    quick = intervene.measure_intervention(VIT, picture, off, SWITCHES, baseline=clean)
    assert len(calls) == 1
    assert quick.intervened == answer.intervened
    for name in ("before", "after"):
        assert np.array_equal(getattr(quick.maps, name), getattr(answer.maps, name))


def test_the_board_has_a_button_a_head_and_a_patch(picture):
    html = intervene.board_html(VIT, picture, SWITCHES, {(0, 1): "writes <a>"})
    assert (html.count("data-head="), html.count("data-patch=")) == (6 * 4, 8 * 8)
    assert 'title="L0.H1: writes &lt;a&gt;"' in html
    without = intervene.board_html(VIT, picture, intervene.Switches(((0, 0),), None, "windows"), {})
    assert "data-patch" not in without
    assert "windows." in without
    with pytest.raises(UnsupportedError):
        intervene.switches_of(CNN)


def test_heads_are_named_by_digits_where_the_model_knows_them_else_by_the_examples(tiny_vit):
    words = intervene.words_of(vitlens.load(str(tiny_vit)), ())
    assert words.keys() == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for word in words.values():
        assert "class" in word or "correlates" in word or "writes" in word
    other = ours()
    words = intervene.words_of(other, [picture_of((other,), seed=seed) for seed in range(8)])
    assert words
    for word in words.values():
        assert "attends" in word
        assert "class" not in word
    assert intervene.words_of(CNN, ()) == {}


@pytest.mark.parametrize("off", [OFF, intervene.Off()], ids=["some", "nothing"])
def test_what_intervene_shows_is_a_whole_report_folder(off, picture, tmp_path):
    renamed = replace(picture, name="[a](b) <i>m`$.png")
    with saved_figures():
        switched_off = {"heads": off.heads, "patches": off.patches}
        page = write(VIT, renamed, intervene.write_intervened, tmp_path, off=switched_off)
    out = folder_of(page)
    whole_folder(out, "demo")
    assert problems((out / "report.md").read_text(encoding="utf-8")) == []
    assert page_problems((out / "report.html").read_text(encoding="utf-8")) == []
    assert page.read_bytes() == (out / "report.html").read_bytes()
    record = read_folder(out)
    answer = intervene.measure_intervention(VIT, renamed, off, SWITCHES)
    assert (record.intervened, record.classes) == (answer.intervened, answer.classes)
    assert values_of(record.heads_off, "layer", "head") == list(off.heads)
    assert [(patch.row, patch.column, patch.key) for patch in record.patches_off] == (
        [(1, 1, 10), (1, 2, 11)] if off.patches else []
    )
    for name, values in vars(answer.maps).items():
        assert np.array_equal(getattr(record.maps, name), values)
    assert np.array_equal(record.maps.pixels, picture.pixels["vit-digits"].numpy())
    panels = shown(REPORT(record).first.picture.draw())
    assert [axes.get_title().split()[-1] for axes in panels] == ["image", "before", "after"]
    image, before, after = map(array, panels)
    side = len(image) // 8
    for patch_row in record.patches_off:
        assert (image[patch_row.row * side :, patch_row.column * side :][:side, :side] == 0.5).all()
    assert np.array_equal(before, after) == (off == intervene.Off())


def test_a_changed_prediction_is_the_title():
    off = intervene.Off(SWITCHES.heads, tuple(range(64)))
    with typed_flags():  # as in the demo's command: a map of zeros is drawn without a warning
        everything = intervene.measure_intervention(VIT, picture_of((VIT,)), off, SWITCHES)
    (row,) = everything.intervened
    assert row.predicted != row.target
    document = REPORT(everything)
    assert document.title.startswith(
        f"vit-digits predicts {row.predicted} without 24 heads and 64 patches"
    )
    assert "L1.H1 and 18 more and 64 patches" in document.first.answer[0].text


def test_examples_are_scenes_for_models_of_digits_and_photographs_for_others(tmp_path):
    scenes = examples((), (VIT, CNN))
    assert len(scenes) == 6
    assert scenes[0].pixels["vit-digits"].shape == (1, 3, 32, 32)
    Image.new("RGB", (2000, 1000), "teal").save(tmp_path / "wide.png")
    (tmp_path / "notes.png").write_text("no image")
    with quiet_pillow():
        photographs = examples((str(tmp_path),), (VIT,))
        assert values_of(photographs, "name") == ["wide.png"]
        (tmp_path / "wide.png").unlink()
        with pytest.raises(InputError, match="found none"):
            examples((str(tmp_path),), (VIT,))
