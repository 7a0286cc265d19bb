"""Each way to name a model, and each way in which it can fail: one line that says what to type."""

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from tests.lens.tiny import images
from vitlens.errors import InputError, ModelError, UnknownNameError
from vitlens.files import sha256
from vitlens.models.configs import VIT_PRESETS
from vitlens.models.loading import load, untrained
from vitlens.models.naming import parse_model, parse_models
from vitlens.models.resnet import build_resnet
from vitlens.models.sources import hub
from vitlens.models.vit import VisionTransformer
from vitlens.names import PRESETS, imagenet_classes

TIMM_VIT = "timm:vit_tiny_patch16_224"


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def vit_state(*, classes: int = 7, seed: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return VisionTransformer(replace(VIT_PRESETS["vit-micro"], classes=classes)).state_dict()


def timm_vit(*, classes: int = 1000, size: int = 224) -> torch.nn.Module:
    torch.manual_seed(5)
    return timm.create_model("vit_tiny_patch16_224", num_classes=classes, img_size=size).eval()


# ---- what can be loaded


HEAVY = [
    pytest.param(name, marks=pytest.mark.slow) for name in PRESETS if name.endswith("-224") or name[-2:] in ("18", "50")
]
LIGHT = [name for name in PRESETS if name not in {heavy.values[0] for heavy in HEAVY}]


@pytest.mark.parametrize("name", [*LIGHT, *HEAVY])
def test_a_preset_with_random_weights(name):
    model = load(name, random_weights=True)
    logits = model(images(model.input_size))
    assert logits.shape == (2, 1000 if name.endswith("-224") else 10)
    assert model.provenance.weights == "random"
    assert model.alias == name
    assert not model.training
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


def test_a_preset_without_weights_says_how_to_train_it():
    with pytest.raises(ModelError, match="train one first: vitlens train vit-micro --data digits") as caught:
        load("vit-micro")
    one_line(caught.value)


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
@pytest.mark.parametrize("way", ["arch", "weights", "at"])
def test_weights_of_a_preset_from_a_file(tmp_path, ending, way):
    state, path = vit_state(), tmp_path / f"mine{ending}"
    save_file(state, path) if ending == ".safetensors" else torch.save(state, path)
    model = {
        "arch": lambda: load(str(path), arch="vit-micro"),
        "weights": lambda: load("vit-micro", weights=path),
        "at": lambda: load(f"a=vit-micro@{path}"),
    }[way]()
    module = VisionTransformer(replace(VIT_PRESETS["vit-micro"], classes=7)).eval()
    module.load_state_dict(state)
    assert torch.equal(model(images()), module((images() - 0.5) / 0.5))
    assert model.alias == {"arch": "mine", "weights": "vit-micro", "at": "a"}[way]
    assert model.classes == tuple("0123456")
    assert (model.provenance.weights, model.provenance.sha256) == (path.name, sha256(path))


def test_wrappers_are_taken_off_and_noted(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"state_dict": {f"module._orig_mod.{k}": v for k, v in vit_state().items()}, "epoch": 9}, path)
    model = load(str(path), arch="vit-micro")
    plain = tmp_path / "plain.pth"
    torch.save(vit_state(), plain)
    assert torch.equal(model(images()), load(str(plain), arch="vit-micro")(images()))
    assert model.provenance.notes == (
        "took the weights from 'state_dict'",
        "took 'module.' off every name",
        "took '_orig_mod.' off every name",
    )


def test_timm_with_random_weights():
    model = load(TIMM_VIT, random_weights=True, image_size=(32, 48))
    assert model.layout.grid == (2, 3)
    assert model.classes == imagenet_classes()
    config = timm.models.get_pretrained_cfg("vit_tiny_patch16_224")
    assert (model.preprocessing.mean, model.preprocessing.std) == (config.mean, config.std)
    assert model(images((32, 48))).shape == (2, 1000)


def test_timms_own_preprocessing():
    model = load("timm:deit_tiny_patch16_224", random_weights=True)
    found = model.preprocessing
    assert (found.size, found.resize, found.interpolation) == ((224, 224), 248, "bicubic")
    assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("pre_trained_at", [224, 64])
def test_timm_weights_from_a_file(tmp_path, pre_trained_at):
    module = timm_vit(classes=5, size=pre_trained_at)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    size = None if pre_trained_at == 224 else (64, 64)
    model = load(TIMM_VIT, weights=tmp_path / "w.safetensors", image_size=size)
    batch = images((pre_trained_at, pre_trained_at), batch=1)
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
    prepared = model.prepare(batch)
    assert torch.equal(model(batch), module(prepared))
    transforms = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    assert model.preprocessing.size == (transforms.crop_size[0],) * 2
    assert model.preprocessing.resize == transforms.resize_size[0]


