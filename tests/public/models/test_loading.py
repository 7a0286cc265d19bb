"""Each way to name a model, its alias, and each way to fail: one line that says what to type."""

import hashlib
import json
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

import vitlens
from tests.kit.models.files import one_line, small, written
from tests.kit.tiny import images, ours
from vitlens.cli.main import run
from vitlens.errors import InputError, ModelError
from vitlens.models.sources.registry import SOURCES, require_source, source_of
from vitlens.names import BUNDLED, PRESETS, imagenet_classes

TEST_VIT = "timm:test_vit"  # of 0.4 million parameters, for 160 px
SQUEEZENET = "torchvision:squeezenet1_1"
THEIRS = {  # of five classes, made without vitlens.load where that can be
    "vit-micro": lambda: ours(size=(32, 32), patch_size=(4, 4), dim=128, depth=6, heads=4).module,
    "resnet20": lambda: for_five(vitlens.load("resnet20@random", seed=3).module),
    TEST_VIT: lambda: timm.create_model("test_vit", num_classes=5),
    SQUEEZENET: lambda: torchvision.models.squeezenet1_1(),
}


def for_five(module: torch.nn.Module) -> torch.nn.Module:
    module.fc = torch.nn.Linear(64, 5)
    return module


@pytest.mark.parametrize("name", ["vit-micro", TEST_VIT])
def test_random_weights_are_seeded_and_leave_the_callers_state_alone(name):
    before = torch.random.get_rng_state()
    one = vitlens.load(f"{name}@random", image_size=32, seed=0)(images())
    again = vitlens.load(f"{name}@random", image_size=32, seed=0)(images())
    other = vitlens.load(f"{name}@random", image_size=32, seed=1)(images())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", THEIRS)
def test_weights_from_a_file_give_the_librarys_logits(name, tmp_path):
    module = THEIRS[name]().eval()
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    model = vitlens.load(name, weights=tmp_path / "w.safetensors")
    batch = images(model.input_size, batch=1)
    with torch.no_grad():
        torch.testing.assert_close(model(batch), module(model.prepare(batch)), atol=1e-6, rtol=1e-5)
    assert (len(model.classes), model.provenance.notes) == (1000 if name == SQUEEZENET else 5, ())


