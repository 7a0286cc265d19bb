"""Each way to name a model, and each way in which it can fail: one line that says what to type."""

import time
from contextlib import suppress
from dataclasses import replace

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from tests.lens.tiny import images
from vitlens.errors import InputError, ModelError
from vitlens.files import sha256
from vitlens.models.configs import VIT_PRESETS
from vitlens.models.loading import load, untrained
from vitlens.models.naming import parse_model, parse_models
from vitlens.models.resnet import build_resnet
from vitlens.models.saved import save
from vitlens.models.sources import hub
from vitlens.models.vit import VisionTransformer
from vitlens.names import PRESETS, imagenet_classes

TIMM_VIT = "timm:vit_tiny_patch16_224"


def vit_state(*, classes: int = 7, seed: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return VisionTransformer(replace(VIT_PRESETS["vit-micro"], classes=classes)).state_dict()


def timm_vit(*, classes: int = 1000, size: int = 224) -> torch.nn.Module:
    torch.manual_seed(5)
    return timm.create_model("vit_tiny_patch16_224", num_classes=classes, img_size=size).eval()


# ---- what can be loaded


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow,) if name.endswith("-224") or name[-2:] in ("18", "50") else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in PRESETS])
def test_a_preset_with_random_weights(name):
    model = load(name, random_weights=True)
    assert model(images(model.input_size)).shape == (2, 1000 if name.endswith("-224") else 10)
    assert (model.provenance.weights, model.alias, model.training) == ("random", name, False)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_random_weights_are_seeded_and_leave_the_callers_state_alone():
    batch = images()
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    a, b, c = (load("vit-micro", random_weights=True, seed=seed)(batch) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("way", "alias", "ending"), [("arch", "w", "pth"), ("weights", "vit-micro", "safetensors"), ("at", "a", "pth")]
)
def test_weights_of_a_preset_from_a_file(tmp_path, way, alias, ending):
    state, path = vit_state(), tmp_path / f"w.{ending}"
    save_file(state, path) if ending == "safetensors" else torch.save({"state_dict": state}, path)
    model = {
        "arch": lambda: load(str(path), arch="vit-micro"),
        "weights": lambda: load("vit-micro", weights=path),
        "at": lambda: load(f"a=vit-micro@{path}"),
    }[way]()
    module = VisionTransformer(replace(VIT_PRESETS["vit-micro"], classes=7)).eval()
    module.load_state_dict(state)
    assert torch.equal(model(images()), module((images() - 0.5) / 0.5))
    assert (model.alias, model.classes) == (alias, tuple("0123456"))
    assert (model.provenance.weights, model.provenance.sha256) == (path.name, sha256(path))
    assert model.provenance.notes == (("took the weights from 'state_dict'",) if ending == "pth" else ())


def test_timm_with_random_weights_and_its_own_preprocessing():
    model = load(TIMM_VIT, random_weights=True, image_size=(32, 48))
    assert (model.layout.grid, model.classes) == ((2, 3), imagenet_classes())
    assert model(images((32, 48))).shape == (2, 1000)
    found = load("timm:deit_tiny_patch16_224", random_weights=True).preprocessing
    assert (found.size, found.resize, found.interpolation) == ((224, 224), 248, "bicubic")
    assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("size", [224, 64])
def test_timm_weights_from_a_file(tmp_path, size):
    module = timm_vit(classes=5, size=size)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    model = load(TIMM_VIT, weights=tmp_path / "w.safetensors", image_size=None if size == 224 else (size, size))
    batch = images((size, size), batch=1)
    torch.testing.assert_close(model(batch), module((batch - 0.5) / 0.5), atol=1e-6, rtol=1e-5)
    assert len(model.classes) == 5
    assert model.provenance.notes == ()


def test_timm_positions_are_resized_as_timm_does_and_noted(tmp_path):
    module = timm_vit(classes=5)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    model = load(f"{TIMM_VIT}@{tmp_path / 'w.safetensors'}", image_size=(64, 96))
    expected = timm.layers.resample_abs_pos_embed(module.pos_embed, new_size=[4, 6], num_prefix_tokens=1)
    torch.testing.assert_close(model.module.pos_embed, expected)
    assert model.layout.grid == (4, 6)
    assert model.provenance.notes == ("resized 'pos_embed' from (1, 197, 192) to (1, 25, 192)",)