def test_told_preprocessing_and_classes():
    names = tuple("abcdefghij")
    model = load("vit-micro", random_weights=True, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0), classes=names)
    assert (model.preprocessing.mean, model.preprocessing.std) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    assert model.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert model.classes == names
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_number_of_class_names_that_does_not_fit():
    with pytest.raises(InputError, match="expected 10 class names for vit-micro, found 3; check --classes FILE"):
        load("vit-micro", random_weights=True, classes=("a", "b", "c"))


def test_untrained_can_be_trained():
    model = untrained("vit-micro", classes=("a", "b"), image_size=(16, 24), overrides={"depth": 2, "dim": 16})
    assert model.layout.grid == (4, 6)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert len(model.module.blocks) == 2
    assert model.architecture["image_size"] == (16, 24)


def test_untrained_refuses_what_is_no_field():
    with pytest.raises(InputError, match="expected fields of a ViT, found 'width'"):
        untrained("vit-micro", classes=("a",), overrides={"width": 3})
    with pytest.raises(InputError, match="expected no --depth for resnet20, a CNN without that setting, found 3"):
        untrained("resnet20", classes=("a",), overrides={"depth": 3})
    with pytest.raises(UnknownNameError, match="no preset 'vit-mikro'; did you mean 'vit-micro'"):
        untrained("vit-mikro", classes=("a",))


# ---- what cannot

UNKNOWN = {
    "vit-tny": "no model 'vit-tny'; did you mean 'vit-tiny'",
    "vit-digit": "did you mean 'vit-digits'",
    "timm:vit_tny_patch16_224": "no timm model 'vit_tny_patch16_224'; did you mean 'vit_tiny_patch16_224'",
    "timm:vit_tiny_patch16_224.nonsense": "no timm model 'vit_tiny_patch16_224.nonsense'; did you mean",
    "timm:": "no timm model ''",
    "torchvision:vit_b_23": "no torchvision model 'vit_b_23'; did you mean 'vit_b_32'",
    "torchvision:maskrcnn_resnet50_fpn": "no torchvision model",
    "hugging:google/vit": "nothing at hugging:google/vit",
    "runs/none": "nothing at runs/none; see vitlens models",
    "none.safetensors": "expected a weights file, found nothing at none.safetensors",
    "timm:vit_tiny_patch16_224@none.safetensors": "found nothing at none.safetensors; give --weights FILE",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_names_that_are_nothing(name):
    with pytest.raises(InputError) as caught:
        load(name, random_weights="@" not in name)
    assert UNKNOWN[name] in one_line(caught.value)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ModelError, match=r"expected a run folder with model\.safetensors, found none in"):
        load(str(tmp_path))


def test_a_state_dict_needs_its_architecture(tmp_path):
    save_file(vit_state(), tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match="give --arch NAME"):
        load(str(tmp_path / "w.safetensors"))
    with pytest.raises(UnknownNameError, match="no model 'vit-mikro'; did you mean 'vit-micro'"):
        load(str(tmp_path / "w.safetensors"), arch="vit-mikro")


def test_either_a_file_or_random(tmp_path):
    with pytest.raises(InputError, match="either weights or --random-weights"):
        load("vit-micro", weights=tmp_path / "w.pth", random_weights=True)


def test_what_has_weights_of_its_own_takes_no_others(tmp_path):
    from vitlens.models.saved import save

    save(untrained("vit-micro", classes=("a",), overrides={"depth": 1}), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="which has its own"):
        load(str(tmp_path), random_weights=True)
    with pytest.raises(InputError, match="which has its own"):
        load("vit-digits", weights=tmp_path / "model.safetensors")


def test_a_weights_file_takes_no_other_weights(tmp_path):
    save_file(vit_state(), tmp_path / "w.safetensors")
    for given in ({"random_weights": True}, {"weights": tmp_path / "other.pth"}):
        with pytest.raises(InputError, match="which has its own"):
            load(str(tmp_path / "w.safetensors"), arch="vit-micro", **given)
    with pytest.raises(InputError, match=r"expected an architecture for the weights in .* found @random"):
        load(f"{tmp_path / 'w.safetensors'}@random", arch="vit-micro")
    with pytest.raises(InputError, match="found 'vit-digits', which has its own"):
        load(str(tmp_path / "w.safetensors"), arch="vit-digits")


def test_a_name_that_was_parsed_is_taken_as_it_is():
    (named, other) = parse_models(["vit-digits", "vit-digits"])
    assert [load(one).alias for one in (named, other)] == ["vit-digits", "vit-digits-2"]
    assert load(parse_model("a=vit-micro@random")).provenance.weights == "random"


