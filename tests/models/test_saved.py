"""A model written to a file and read again is the same model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.lens.tiny import images
from vitlens.errors import ModelError, StorageError
from vitlens.files import sha256
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.saved import WEIGHTS_FILE, save

CLASSES = ("cat", "dog", "newt")
OVERRIDES = {"dim": 16, "depth": 2, "heads": 2, "registers": 2, "patch_size": [8, 16]}


def small(name: str = "vit-micro", *, seed: int = 1) -> Model:
    if name.startswith("vit"):
        return untrained(name, classes=CLASSES, image_size=(32, 48), overrides=OVERRIDES, seed=seed).eval()
    return untrained(name, classes=CLASSES, image_size=(32, 32), seed=seed).eval()


def save_in(model: Model, folder: Path, *, half: bool = False) -> Path:
    save(model, folder / WEIGHTS_FILE, half=half)
    return folder


@pytest.mark.parametrize("name", ["vit-micro", "resnet20"])
def test_equal_logits_and_everything_known_of_it(tmp_path, name):
    model = small(name)
    if name == "resnet20":  # running statistics are part of it
        model.train()(images())
        model.eval()
    loaded = load(str(save_in(model, tmp_path / "run")))
    batch = images(model.input_size)
    assert torch.equal(loaded(batch), model(batch))
    assert loaded.classes == CLASSES
    assert loaded.preprocessing == model.preprocessing
    assert loaded.anatomy == model.anatomy
    assert loaded.architecture == json.loads(json.dumps(loaded.architecture)) | {"image_size": model.input_size}
    assert loaded.alias == "run"
    assert loaded.provenance.weights == WEIGHTS_FILE
    assert loaded.provenance.sha256 == sha256(tmp_path / "run" / WEIGHTS_FILE)
    assert set(loaded.provenance.versions) == {"vitlens", "torch", "torchvision", "timm"}


def test_the_file_itself_is_a_name_too(tmp_path):
    model = small()
    loaded = load(str(save_in(model, tmp_path) / WEIGHTS_FILE))
    assert torch.equal(loaded(images((32, 48))), model(images((32, 48))))
    assert loaded.alias == "model"


def test_half_precision_is_half_the_size_and_nearly_the_same(tmp_path):
    model = small()
    save_in(model, tmp_path / "full")
    loaded = load(str(save_in(model, tmp_path / "half", half=True)))
    state = load_file(tmp_path / "half" / WEIGHTS_FILE)
    assert {value.dtype for value in state.values()} == {torch.float16}
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    for key, value in model.module.state_dict().items():
        torch.testing.assert_close(state[key].float(), value, atol=1e-7, rtol=2**-11)  # rounded to 11 bits
    torch.testing.assert_close(loaded(images((32, 48))), model(images((32, 48))), atol=5e-3, rtol=0)


def test_half_precision_leaves_counters_whole(tmp_path):
    model = small("resnet20")
    loaded = load(str(save_in(model, tmp_path, half=True)))
    torch.testing.assert_close(loaded(images()), model(images()), atol=2e-2, rtol=0)
    assert loaded.module.state_dict().keys() == model.module.state_dict().keys()


def test_other_weights_than_its_own(tmp_path):
    first, second = small(), small(seed=2)
    save(first, tmp_path / WEIGHTS_FILE, state=second.module.state_dict())
    assert torch.equal(load(str(tmp_path))(images((32, 48))), second(images((32, 48))))


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "torchvision:resnet18"])
def test_a_library_model_comes_back(tmp_path, name):
    size = (32, 32)
    model = load(name, random_weights=True, image_size=size)
    loaded = load(str(save_in(model, tmp_path)))
    assert torch.equal(loaded(images(size)), model(images(size)))
    assert loaded.anatomy == model.anatomy
    assert loaded.preprocessing == model.preprocessing


def test_another_image_size(tmp_path):
    loaded = load(str(save_in(small(), tmp_path)), image_size=(64, 32))
    assert loaded.input_size == (64, 32)
    assert loaded.layout.grid == (8, 2)
    assert loaded(images((64, 32))).shape == (2, 3)


def test_a_library_model_at_another_size(tmp_path):
    save_in(load("timm:vit_tiny_patch16_224", random_weights=True, image_size=(32, 32)), tmp_path)
    loaded = load(str(tmp_path), image_size=(48, 64))
    assert loaded.layout.grid == (3, 4)
    assert torch.isfinite(loaded(images((48, 64)))).all()


def test_saving_again_gives_the_same_bytes(tmp_path):
    save_in(small(), tmp_path / "a")
    save_in(load(str(tmp_path / "a")), tmp_path / "b")
    first, second = ((tmp_path / part / WEIGHTS_FILE).read_bytes() for part in "ab")
    assert first == second


def test_a_file_that_is_replaced_is_replaced_whole(tmp_path, monkeypatch):
    model = small()
    save_in(model, tmp_path)
    before = (tmp_path / WEIGHTS_FILE).read_bytes()

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match="found it full"):
        save_in(small(seed=2), tmp_path)
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS_FILE]


def rewritten(folder: Path, change: dict[str, object] | str, *, drop: str | None = None) -> None:
    """The file with its description changed, or a tensor left out."""
    path = folder / WEIGHTS_FILE
    with safe_open(str(path), framework="pt") as file:
        about = json.loads(file.metadata()["vitlens"])
    state = {key: value for key, value in load_file(path).items() if key != drop}
    text = change if isinstance(change, str) else json.dumps(about | change)
    save_file(state, path, metadata={"vitlens": text})


@pytest.mark.parametrize(
    "change",
    [
        "no json",
        "[]",
        {"architecture": {"kind": "preset"}},
        {"architecture": {"kind": "pickle", "name": "x"}},
        {"architecture": {"kind": "preset", "name": "vit-none"}},
        {"classes": 3},
    ],
)
def test_a_description_that_makes_no_sense_is_refused(tmp_path, change):
    rewritten(save_in(small(), tmp_path), change)
    with pytest.raises(ModelError, match="expected") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named(tmp_path):
    rewritten(save_in(small(), tmp_path), {}, drop="blocks.1.attn.qkv.weight")
    with pytest.raises(ModelError, match=r"1 missing \(first 'blocks.1.attn.qkv.weight'\)"):
        load(str(tmp_path))


def test_loading_leaves_the_callers_random_state_alone(tmp_path):
    save_in(small(), tmp_path)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    load(str(tmp_path))
    assert torch.equal(torch.rand(3), expected)


def test_preprocessing_that_was_told_is_kept(tmp_path):
    model = small()
    told = load(str(save_in(model, tmp_path / "a")), mean=(0.1, 0.2, 0.3), std=(0.3, 0.2, 0.1), classes=("x", "y", "z"))
    again = load(str(save_in(told, tmp_path / "b")))
    assert again.preprocessing == replace(model.preprocessing, mean=(0.1, 0.2, 0.3), std=(0.3, 0.2, 0.1))
    assert again.classes == ("x", "y", "z")
