import pytest
import torch
from torch import nn

from vitlens.analysis.failures.compare import ShapeBias, require_cues, shape_bias
from vitlens.data.cue_conflict import cues_of
from vitlens.data.digits import digits
from vitlens.data.shapes import CLASSES, shapes
from vitlens.data.split import Split
from vitlens.errors import DataError
from vitlens.models.model import Provenance
from vitlens.models.rebuild import Architecture, assemble
from vitlens.preprocessing import Preprocessing


class Knowing(nn.Module):
    """A classifier that looks its answers up: images are told apart by their first pixels."""

    def __init__(self, pixels: torch.Tensor, answers: torch.Tensor) -> None:
        super().__init__()
        self.known = {tuple(image.flatten()[:64].tolist()): answer for image, answer in zip(pixels, answers.tolist())}
        self.unused = nn.Conv2d(1, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raw = (images * 255).round().to(torch.uint8)
        answers = torch.tensor([self.known[tuple(image.flatten()[:64].tolist())] for image in raw])
        return torch.nn.functional.one_hot(answers, len(CLASSES)).float()


def bias_of(answers: torch.Tensor, split: Split) -> ShapeBias:
    """The shape bias of a model with these answers."""
    plain = Preprocessing((32, 32), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    made = Architecture("timm", "knowing"), plain, CLASSES, "knowing", Provenance("knowing", "random")
    return shape_bias(assemble(Knowing(split.source.read(torch.arange(len(split))), answers), *made), split)


def test_a_classifier_of_shapes_has_one_and_of_textures_none():
    split = shapes("test", cue="conflict", per_class=7)
    cues = cues_of(split)
    for answers, expected in ((cues.shape, 1.0), (cues.texture, 0.0)):
        found = bias_of(answers, split)
        assert found.bias.value == expected
        assert found.bias.n == 56
        assert found.bias.low <= expected <= found.bias.high
        assert (found.shape.value, found.texture.value) == (expected, 1 - expected)
        assert [one.shape for one in found.by_class] == [7 * int(expected)] * 8


def test_answers_that_are_neither_are_left_out():
    split = shapes("test", cue="conflict", per_class=7)
    cues = cues_of(split)
    neither = (cues.shape + 1 + (cues.texture == (cues.shape + 1) % 8).long()) % 8
    assert ((neither != cues.shape) & (neither != cues.texture)).all()
    predictions = neither.clone()
    predictions[:3] = cues.shape[:3]
    predictions[3:4] = cues.texture[3:4]
    found = bias_of(predictions, split)
    assert (found.bias.value, found.bias.n) == (0.75, 4)
    assert found.shape.value == 3 / 56
    assert bias_of(neither, split).bias is None


def test_images_that_agree_say_nothing():
    split = shapes("test", per_class=2)
    with pytest.raises(DataError, match=r"named shapeN-textureM .* try --data shapes-conflict"):
        require_cues(split)
    with pytest.raises(DataError, match="found others in digits"):
        require_cues(digits("test").limit(4))
