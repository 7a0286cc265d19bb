"""vitlens.look: its parts are what the functions of their own give, and a head without effect has none."""

from dataclasses import replace

import pytest
import torch

import vitlens
from tests.lens.tiny import images, ours
from vitlens.models.model import Model


@pytest.fixture(scope="module")
def vit() -> Model:
    return ours()


def test_classes_and_maps_are_those_of_the_two_most_probable(vit: Model) -> None:
    batch = images(vit.input_size, batch=3)
    seen = vitlens.look(vit, batch)
    top = vit(batch).softmax(-1).topk(5)
    assert torch.equal(seen.classes, top.indices)
    torch.testing.assert_close(seen.probabilities, top.values)
    assert seen.names == tuple(tuple(vit.classes[place] for place in row) for row in top.indices.tolist())
    for rank in (0, 1):
        expected = vitlens.explain(vit, batch, targets=top.indices[:, rank], method="best")
        torch.testing.assert_close(seen.maps[:, rank], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("count", "replaced"), [(1, "zero"), (3, "resample"), (8, "mean")])
def test_heads_are_ablated_as_ablate_does(vit: Model, count: int, replaced: str) -> None:
    batch = images(vit.input_size, batch=count)
    seen = vitlens.look(vit, batch)
    assert seen.replace == replaced
    assert bool(seen.note) == (replaced != "mean")
    expected = vitlens.ablate(vit, batch, "predicted", replace=replaced)
    for index, (layer, head) in enumerate(seen.places):
        assert seen.delta_loss[:, index].mean() == pytest.approx(float(expected.delta_loss[layer, head]), abs=1e-5)
    without = seen.probabilities[:, :1] * (-seen.delta_loss).exp()
    torch.testing.assert_close(seen.without, without, rtol=1e-4, atol=1e-6)


def test_a_head_is_what_the_whole_forward_pass_without_it_says(vit: Model) -> None:
    batch = images(vit.input_size, batch=1)
    seen = vitlens.look(vit, batch)
    for each in seen.heads(0, most=4):
        with vitlens.intervene(vit, {f"blocks.{each.layer}.head.{each.head}": "zero"}):
            share = float(vit(batch).softmax(-1)[0, seen.classes[0, 0]])
        assert each.probability == pytest.approx(share, abs=1e-5)
    rises = [each.delta_loss for each in seen.heads(0, most=4)]
    assert rises == sorted(rises, reverse=True)
    assert len(seen.heads(0)) == 3


def test_a_head_whose_output_is_not_read_has_no_effect() -> None:
    model = ours()
    projection = model.module.get_submodule("blocks.1.attn.proj")
    with torch.no_grad():
        projection.weight[:, projection.in_features // 2 :] = 0.0  # the second of two heads
    seen = vitlens.look(model, images(model.input_size, batch=2))
    dead = seen.places.index((1, 1))
    assert seen.delta_loss[:, dead].abs().max() < 1e-5
    labels = [one.label for one in seen.labels[1]]
    assert labels[1] == "dead"


def test_a_cnn_has_maps_and_no_heads() -> None:
    seen = vitlens.look(vitlens.load("cnn-digits"), torch.rand(2, 3, 32, 32))
    assert seen.method == "gradcam"
    assert seen.places == ()
    assert seen.heads(0) == ()
    assert seen.maps.shape == (2, 2, 8, 8)


def test_its_text_names_prediction_heads_and_the_remark(vit: Model) -> None:
    seen = vitlens.look(vit, images(vit.input_size, batch=1))
    text = repr(seen)
    assert seen.names[0][0] in text
    assert "too few for a mean" in text
    first = seen.heads(0)[0]
    assert f"L{first.layer}.H{first.head}" in text
    assert "note" in repr(replace(seen, note="another remark"))
