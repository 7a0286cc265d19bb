"""Accuracy by template: what the classifier of each template gets, paired with the ensemble of all."""

import pytest
import torch

import vitlens
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder
from vitlens.names import imagenet_classes
from vitlens.uncertainty import accuracy_difference, holm, mcnemar, wilson

TEMPLATES = ("a photo of the digit {}.", "{}", "a {} in the dark")
CLIP = "open-clip:tiny-clip@random"


@pytest.fixture(scope="module", autouse=True)
def registered():
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    from tests.kit.models.clip import registered

    registered()


def test_every_template_is_the_classifier_of_its_prompts(tmp_path):
    split, clip = vitlens.load_data("digits", limit=40), vitlens.load(CLIP)
    templates = [word for template in TEMPLATES for word in ("--clip-templates", template)]
    line = ["features", f"clip={CLIP}", "--data", "digits", "--limit", "40", "--bank", "10", "--k", "1", *templates]
    out = ["--no-probe", "--no-tsne", "--no-cache", "--device", "cpu", "--quiet", "--out", str(tmp_path / "out")]
    assert run([*line, *out]) == 0
    record, images = read_folder(tmp_path / "out"), vitlens.images(split, clip)
    asked = [TEMPLATES, *((template,) for template in TEMPLATES)]
    classifiers = [vitlens.zero_shot(clip, split.classes, templates=each) for each in asked]
    whole, *each = [(model(images).argmax(1) == split.labels).numpy() for model in classifiers]
    ensemble, *rows = record.templates
    assert [row.template for row in rows] == list(TEMPLATES)
    assert (ensemble.gain, ensemble.p) == (None, None)
    assert record.metric("zero_shot_accuracy/clip") == ensemble.accuracy
    groups, p = split.groups.numpy(), []
    for row, right in zip((ensemble, *rows), (whole, *each), strict=True):
        assert row.accuracy == wilson(int(right.sum()), 40)  # each of a source of its own
        if row is not ensemble:
            p.append(mcnemar(int((right & ~whole).sum()), int((whole & ~right).sum())))
            assert row.gain == accuracy_difference(right, whole, groups=groups, seed=0)
    assert [row.p for row in rows] == p
    assert [row.p_holm for row in rows] == holm(p)


def test_an_ensemble_is_the_mean_of_its_templates_and_names_are_said_as_one_says_them():
    clip, images = vitlens.load(CLIP), torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    one = vitlens.zero_shot(clip, ["hot_dog", "cat"], templates=["{}"])
    same = vitlens.zero_shot(clip, ["0", "1"], names=["hot dog", "cat"], templates=["{}", "{}"])
    torch.testing.assert_close(one(images), same(images))
    assert one.classes == ("hot_dog", "cat")
    several = vitlens.zero_shot(clip, ["hot_dog", "cat"], templates=["{}", "a drawing of a {}"])
    assert not torch.allclose(several(images), one(images))


def test_imagenets_names_are_unambiguous_in_prompts():
    """Two classes are called crane, two maillot: by names alone their logits would be equal."""
    clip, images = vitlens.load(CLIP), torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    logits = vitlens.zero_shot(clip, imagenet_classes(), templates=["{}"])(images)[0]
    assert len(logits.unique()) > 990
