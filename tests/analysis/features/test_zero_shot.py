"""Accuracy by template: what a classifier made by hand gets, paired with the ensemble."""

import pytest
import torch
from torch.nn import functional as F

from vitlens.analysis.features.zero_shot import ENSEMBLE, chosen_templates, template_scores
from vitlens.errors import InputError
from vitlens.models.language_image import ensemble, prompt_names
from vitlens.names import imagenet_classes
from vitlens.uncertainty import holm, mcnemar


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_every_template_is_counted_by_hand():
    each, labels = unit(3, 4, 8), torch.arange(60) % 4
    images = 7 * (unit(60, 8, seed=1) + each[0][labels])
    found = template_scores(images, labels, each, ["a", "b", "c"])
    assert [one.template for one in found] == [ENSEMBLE, "a", "b", "c"]
    whole = F.normalize(torch.stack([each[:, index].sum(0) for index in range(4)]), dim=-1)
    right = [(images @ classes.T).argmax(1) == labels for classes in (whole, *each)]
    for score, expected in zip(found, right):
        assert score.accuracy.value == pytest.approx(expected.double().mean().item())
        assert score.accuracy.n == 60
    p = [mcnemar(int((one & ~right[0]).sum()), int((right[0] & ~one).sum())) for one in right[1:]]
    assert [one.p for one in found[1:]] == p
    assert [one.p_holm for one in found[1:]] == holm(p)
    gains = [100 * (one.double() - right[0].double()).mean().item() for one in right[1:]]
    assert [one.gain.value for one in found[1:]] == pytest.approx(gains)
    grouped = template_scores(images, labels, each, ["a", "b", "c"], groups=torch.arange(60) // 4)  # drawn together
    assert grouped[1].accuracy.value == found[1].accuracy.value
    assert grouped[1].accuracy.low != found[1].accuracy.low


def test_one_template_is_its_own_ensemble():
    each = unit(1, 3, 5)
    torch.testing.assert_close(ensemble(each), each[0])
    whole, alone = template_scores(unit(20, 5, seed=2), torch.arange(20) % 3, each, ["{}"])
    assert (whole.accuracy, alone.gain.value, alone.p) == (alone.accuracy, 0.0, 1.0)


def test_templates_by_name_and_as_typed_each_once():
    sets = {"photo": ("a photo of a {}.",), "simple": ("art of the {}.", "a photo of a {}.")}
    found = chosen_templates(["my {}", "simple", "photo", "my {}"], sets)
    assert found == ("my {}", "art of the {}.", "a photo of a {}.")
    with pytest.raises(InputError, match=r"one of photo, simple, found 'phto'"):
        chosen_templates(["phto"], sets)


def test_classes_as_one_says_them():
    assert prompt_names(("hot_dog", "cat ")) == ("hot dog", "cat")
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    found = prompt_names(imagenet_classes())
    assert len(set(found)) > 990
    assert found[0] == "tench"
