"""What the tabs show, without a browser and without gradio: the numbers are those of the public functions."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.forms import picture_of
from tests.kit.nasty import problems
from tests.kit.pages import page_problems
from tests.kit.saving import saved_figures
from tests.kit.whole_folder import whole_folder
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.cli.main import run
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.maps.record import judged_maps
from vitlens.demo.badges import Badges, found_badges
from vitlens.demo.limits import PASSES
from vitlens.demo.markup import Card, cards, classes_table, sentence
from vitlens.demo.pictures import examples, of_example
from vitlens.demo.pool import Pool, pool_of
from vitlens.demo.report import REPORT
from vitlens.demo.site import Export
from vitlens.demo.tabs import attack, explain, intervene, look, space
from vitlens.demo.tabs.report import exported
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.model import Model

VIT, CNN = vitlens.load("vit-digits"), vitlens.load("cnn-digits")
POOL = Pool((VIT, CNN))


@pytest.fixture(scope="module")
def picture():
    return picture_of((VIT, CNN), seed=3)


def test_look_gives_the_probabilities_and_the_map_of_the_public_functions(picture):
    looked = look.look_at(VIT, picture)
    images = picture.images(VIT)
    shares = VIT(images).softmax(-1)[0]
    assert [name for name, _ in looked.classes] == [VIT.classes[index] for index in shares.topk(5).indices]
    assert [share for _, share in looked.classes] == pytest.approx(shares.topk(5).values.tolist())
    wanted = vitlens.explain(VIT, images, method="best")[0].numpy()
    assert np.array_equal(looked.values, wanted)
    assert "<!doctype html>" in looked.explorer
    assert looked.reason == ""


def test_look_at_a_cnn_says_why_there_is_no_explorer(picture):
    looked = look.look_at(CNN, picture)
    assert looked.explorer == ""
    assert "cnn-digits" in looked.reason
    _, below = look.look_html(looked, CNN, picture)
    assert "no attention explorer" in below


@pytest.mark.parametrize("model", [VIT, CNN], ids=lambda model: model.alias)
def test_only_methods_that_are_quick_are_offered(model):
    offered = explain.offered_methods(model)
    assert offered
    assert all(ATTRIBUTIONS[name].forwards + ATTRIBUTIONS[name].backwards <= PASSES for name in offered)


def test_two_sides_explain_the_class_that_was_typed(picture):
    side = explain.explained(VIT, picture, "gradcam", "7")
    wanted = vitlens.explain(VIT, picture.images(VIT), targets=7, method="gradcam")[0].numpy()
    assert np.array_equal(side.values, wanted)
    assert side.target == "7"
    assert explain.explained(VIT, picture, "rollout", "").target == "every class"
    with pytest.raises(UnknownNameError, match="no class 'zebra'"):
        explain.explained(VIT, picture, "gradcam", "zebra")
    with pytest.raises(UnsupportedError):
        explain.explained(CNN, picture, "rollout", "")


def test_a_second_model_without_the_class_explains_its_own_prediction_and_says_so(picture):
    other = Model(
        VIT.module,
        alias="letters",
        anatomy=VIT.anatomy,
        preprocessing=VIT.preprocessing,
        classes=tuple("abcdefghij"),
        provenance=VIT.provenance,
        architecture=VIT.architecture,
    )
    shown = replace(picture, pixels={**picture.pixels, "letters": picture.pixels["vit-digits"]})
    left, right = explain.both_explained((CNN, other), shown, ("gradcam", "relevance"), "8")
    assert (left.target, left.lacks) == ("8", "")
    assert (right.target, right.lacks) == (other.classes[int(VIT(picture.images(VIT)).argmax())], "8")
    assert "as it has no class" in explain.sides_html(((left, CNN), (right, other)), shown, Badges(), 0.5)
    with pytest.raises(UnknownNameError, match="no class 'a'"):
        explain.both_explained((CNN, other), shown, ("gradcam", "relevance"), "a")
    with pytest.raises(UnsupportedError):
        explain.both_explained((other, CNN), shown, ("gradcam", "rollout"), "a")


def test_the_badge_is_the_verdict_of_the_league_on_these_weights(picture, tmp_path):
    brief = "--no-counterfactuals --no-stability --composites none --other-substrates none --method saliency --quiet"
    line = ["explain", "vit-digits", "--limit", "12", "--verify", *brief.split(), "--out", str(tmp_path / "league")]
    assert run(line) == 0
    badges = found_badges(tmp_path, (VIT, CNN))
    (judged,) = judged_maps(read_folder(tmp_path / "league").checks)
    assert badges.of(VIT, "saliency").state == judged.state != "pass"
    assert "12 images" in badges.of(VIT, "saliency").words
    assert judged.lacks in badges.of(VIT, "saliency").words
    assert badges.of(CNN, "saliency").state == "not tested"
    other = vitlens.load("vit-digits@random")
    assert badges.of(other, "saliency").state == "not tested"
    assert found_badges(Path("no such folder"), (VIT,)) == Badges()


def test_a_folder_that_is_no_league_is_passed_over(tmp_path):
    for name, text in (("a", "{"), ("b", "[]"), ("c", json.dumps({"command": "explain", "options": {"verify": True}}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    assert found_badges(tmp_path, (VIT,)) == Badges()


def test_an_attack_stays_within_epsilon_and_its_shares_are_the_models(picture):
    found = attack.broken(VIT, picture, "pgd", 16.0)
    assert found.success
    assert found.largest <= 16.001
    for pixels, which in ((found.clean, "probability_before"), (found.adversarial, "probability_after")):
        shares = VIT(torch.from_numpy(pixels).float()[None]).softmax(-1)[0]
        for row in found.classes:
            assert getattr(row, which) == pytest.approx(float(shares[VIT.classes.index(row.name)]), abs=1e-5)
    assert "perturbation ×" in attack.broken_html(found)


def test_an_attack_that_finds_nothing_says_so(picture):
    found = attack.broken(CNN, picture, "fgsm", 0.0)
    assert not found.success
    assert found.largest == 0.0
    assert "finds no picture" in attack.broken_html(found)


@pytest.mark.parametrize("epsilon", [-1.0, 17.0, math.nan])
def test_an_epsilon_out_of_range_is_refused(epsilon, picture):
    with pytest.raises(InputError, match="from 0 to 16"):
        attack.broken(VIT, picture, "pgd", epsilon)


def test_an_attack_that_takes_long_is_refused(picture, tmp_path):
    with pytest.raises(UnknownNameError, match=r"no attack on this page 'auto'.*pgd"):
        attack.broken(VIT, picture, "auto", 4.0)
    with pytest.raises(UnknownNameError, match="no attack on this page 'auto'"):
        exported(write(attack.write_attack, attack="auto", epsilon=4.0), (VIT,), picture, tmp_path, name="mine")


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
    assert "No patches of vit-digits can be switched off: windows." in without


def test_the_strongest_points_are_kept(picture):
    record = space.space_of(VIT, picture)
    (row,), whole = record.space, record.points
    assert len(whole.share) == row.points == row.shown == 6 * 4 * 64
    weights = vitlens.attention(VIT, picture.images(VIT), rows="cls")
    at = (whole.layer == 3) & (whole.head == 1)
    assert np.allclose(whole.share[at], 64 * weights[3][0, 1, 0, 1:].numpy(), atol=1e-5)
    assert [each.share for each in record.strongest] == pytest.approx(np.sort(whole.share)[:-9:-1], rel=1e-6)
    few = space.space_of(VIT, picture, most=100)
    assert few.space[0].shown == len(few.points.share) == 100
    assert few.points.share.min() >= np.sort(whole.share)[-100]
    assert len(space.space_of(VIT, picture, share=0.25).points.share) == 384
    assert "the 100 strongest" in space.space_html(few)
    with pytest.raises(InputError):
        space.space_of(VIT, picture, share=0.0)


def write(function, **options) -> Export:
    return Export((), partial(function, **options))


def test_a_report_is_that_of_the_command_and_names_no_folder_of_this_machine(picture, tmp_path):
    export = write(explain.write_explain, methods=("relevance", "gradcam"), target="3")
    files = exported(export, (VIT, CNN), picture, tmp_path, name="mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "mine.zip"]
    assert (
        files.command
        == "vitlens explain vit-digits cnn-digits --images scene.png --method relevance,gradcam --target 3"
    )
    assert str(tmp_path) not in files.page.read_text()


OFF = intervene.Off(((0, 2), (3, 1)), (9, 10))
OWN = {
    "intervene": write(intervene.write_intervened, off=OFF),
    "nothing": write(intervene.write_intervened, off=intervene.Off()),
    "space": write(space.write_space, share=0.25),
}


@pytest.mark.parametrize("word", OWN)
def test_what_intervene_and_3d_show_is_a_whole_report_folder(word, picture, tmp_path):
    named = replace(picture, name="[a](b) <i>m`$.png")
    with saved_figures():
        files = exported(OWN[word], (VIT,), named, tmp_path, name=word)
    shutil.unpack_archive(files.archive, tmp_path)
    out = tmp_path / word
    whole_folder(out, "demo")
    assert problems((out / "report.md").read_text(encoding="utf-8")) == []
    assert page_problems((out / "report.html").read_text(encoding="utf-8")) == []
    assert files.page.read_bytes() == (out / "report.html").read_bytes()
    record = read_folder(out)
    if word == "space":
        shown = space.space_of(VIT, named, share=0.25)
        assert (record.space, record.strongest) == (shown.space, shown.strongest)
        assert all(np.array_equal(*pair) for pair in zip(*map(vars_of, (record.points, shown.points))))
        return
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


def test_heads_that_a_model_lacks_are_not_exported(picture, tmp_path):
    export = write(intervene.write_intervened, off=intervene.Off(((6, 0),)))
    with pytest.raises(InputError, match=r"of this model \(6 layers of at most 4 heads, 8x8 patches\), found head"):
        exported(export, (VIT,), picture, tmp_path, name="mine")


def test_names_are_escaped_everywhere(picture):
    bad = '<img src=x onerror="alert(1)">'
    named = replace(picture, name=bad)
    html = [
        str(sentence(bad)),
        str(classes_table([(bad, 0.5)], bad)),
        str(cards([Card(np.zeros((4, 4, 3)), bad, bad, bad)])),
        look.look_html(look.look_at(CNN, named), CNN, named)[0],
    ]
    assert not [text for text in html if "<img src=x" in text]


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
        pool_of([headless])


def test_examples_are_scenes_for_models_of_digits_and_photographs_for_others(tmp_path):
    shown = examples((), (VIT,), options=RunOptions())
    assert len(shown) == 6
    assert of_example(shown[0], (VIT, CNN)).pixels["vit-digits"].shape == (1, 3, 32, 32)
    Image.new("RGB", (2000, 1000), "teal").save(tmp_path / "wide.png")
    (tmp_path / "notes.png").write_text("no image")
    given = examples((str(tmp_path),), (VIT,), options=RunOptions())
    assert [each.name for each in given] == ["wide.png"]
    assert max(given[0].image.size) <= 1344
    (tmp_path / "wide.png").unlink()
    with pytest.raises(InputError, match="found none"):
        examples((str(tmp_path),), (VIT,), options=RunOptions())


def test_the_map_that_answers_a_click_is_a_quick_one():
    assert (intervene.live_method(VIT), intervene.live_method(CNN)) == ("relevance", "gradcam")