@pytest.mark.parametrize("name", ["resnet18", "swin_t", pytest.param("vit_b_32", marks=pytest.mark.slow)])
def test_torchvision_with_random_weights(name):
    model = load(f"torchvision:{name}", random_weights=True, image_size=(32, 32))
    assert model(images()).shape == (2, 1000)
    assert model.anatomy.family == {"resnet18": "cnn", "swin_t": "windowed", "vit_b_32": "vit"}[name]


def test_torchvision_weights_from_a_file(tmp_path):
    torch.manual_seed(0)
    module = torchvision.models.resnet18().eval()
    torch.save(module.state_dict(), tmp_path / "w.pth")
    model = load("torchvision:resnet18", weights=tmp_path / "w.pth")
    batch = images((64, 64), batch=1)
    assert torch.equal(model(batch), module(model.prepare(batch)))
    transforms = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    assert (model.preprocessing.size, model.preprocessing.resize) == ((224, 224), transforms.resize_size[0])


def test_told_preprocessing_classes_and_size():
    names = tuple("abcdefghij")
    told = {"mean": (0.1, 0.2, 0.3), "std": (1.0, 2.0, 3.0), "classes": names, "image_size": 16}
    model = load("vit-micro", random_weights=True, **told)
    assert (model.preprocessing.mean, model.preprocessing.std) == (told["mean"], told["std"])
    assert model.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert model.std.flatten().tolist() == [1, 2, 3]
    assert (model.classes, model.input_size) == (names, (16, 16))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_name_that_was_parsed_is_taken_as_it_is():
    (named, other) = parse_models(["vit-digits", "vit-digits"])
    assert [load(one).alias for one in (named, other)] == ["vit-digits", "vit-digits-2"]
    assert load(parse_model("a=vit-micro@random")).provenance.weights == "random"


def test_untrained_can_be_trained():
    model = untrained("vit-micro", classes=("a", "b"), image_size=(16, 24), overrides={"depth": 2, "dim": 16})
    assert model.layout.grid == (4, 6)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert len(model.module.blocks) == 2
    assert model.architecture["image_size"] == (16, 24)


# ---- what cannot

UNKNOWN = {
    "vit-tny@random": "no model 'vit-tny'; did you mean 'vit-tiny'",
    "vit-digit@random": "did you mean 'vit-digits'",
    "timm:vit_tny_patch16_224@random": "no timm model 'vit_tny_patch16_224'; did you mean 'vit_tiny_patch16_224'",
    "timm:vit_tiny_patch16_224.nonsense@random": "no timm model 'vit_tiny_patch16_224.nonsense'; did you mean",
    "timm:@random": "no timm model ''",
    "torchvision:vit_b_23@random": "no torchvision model 'vit_b_23'; did you mean 'vit_b_32'",
    "torchvision:maskrcnn_resnet50_fpn@random": "no torchvision model",
    "runs/none": "nothing at runs/none; see vitlens models",
    "none.safetensors": "expected a weights file, found nothing at none.safetensors",
    "timm:vit_tiny_patch16_224@none.safetensors": "found nothing at none.safetensors; give --weights FILE",
    "vit-micro": "train one first: vitlens train vit-micro --data digits",
    ".": "expected a run folder with model.safetensors, found none in .",
}
WRONG = [  # names, options, message; FILE has a state dict, RUN is a run folder
    ("FILE", {}, "give --arch NAME"),
    ("FILE", {"arch": "vit-mikro"}, "no model 'vit-mikro'; did you mean 'vit-micro'"),
    ("FILE", {"arch": "vit-digits"}, "found 'vit-digits', which has its own"),
    ("FILE", {"arch": "vit-micro", "random_weights": True}, "which has its own"),
    ("FILE", {"arch": "vit-micro", "weights": "other.pth"}, "which has its own"),
    ("FILE@random", {"arch": "vit-micro"}, "expected an architecture for the weights"),
    ("vit-micro", {"weights": "w.pth", "random_weights": True}, "either weights or --random-weights"),
    ("RUN", {"random_weights": True}, "which has its own"),
    ("vit-digits", {"weights": "w.pth"}, "which has its own"),
    (
        "vit-micro@random",
        {"classes": ("a", "b")},
        "expected 10 class names for vit-micro-random, found 2",
    ),
    ("vit-micro@random", {"image_size": (30, 32)}, "divisible by the patch's, found 30 and 4 px"),
    ("torchvision:vit_b_32@random", {"image_size": (65, 65)}, "65x65 px to run"),
    *((name, {}, message) for name, message in UNKNOWN.items()),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG, ids=[f"{name} {told}" for name, told, _ in WRONG])
