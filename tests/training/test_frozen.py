"""Cached features are the head's inputs, and the head on them gives the model's logits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.lens.tiny import model_of
from tests.training.tiny import CLASSES, tiny_model
from vitlens.errors import UnsupportedError
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.rebuild import classifiers
from vitlens.processes import Processes
from vitlens.training.frozen import (
    HeadOnly,
    cached_features,
    delete_features,
    load_features,
    read_features,
    save_features,
)

ALONE = Processes(0, 1, torch.device("cpu"))
MADE = {
    "ours": tiny_model,
    "ours, distilled": lambda: untrained(
        "vit-mini", classes=CLASSES, overrides={"dim": 8, "depth": 1, "heads": 2, "distillation": True}
    ),
    "ours, mean of patches": lambda: untrained(
        "vit-mini", classes=CLASSES, overrides={"dim": 8, "depth": 1, "heads": 2, "pooling": "mean"}
    ),
    "resnet": lambda: untrained("resnet20", classes=CLASSES),
    "timm, distilled": lambda: load("timm:deit_tiny_distilled_patch16_224", random_weights=True, image_size=(32, 32)),
    "timm, a CNN": lambda: load("timm:resnet10t", random_weights=True, image_size=(32, 32)),
    "torchvision": lambda: load("torchvision:mobilenet_v3_small", random_weights=True),
}


@pytest.mark.parametrize("name", MADE)
def test_the_head_on_features_gives_the_models_logits(name: str) -> None:
    model = MADE[name]().eval()
    images = torch.rand(3, 3, *model.input_size)
    features = read_features(model, images)
    head = HeadOnly(model)
    assert features.shape[:2] == (3, len(classifiers(model)))
    with torch.no_grad():
        assert torch.allclose(head(features), model(images), atol=1e-5)
    assert {id(part) for part in head.parameters()} <= {id(part) for part in model.parameters()}


class Twice(nn.Module):
    """Logits that are doubled after the head, or a head that reads every patch."""

    def __init__(self, *, patches: bool) -> None:
        super().__init__()
        self.first, self.head, self.patches = nn.Conv2d(3, 4, 8, stride=8), nn.Linear(4, 5), patches

    def forward(self, images: Tensor) -> Tensor:
        maps = self.first(images).flatten(2).transpose(1, 2)  # (batch, patches, 4)
        return self.head(maps).mean(1) if self.patches else 2 * self.head(maps.mean(1))


@pytest.mark.parametrize(("patches", "match"), [(True, r"one vector per image, found \(2, 16, 4\)"), (False, "differ")])
def test_a_head_that_is_not_the_last_step_is_refused(patches: bool, match: str) -> None:
    model = model_of(Twice(patches=patches))
    with pytest.raises(UnsupportedError, match=f"{match}.*--train-last 1 in place of --freeze-backbone"):
        read_features(model, torch.rand(2, 3, 32, 32))
    assert not any(module._forward_pre_hooks for module in model.modules())


def made(model: Model, images: Tensor, processes: Processes = ALONE) -> Tensor:
    def shown(view: int, batches):
        for indices in batches:
            yield images[indices] / (1 + view)

    return cached_features(model, len(images), shown, processes, views=2, batch_size=4)


def test_every_image_in_every_view_in_order() -> None:
    model, images = tiny_model(), torch.rand(7, 3, 8, 12)
    features = made(model, images)
    assert features.shape == (2, 7, 1, 16)
    for view in range(2):
        assert torch.allclose(features[view], read_features(model, images / (1 + view)), atol=1e-6)


def test_features_are_saved_with_their_identity(tmp_path: Path) -> None:
    features = made(tiny_model(), torch.rand(5, 3, 8, 12))
    about = {"part": "train", "recipe": {"epochs": 3}}
    assert load_features(tmp_path, "train", about) is None
    save_features(tmp_path, "train", features, about)
    loaded = load_features(tmp_path, "train", about)
    assert loaded is not None
    assert torch.equal(loaded, features)
    assert load_features(tmp_path, "train", {**about, "part": "test"}) is None
    assert load_features(tmp_path, "test", about) is None
    (tmp_path / "features" / "train.safetensors").write_bytes(b"half a file")
    assert load_features(tmp_path, "train", about) is None
    delete_features(tmp_path)
    assert not list(tmp_path.iterdir())
    delete_features(tmp_path)