@pytest.mark.parametrize(("way", "alias"), [("arch", "w"), ("weights", "vit-micro"), ("at", "a")])
def test_each_way_to_name_a_file(tmp_path, way, alias):
    path = tmp_path / "w.pth"
    torch.save({"state_dict": THEIRS["vit-micro"]().state_dict()}, path)
    model = {
        "arch": lambda: vitlens.load(str(path), arch="vit-micro"),
        "weights": lambda: vitlens.load("vit-micro", weights=path),
        "at": lambda: vitlens.load(f"a=vit-micro@{path}"),
    }[way]()
    assert (model.alias, model.classes) == (alias, tuple("01234"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (model.provenance.weights, model.provenance.sha256) == ("w.pth", digest)
    assert model.provenance.notes == ("took the weights from 'state_dict'",)


def test_models_of_libraries_have_their_own_preprocessing():
    model = vitlens.load(TEST_VIT, random_weights=True, image_size=(32, 48))
    assert (model.layout.grid, model.classes) == ((2, 3), imagenet_classes())
    preprocessing = vitlens.load("timm:deit_tiny_patch16_224@random").preprocessing
    assert (preprocessing.size, preprocessing.resize, preprocessing.interpolation) == (
        (224, 224),
        248,
        "bicubic",
    )
    assert (preprocessing.mean, preprocessing.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    transforms = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()
    for size, resize in ((None, transforms.resize_size[0]), (64, None)):
        preprocessing = vitlens.load(f"{SQUEEZENET}@random", image_size=size).preprocessing
        assert (preprocessing.size[0], preprocessing.resize, preprocessing.interpolation) == (
            size or 224,
            resize,
            "bilinear",
        )


def test_timm_positions_are_resized_as_timm_does_and_noted(tmp_path):
    module = THEIRS[TEST_VIT]()
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    model = vitlens.load(f"{TEST_VIT}@{tmp_path / 'w.safetensors'}", image_size=(64, 96))
    expected = timm.layers.resample_abs_pos_embed(
        module.pos_embed, new_size=[4, 6], num_prefix_tokens=1
    )
    torch.testing.assert_close(model.module.pos_embed, expected)
    assert model.layout.grid == (4, 6)
    assert model.provenance.notes == ("resized 'pos_embed' from (1, 101, 64) to (1, 25, 64)",)


def test_told_preprocessing_classes_and_size():
    names = tuple("abcdefghij")
    mean = (0.1, 0.2, 0.3)
    std = (1.0, 2.0, 3.0)
    model = vitlens.load(
        "vit-micro", random_weights=True, mean=mean, std=std, classes=names, image_size=16
    )
    assert (model.preprocessing.mean, model.preprocessing.std) == (mean, std)
    assert (model.classes, model.input_size) == (names, (16, 16))
    assert not model.training
    for parameter in model.parameters():
        assert not parameter.requires_grad
    expected = (torch.zeros(1, 3, 16, 16) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(
        std
    ).view(3, 1, 1)
    torch.testing.assert_close(model.prepare(torch.zeros(1, 3, 16, 16)), expected)
    only = vitlens.load("vit-micro@random", mean=mean)
    assert (only.preprocessing.mean, only.preprocessing.std) == (mean, (0.5, 0.5, 0.5))


@pytest.mark.parametrize("name", ["vit-digits", "RUN"])
def test_random_weights_by_option_are_those_by_name(name, tmp_path):
    if name == "RUN":
        name = str(tmp_path / "run")
        written(small(), tmp_path / "run")
    stored = vitlens.load(name).state_dict()
    by_name = vitlens.load(f"{name}@random", seed=7).state_dict()
    by_option = vitlens.load(name, random_weights=True, seed=7).state_dict()
    assert by_option.keys() == stored.keys()
    for key, weight in by_option.items():
        assert torch.equal(weight, by_name[key]), key
    assert any(not torch.equal(weight, stored[key]) for key, weight in by_option.items())


def test_a_folder_called_main_gives_its_name(tmp_path, monkeypatch):
    """Only a function of that name in a file does not name its model."""
    monkeypatch.chdir(tmp_path)
    written(small(), tmp_path / "main")
    assert vitlens.load("main").alias == "main"


# ---- what cannot

# names, options, and what the message says to type; FILE has a state dict, RUN is a run folder
WRONG = [
    ("timm:vit_tiny_patch16_224.nonsense@random", {}, "did you mean"),
    ("timm:@random", {}, "no timm model ''"),
    ("torchvision:maskrcnn_resnet50_fpn@random", {}, "torchvision"),
    ("runs/none", {}, "vitlens models"),
    ("none.safetensors", {}, "none.safetensors"),
    ("timm:vit_tiny_patch16_224@none.safetensors", {}, "give weights='FILE'"),
    ("vit-micro", {}, "vitlens train vit-micro"),
    (".", {}, "vitlens train"),
    ("TRANSFORMERS", {}, "hf:TRANSFORMERS"),
    ("FILE", {}, "arch='NAME'"),
    ("FILE", {"arch": "vit-mikro"}, "'vit-micro'"),
    ("FILE", {"arch": "vit-digits"}, "'vit-digits', which has its own"),
    ("FILE", {"arch": "vit-micro", "weights": "other.pth"}, "which has its own"),
    ("FILE@random", {"arch": "vit-micro"}, "@random"),
    (
        "vit-micro",
        {"weights": "w.pth", "random_weights": True},
        "either weights or random_weights=True",
    ),
    ("vit-digits", {"weights": "w.pth"}, "which has its own"),
    ("vit-micro@random", {"classes": ("a", "b")}, "classes="),
    ("vit-micro@random", {"image_size": (30, 32)}, "found 30 and 4 px"),
    ("vit-micro@random", {"image_size": 0}, "0"),
    ("torchvision:vit_b_32@random", {"image_size": (65, 65)}, "65x65 px"),
]


@pytest.mark.parametrize(
    ("name", "options", "words"), WRONG, ids=[f"{name} {reason}" for name, reason, _ in WRONG]
)
def test_what_cannot_be_loaded_is_one_line(tmp_path, monkeypatch, name, options, words):
    monkeypatch.chdir(tmp_path)
    save_file({"head.weight": torch.zeros(7, 128)}, "w.safetensors")
    written(small(), tmp_path / "run")
    (tmp_path / "TRANSFORMERS").mkdir()
    (tmp_path / "TRANSFORMERS" / "preprocessor_config.json").write_text("{}")
    with one_line(InputError, words):
        vitlens.load(name.replace("FILE", "w.safetensors").replace("RUN", "run"), **options)


def test_a_run_folder_that_also_holds_a_processor_is_a_run_folder(tmp_path):
    written(small(), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert vitlens.load(str(tmp_path)).classes == ("cat", "dog", "newt")


OPTIONS = ("resnet20 --depth 3", "vit-mikro", "vit-micro --dim 3")
SWINS = ("swin-micro --pooling cls", "swin-micro --depth 3", "swin-micro --heads 3")


@pytest.mark.parametrize("line", [*OPTIONS, *SWINS])
def test_shapes_that_a_preset_does_not_have_are_refused(line, capsys):
    assert run(["train", *line.split(), "--data", "digits", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert line not in SWINS or line.split()[1] in error


@pytest.mark.parametrize("name", THEIRS)
def test_a_state_dict_that_does_not_fit_names_the_keys(tmp_path, name):
    state = {key: value.clone() for key, value in THEIRS[name]().state_dict().items()}
    lost = list(state)[6]
    del state[lost]
    torch.save(
        state | {"zz.first": torch.zeros(1), "zz.second": torch.zeros(1)}, tmp_path / "w.pth"
    )
    with one_line(
        ModelError, rf"1 missing \('{lost}'\); 2 unexpected \('zz\.first', 'zz\.second'\)"
    ):
        vitlens.load(name, weights=tmp_path / "w.pth")


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.zeros(0, 16), torch.zeros(16, 10, 1)])
@pytest.mark.parametrize("key", ["head.weight", "pos_embed"])
def test_misshapen_tensors_for_timm(tmp_path, key, value):
    torch.save(THEIRS[TEST_VIT]().state_dict() | {key: value}, tmp_path / "w.pth")
    with one_line(ModelError):
        vitlens.load(TEST_VIT, weights=tmp_path / "w.pth")


# ---- names


ALIASES = {  # folders and files are those of a tiny model
    "vit-digits": "vit-digits",
    "timm:test_vit.r160_in1k@random": "test_vit.r160_in1k-random",
    "runs/vit-a/": "vit-a",
    "a.b-c_1=runs/vit-a@random": "a.b-c_1",
    "runs/lr=0.1": "lr-0.1",  # a slash before '=': no alias; and in an alias no '='
    "w/_модель.safetensors": "model",
    f"runs/{'long' * 60}": "long" * 15,
}


@pytest.mark.parametrize("text", ALIASES)
def test_a_model_is_called_by_its_alias_or_the_last_part_of_its_name(
    text, tiny_vit, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if "/" in text:
        place = Path(text.partition("@")[0].removeprefix("a.b-c_1="))
        place.parent.mkdir()
        place.symlink_to(
            tiny_vit / "model.safetensors" if place.suffix == ".safetensors" else tiny_vit
        )
    model = vitlens.load(text)
    assert model.alias == ALIASES[text]
    assert (model.provenance.weights == "random") == text.endswith("@random")
    monkeypatch.chdir(tiny_vit)
    assert vitlens.load(".").alias == tiny_vit.name


@pytest.mark.parametrize("text", ["", "@w.pth", "a=@w.pth", "no/alias=x", f"{'a' * 81}=vit-digits"])
def test_other_names_are_refused(text):
    with pytest.raises(InputError):
        vitlens.load(text)


@pytest.mark.parametrize(
    ("texts", "aliases"),
    [
        (["runs/a/vit", "vit", "vit-2", "vit"], ["vit", "vit-2", "vit-2-2", "vit-3"]),
        (["runs/a", "a=vit"], ["a-2", "a"]),  # a typed alias is kept whatever stands before it
    ],
)
def test_aliases_of_one_command_are_made_unique(texts, aliases, tiny_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [text.partition("=")[2] or text for text in texts]
    for name in set(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(tiny_vit)
    assert run(["evaluate", *texts, "--limit", "4", "--out", "out", "--quiet"]) == 0
    models = json.loads(Path("out/config.json").read_text())["models"]
    assert [(model["alias"], model["name"]) for model in models] == list(zip(aliases, names))


def test_an_alias_given_twice_is_refused(capsys):
    assert run(["evaluate", "a=vit-digits", "b=cnn-digits", "a=cnn-digits"]) == 2
    assert "'a' twice" in capsys.readouterr().err


KINDS = {
    "runs/a/best.pth": "file",
    "timm:no_such_model": "timm",
    "hf:google/vit-base-patch16-224": "hf",
    **dict.fromkeys(("my.py:vit", "a/b.py:c", "my.py"), "code"),
    **dict.fromkeys(("vit-tny", "my.pyc:vit", ".py", "runs/py"), None),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_source_of_a_name_by_its_form_alone(name):
    source = source_of(name)
    assert (source and source.kind) == KINDS[name]


def test_a_folder_comes_before_a_preset_of_its_name_and_after_a_bundled_model(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("vit-micro", "vit-digits"):
        Path(name).mkdir()
    assert [require_source(name).kind for name in ("vit-micro", "vit-digits", ".")] == [
        "run",
        "bundled",
        "run",
    ]


def test_names_and_kinds_in_files_stay_as_they_are():
    """`kind` is written into model.safetensors: files of earlier versions have these."""
    assert {kind for kind, source in SOURCES.items() if source.build} == {
        "preset",
        "timm",
        "torchvision",
        "hf",
    }
    assert SOURCES["bundled"].all_names() == list(BUNDLED)
    assert SOURCES["preset"].all_names() == list(PRESETS)