def test_what_cannot_be_loaded_is_one_line(tmp_path, monkeypatch, name, options, message):
    monkeypatch.chdir(tmp_path)
    save_file(vit_state(), "w.safetensors")
    if name == "RUN":
        save(untrained("vit-micro", classes=("a",), overrides={"depth": 1}), tmp_path / "run" / "model.safetensors")
    with pytest.raises(InputError) as caught:
        load(name.replace("FILE", "w.safetensors").replace("RUN", "run"), **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("vit-micro", {"width": 3}, "expected fields of a ViT, found 'width'"),
        ("vit-micro", {"norm_first": 0.5}, "the shape of vit-micro.*norm_first"),
        ("resnet20", {"depth": 3}, "expected no --depth for resnet20, a CNN without that setting, found 3"),
        ("vit-mikro", {}, "no preset 'vit-mikro'; did you mean 'vit-micro'"),
    ],
)
def test_untrained_refuses_what_is_no_field(name, overrides, message):
    with pytest.raises(InputError, match=message):
        untrained(name, classes=("a",), overrides=overrides)


MISFITS = {
    "vit-micro": (vit_state, "cls_token"),
    TIMM_VIT: (lambda: timm_vit().state_dict(), "blocks.0.attn.qkv.weight"),
    "torchvision:resnet18": (lambda: torchvision.models.resnet18().state_dict(), "layer1.0.conv1.weight"),
    "resnet20": (lambda: build_resnet("resnet20", classes=10, image_size=(32, 32)).state_dict(), "conv1.weight"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_dict_that_does_not_fit_names_the_first_keys(tmp_path, name):
    make, lost = MISFITS[name]
    state = {key: value.clone() for key, value in make().items() if key != lost}
    torch.save(state | {"zz.first": torch.zeros(1), "zz.second": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(ModelError) as caught:
        load(name, weights=tmp_path / "w.pth")
    assert "\n" not in str(caught.value)
    assert f"1 missing (first '{lost}')" in str(caught.value)
    assert "2 unexpected (first 'zz.first')" in str(caught.value)


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.zeros(0, 16), torch.zeros(16, 10, 1)])
def test_misshapen_tensors_for_timm(tmp_path, value):
    state = timm_vit().state_dict()
    for key in ("head.weight", "pos_embed"):
        torch.save(state | {key: value}, tmp_path / "w.pth")
        with pytest.raises(ModelError, match=r"do not fit|expected a head of") as caught:
            load(TIMM_VIT, weights=tmp_path / "w.pth")
        assert "\n" not in str(caught.value)


# ---- without a network


@pytest.mark.parametrize("name", [TIMM_VIT, "torchvision:resnet18"])
def test_offline_a_pretrained_name_is_one_line(monkeypatch, tmp_path, name):
    def fails(*_args: object, **_options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "_answers", lambda _address: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fails)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("slept for a network that is not there"))
    with pytest.raises(ModelError) as caught:
        load(name)
    assert "\n" not in str(caught.value)
    assert f"expected pretrained weights of {name} from https://" in str(caught.value)
    assert "found no network; give --weights FILE, or --random-weights" in str(caught.value)


def test_the_hubs_own_switch_comes_back_and_a_broken_download_says_why(monkeypatch):
    from huggingface_hub import constants

    before, seen = constants.HF_HUB_OFFLINE, []
    for answers in (False, True):
        monkeypatch.setattr(hub, "_answers", lambda _address, answers=answers: answers)
        with suppress(KeyError), hub.pretrained_download("timm:x", "https://example.org"):
            seen.append(constants.HF_HUB_OFFLINE)
            raise KeyError
        assert before == constants.HF_HUB_OFFLINE
    assert seen == [True, before]
    with (
        pytest.raises(ModelError, match=r"the download failed \(connection reset\); give --weights FILE"),
        hub.pretrained_download("timm:x", "https://example.org"),
    ):
        raise OSError("connection reset\nmore")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm:vit_small_patch16_224", "torchvision:resnet34"])
def test_where_there_is_really_no_network(name):
    if hub._answers("https://huggingface.co"):
        pytest.skip("there is a network here: nothing to see")
    begin = time.perf_counter()
    with pytest.raises(ModelError, match="found no network"):
        load(name)
    assert time.perf_counter() - begin < 10
