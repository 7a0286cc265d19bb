"""Each way to name a model, and each way in which it can fail: one line that says what to type."""

import hashlib

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

import vitlens
from tests.kit.models.files import small, written
from tests.kit.models.tiny import images
from vitlens.cli.main import run
from vitlens.errors import InputError, ModelError, UnknownNameError
from vitlens.names import PRESETS, imagenet_classes

TIMM_VIT = "timm:vit_tiny_patch16_224"
TEST_VIT = "timm:test_vit"  # of 0.4 million parameters, for 160 px


def vit_state(classes: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    module = vitlens.load("vit-micro@random", seed=3).module
    state = module.state_dict()
    return state | {"head.weight": torch.randn(classes, 128), "head.bias": torch.randn(classes)}


def timm_vit(*, classes: int = 1000, size: int = 160) -> torch.nn.Module:
    torch.manual_seed(5)
    return timm.create_model("test_vit", num_classes=classes, img_size=size).eval()


SLOW = [name for name in PRESETS if name.endswith("-224") or name[-2:] in ("18", "50")]


def test_random_weights_are_seeded_and_leave_the_callers_state_alone():
    state = torch.random.get_rng_state()
    a, b, c = (vitlens.load("vit-micro", random_weights=True, seed=seed)(images()) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("way", "alias", "ending"), [("arch", "w", "pth"), ("weights", "vit-micro", "safetensors"), ("at", "a", "pth")]
)
def test_weights_of_a_preset_from_a_file(tmp_path, way, alias, ending):
    state, path = vit_state(), tmp_path / f"w.{ending}"
    save_file(state, path) if ending == "safetensors" else torch.save({"state_dict": state}, path)
    model = {
        "arch": lambda: vitlens.load(str(path), arch="vit-micro"),
        "weights": lambda: vitlens.load("vit-micro", weights=path),
        "at": lambda: vitlens.load(f"a=vit-micro@{path}"),
    }[way]()
    loaded = model.module.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert torch.equal(model(images()), model.module((images() - 0.5) / 0.5))
    assert (model.alias, model.classes) == (alias, tuple("0123456"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (model.provenance.weights, model.provenance.sha256) == (path.name, digest)
    assert model.provenance.notes == (("took the weights from 'state_dict'",) if ending == "pth" else ())


def test_timm_with_random_weights_and_its_own_preprocessing():
    model = vitlens.load(TEST_VIT, random_weights=True, image_size=(32, 48))
    assert (model.layout.grid, model.classes) == ((2, 3), imagenet_classes())
    assert model(images((32, 48))).shape == (2, 1000)
    found = vitlens.load("timm:deit_tiny_patch16_224", random_weights=True).preprocessing
    assert (found.size, found.resize, found.interpolation) == ((224, 224), 248, "bicubic")
    assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("size", [None, 64])
def test_timm_weights_from_a_file(tmp_path, size):
    module = timm_vit(classes=5, size=size or 160)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    model = vitlens.load(TEST_VIT, weights=tmp_path / "w.safetensors", image_size=size)
    batch = images(model.input_size, batch=1)
    torch.testing.assert_close(model(batch), module(model.prepare(batch)), atol=1e-6, rtol=1e-5)
    assert (len(model.classes), model.provenance.notes) == (5, ())


def test_timm_positions_are_resized_as_timm_does_and_noted(tmp_path):
    module = timm_vit(classes=5)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    model = vitlens.load(f"{TEST_VIT}@{tmp_path / 'w.safetensors'}", image_size=(64, 96))
    expected = timm.layers.resample_abs_pos_embed(module.pos_embed, new_size=[4, 6], num_prefix_tokens=1)
    torch.testing.assert_close(model.module.pos_embed, expected)
    assert model.layout.grid == (4, 6)
    assert model.provenance.notes == ("resized 'pos_embed' from (1, 101, 64) to (1, 25, 64)",)


def test_torchvision_weights_from_a_file(tmp_path):
    module = torchvision.models.squeezenet1_1().eval()
    torch.save(module.state_dict(), tmp_path / "w.pth")
    model = vitlens.load("torchvision:squeezenet1_1", weights=tmp_path / "w.pth")
    batch = images((64, 64), batch=1)
    assert torch.equal(model(batch), module(model.prepare(batch)))
    transforms = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()
    assert (model.preprocessing.size, model.preprocessing.resize) == ((224, 224), transforms.resize_size[0])
    assert model.preprocessing.interpolation == transforms.interpolation.value
    small = vitlens.load("torchvision:squeezenet1_1", weights=tmp_path / "w.pth", image_size=64)
    assert (small.input_size, small.preprocessing.resize) == ((64, 64), None)


def test_told_preprocessing_classes_and_size():
    names, mean, std = tuple("abcdefghij"), (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)
    model = vitlens.load("vit-micro", random_weights=True, mean=mean, std=std, classes=names, image_size=16)
    assert (model.preprocessing.mean, model.preprocessing.std) == (mean, std)
    assert (model.classes, model.input_size) == (names, (16, 16))
    expected = (torch.zeros(1, 3, 16, 16) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(model.prepare(torch.zeros(1, 3, 16, 16)), expected)
    only = vitlens.load("vit-micro@random", mean=mean)
    assert (only.preprocessing.mean, only.preprocessing.std) == (mean, (0.5, 0.5, 0.5))


def test_a_headless_model_of_timm_gives_features():
    model = vitlens.load("timm:vit_tiny_patch16_dinov3_qkvb@random", image_size=32)
    assert (model.classes, model.has_classifier, model(images()).shape) == ((), False, (2, 192))
    with pytest.raises(InputError, match="--freeze-backbone"):
        vitlens.load("timm:vit_tiny_patch16_dinov3_qkvb@random", image_size=32, classes=("a", "b"))


# ---- what cannot

UNKNOWN = {  # and the suggestion
    "vit-tny@random": "'vit-tiny'",
    "vit-digit@random": "'vit-digits'",
    "timm:vit_tny_patch16_224@random": "'vit_tiny_patch16_224'",
    "timm:vit_tiny_patch16_224.nonsense@random": "did you mean",
    "timm:@random": "no timm model ''",
    "torchvision:vit_b_23@random": "'vit_b_32'",
    "torchvision:maskrcnn_resnet50_fpn@random": "torchvision",
}
WRONG = [  # names, options, and what the message says to type; FILE has a state dict, RUN is a run folder
    ("runs/none", {}, "vitlens models"),
    ("none.safetensors", {}, "none.safetensors"),
    ("timm:vit_tiny_patch16_224@none.safetensors", {}, "give --weights FILE"),
    ("vit-micro", {}, "vitlens train vit-micro"),
    (".", {}, "vitlens train"),
    ("TRANSFORMERS", {}, "hf:TRANSFORMERS"),
    ("FILE", {}, "--arch NAME"),
    ("FILE", {"arch": "vit-mikro"}, "'vit-micro'"),
    ("FILE", {"arch": "vit-digits"}, "'vit-digits', which has its own"),
    ("FILE", {"arch": "vit-micro", "random_weights": True}, "which has its own"),
    ("FILE", {"arch": "vit-micro", "weights": "other.pth"}, "which has its own"),
    ("FILE@random", {"arch": "vit-micro"}, "@random"),
    ("vit-micro", {"weights": "w.pth", "random_weights": True}, "either weights or --random-weights"),
    ("RUN", {"random_weights": True}, "which has its own"),
    ("vit-digits", {"weights": "w.pth"}, "which has its own"),
    ("vit-micro@random", {"classes": ("a", "b")}, "--classes"),
    ("vit-micro@random", {"image_size": (30, 32)}, "found 30 and 4 px"),
    ("vit-micro@random", {"image_size": 0}, "0"),
    ("torchvision:vit_b_32@random", {"image_size": (65, 65)}, "65x65 px"),
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_gives_the_nearest_ones(name):
    with pytest.raises(UnknownNameError) as caught:
        vitlens.load(name)
    assert UNKNOWN[name] in str(caught.value)


@pytest.mark.parametrize(("name", "options", "words"), WRONG, ids=[f"{name} {told}" for name, told, _ in WRONG])
def test_what_cannot_be_loaded_is_one_line(tmp_path, monkeypatch, name, options, words):
    monkeypatch.chdir(tmp_path)
    save_file({"head.weight": torch.zeros(7, 128)}, "w.safetensors")
    written(small(), tmp_path / "run")
    (tmp_path / "TRANSFORMERS").mkdir()
    (tmp_path / "TRANSFORMERS" / "preprocessor_config.json").write_text("{}")
    with pytest.raises(InputError) as caught:
        vitlens.load(name.replace("FILE", "w.safetensors").replace("RUN", "run"), **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_folder_that_also_holds_a_processor_is_a_run_folder(tmp_path):
    written(small(), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert vitlens.load(str(tmp_path)).classes == ("cat", "dog", "newt")


@pytest.mark.parametrize(
    "line", ["train resnet20 --data digits --depth 3", "train vit-mikro --data digits", "train vit-micro --dim 3"]
)
def test_shapes_that_a_preset_does_not_have_are_refused(line, capsys):
    assert run([*line.split(), "--quiet"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


MISFITS = {
    "vit-micro": (vit_state, "cls_token"),
    TEST_VIT: (lambda: timm_vit().state_dict(), "blocks.0.attn.qkv.weight"),
    "torchvision:squeezenet1_1": (lambda: torchvision.models.squeezenet1_1().state_dict(), "features.0.weight"),
    "resnet20": (lambda: vitlens.load("resnet20@random").module.state_dict(), "conv1.weight"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_dict_that_does_not_fit_names_the_first_keys(tmp_path, name):
    make, lost = MISFITS[name]
    state = {key: value.clone() for key, value in make().items() if key != lost}
    torch.save(state | {"zz.first": torch.zeros(1), "zz.second": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(ModelError) as caught:
        vitlens.load(name, weights=tmp_path / "w.pth")
    assert "\n" not in str(caught.value)
    assert f"1 missing (first '{lost}')" in str(caught.value)
    assert "2 unexpected (first 'zz.first')" in str(caught.value)


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.zeros(0, 16), torch.zeros(16, 10, 1)])
@pytest.mark.parametrize("key", ["head.weight", "pos_embed"])
def test_misshapen_tensors_for_timm(tmp_path, key, value):
    torch.save(timm_vit().state_dict() | {key: value}, tmp_path / "w.pth")
    with pytest.raises(ModelError) as caught:
        vitlens.load(TEST_VIT, weights=tmp_path / "w.pth")
    assert "\n" not in str(caught.value)