MISFITS = {
    "preset": ("vit-micro", lambda: vit_state(), "cls_token"),
    "timm": (TIMM_VIT, lambda: timm_vit().state_dict(), "blocks.0.attn.qkv.weight"),
    "torchvision": (
        "torchvision:resnet18",
        lambda: torchvision.models.resnet18().state_dict(),
        "layer1.0.conv1.weight",
    ),
    "cnn preset": (
        "resnet20",
        lambda: build_resnet("resnet20", classes=10, image_size=(32, 32)).state_dict(),
        None,
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_state_dict_that_does_not_fit_names_the_first_keys(tmp_path, case):
    name, make, lost = MISFITS[case]
    state = dict(make())
    lost = lost or next(key for key in state if key.endswith("weight"))
    state = {key: value.clone() for key, value in state.items() if key != lost}
    state |= {"zz.first": torch.zeros(1), "zz.second": torch.zeros(1)}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(ModelError) as caught:
        load(name, weights=tmp_path / "w.pth")
    message = one_line(caught.value)
    assert f"1 missing (first '{lost}')" in message
    assert "2 unexpected (first 'zz.first')" in message


def test_timm_weights_of_another_width(tmp_path):
    state = timm.create_model("vit_tiny_patch16_224", embed_dim=96, depth=12, num_heads=3).state_dict()
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(ModelError, match="weights do not fit timm:vit_tiny_patch16_224") as caught:
        load(TIMM_VIT, weights=tmp_path / "w.pth")
    one_line(caught.value)


def test_weights_of_another_model_altogether(tmp_path):
    torch.save(vit_state(), tmp_path / "w.pth")
    for name in (TIMM_VIT, "torchvision:resnet18", "resnet18"):
        with pytest.raises(ModelError, match="missing"):
            load(name, weights=tmp_path / "w.pth")


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["vit-micro", TIMM_VIT, "torchvision:resnet18"])
def test_a_pickle_that_runs_code_is_refused_and_nothing_runs(tmp_path, name):
    target = tmp_path / "it-ran"
    torch.save({**vit_state(), "x": Malicious(target)}, tmp_path / "w.pth")
    for attempt in (lambda: load(name, weights=tmp_path / "w.pth"), lambda: load(str(tmp_path / "w.pth"), arch=name)):
        with pytest.raises(ModelError, match="would run code: refused") as caught:
            attempt()
        one_line(caught.value)
    assert not target.exists()


def test_truncated_safetensors(tmp_path):
    save_file(vit_state(), tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(content[: len(content) // 2])
    for attempt in (
        lambda: load(str(tmp_path / "w.safetensors"), arch="vit-micro"),
        lambda: load("vit-micro", weights=tmp_path / "w.safetensors"),
    ):
        with pytest.raises(ModelError, match="expected safetensors in"):
            attempt()


def test_one_number_is_the_size_of_both_sides():
    assert load("vit-micro", random_weights=True, image_size=16).input_size == (16, 16)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit-micro", (30, 32)),
        ("torchvision:vit_b_32", (65, 65)),
        pytest.param("torchvision:vit_b_32", (64, 96), marks=pytest.mark.slow),
    ],
)
def test_an_image_size_that_does_not_go(name, size):
    with pytest.raises(InputError) as caught:
        load(name, random_weights=True, image_size=size)
    one_line(caught.value)


# ---- without a network


@pytest.mark.parametrize("name", [TIMM_VIT, "torchvision:resnet18"])
def test_offline_a_pretrained_name_is_one_line(monkeypatch, tmp_path, name):
    monkeypatch.setattr(hub, "_answers", lambda _address: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", no_network)
    monkeypatch.setattr("time.sleep", no_waiting)
    with pytest.raises(ModelError) as caught:
        load(name)
    message = one_line(caught.value)
    assert f"expected pretrained weights of {name} from https://" in message
    assert "found no network; give --weights FILE, or --random-weights" in message


def no_waiting(seconds: float) -> None:
    raise AssertionError(f"slept {seconds} s for a network that is not there")


def no_network(*_args: object, **_options: object) -> None:
    raise OSError("no route to host")


def test_the_hubs_own_switch_comes_back(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "_answers", lambda _address: False)
    before = constants.HF_HUB_OFFLINE
    seen: list[bool] = []
    with suppress(KeyError), hub.pretrained_download("timm:x", "https://example.org"):
        seen.append(constants.HF_HUB_OFFLINE)
        raise KeyError
    assert seen == [True]
    assert before == constants.HF_HUB_OFFLINE


def test_a_download_that_breaks_off_says_why(monkeypatch):
    monkeypatch.setattr(hub, "_answers", lambda _address: True)
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
