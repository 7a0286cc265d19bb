"""vitlens.look: its parts are what the functions of their own give, and a head without effect has none."""

import pytest
import torch

import vitlens
from tests.kit.tiny import images, ours
from vitlens import Model


@pytest.fixture(scope="module")
def vit() -> Model:
    return ours()


def test_classes_and_maps_are_those_of_the_two_most_probable(vit):
    batch = images(vit.input_size, batch=3)
    seen, top = vitlens.look(vit, batch), vit(batch).softmax(-1).topk(5)
    assert torch.equal(seen.classes, top.indices)
    torch.testing.assert_close(seen.probabilities, top.values)
    assert seen.names == tuple(tuple(vit.classes[place] for place in row) for row in top.indices.tolist())
    for rank in (0, 1):
        expected = vitlens.explain(vit, batch, targets=top.indices[:, rank], method="best")
        torch.testing.assert_close(seen.maps[:, rank], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("count", "replaced"), [(1, "zero"), (3, "resample"), (8, "mean")])
def test_heads_are_ablated_as_ablate_does(vit, count, replaced):
    batch = images(vit.input_size, batch=count)
    seen = vitlens.look(vit, batch)
    assert (seen.replace, bool(seen.note)) == (replaced, replaced != "mean")
    expected = vitlens.ablate(vit, batch, "predicted", replace=replaced)
    for index, (layer, head) in enumerate(seen.places):
        assert seen.delta_loss[:, index].mean() == pytest.approx(float(expected.delta_loss[layer, head]), abs=1e-5)
    without = seen.probabilities[:, :1] * (-seen.delta_loss).exp()
    torch.testing.assert_close(seen.without, without, rtol=1e-4, atol=1e-6)


def test_the_heads_of_an_image_come_by_effect_and_are_those_of_an_intervention(vit):
    batch = images(vit.input_size, batch=1)
    seen = vitlens.look(vit, batch)
    effects = seen.heads(0, most=4)
    for each in effects:
        with vitlens.intervene(vit, {f"blocks.{each.layer}.head.{each.head}": "zero"}):
            share = float(vit(batch).softmax(-1)[0, seen.classes[0, 0]])
        assert each.probability == pytest.approx(share, abs=1e-5)
        assert each.given == seen.labels[each.layer][each.head] is not None
    rises = [each.delta_loss for each in effects]
    assert rises == sorted(rises, reverse=True)
    assert len(seen.heads(0)) == 3
    shown = seen.names[0][0], "too few for a mean", f"L{effects[0].layer}.H{effects[0].head}"
    assert all(part in repr(seen) for part in shown)


def test_a_head_whose_output_is_not_read_has_no_effect_and_a_cnn_has_no_heads():
    model = ours()
    projection = model.module.get_submodule("blocks.1.attn.proj")
    projection.weight.data[:, projection.in_features // 2 :] = 0.0  # the second of two heads
    seen = vitlens.look(model, images(model.input_size, batch=2))
    assert seen.delta_loss[:, seen.places.index((1, 1))].abs().max() < 1e-5
    assert seen.labels[1][1].label == "dead"
    of_cnn = vitlens.look(vitlens.load("cnn-digits"), torch.rand(2, 3, 32, 32))
    assert (of_cnn.method, of_cnn.places, of_cnn.heads(0), of_cnn.maps.shape) == ("gradcam", (), (), (2, 2, 8, 8))
