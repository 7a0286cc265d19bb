"""Models of transformers against transformers itself: logits, labels, sizes, and every file that is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.models.sources.huggingface.tiny import FAMILIES, FEATURES, LABELS, TOWERS
from vitlens.data.decode import fit
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.models.saved import load_file, save
from vitlens.models.sources.registry import SOURCES, ModelRequest
from vitlens.names import imagenet_classes

transformers = pytest.importorskip("transformers", minversion="5", reason="the extra hf is not installed")


@pytest.fixture
def changed(folders, tmp_path):
    """A copy of a family's folder with other fields in a JSON file; None removes one."""

    def copy(name="vit", file="config.json", **fields):
        target = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folders(name)[0], target)
        content = json.loads((target / file).read_text()) | fields
        (target / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
        return target

    return copy


def pixels(seed=0, size=32):
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_those_of_transformers_on_pixels_normalised_by_its_processor(folders, name, tmp_path):
    """And those of the model that is saved and loaded again without the folder; another image size is taken, too."""
    folder, own = folders(name)
    model, images = vitlens.load(f"hf:{folder}"), pixels()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    inputs = processor(list(images), do_rescale=False, do_resize=False, return_tensors="pt")["pixel_values"]
    save(model, tmp_path / "model.safetensors")
    again, larger = vitlens.load(str(tmp_path / "model.safetensors")), vitlens.load(f"hf:{folder}", image_size=48)
    with torch.no_grad():
        theirs = TOWERS.get(name, lambda whole: whole)(own)(pixel_values=inputs)
        expected = FEATURES[name](theirs) if name in FEATURES else theirs.get("logits", theirs.get("pooler_output"))
        ours = model(images)
        assert torch.equal(again(images), ours)
        assert larger(pixels(size=48)).shape == ours.shape
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    classifier = "Classification" in FAMILIES[name][1]
    assert (model.input_size, larger.input_size) == ((32, 32), (48, 48))
    assert model.classes == again.classes == (LABELS if classifier else ())
    assert again.preprocessing == model.preprocessing
    assert any("features:" in note for note in model.provenance.notes) != classifier


def test_another_image_size_interpolates_positions(folders):
    folder, own = folders("vit")
    model = vitlens.load(f"hf:{folder}", image_size=(48, 48))
    with torch.no_grad():
        expected = own(pixel_values=(pixels(size=48) - 0.5) / 0.5, interpolate_pos_encoding=True).logits
        torch.testing.assert_close(model(pixels(size=48)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "size"), [("vit", (40, 60)), ("clip", (40, 60)), ("convnext", (60, 40)), ("dinov2", (33, 50))]
)
def test_a_photograph_is_prepared_as_by_transformers(folders, name, size):
    folder, _ = folders(name)
    model = vitlens.load(f"hf:{folder}")
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    photo = photo.resize((size[1] * 4, size[0] * 4), Image.Resampling.BICUBIC)
    theirs = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")(photo, return_tensors="pt")
    ours = model.prepare(fit(photo, model.preprocessing)[None].float() / 255)
    torch.testing.assert_close(ours[0], theirs["pixel_values"][0], rtol=0, atol=0.02)


def test_provenance_has_the_sha256_of_one_file_and_of_several(folders, tmp_path):
    import hashlib

    folder, own = folders("vit")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert vitlens.load(f"hf:{folder}").provenance.sha256 == digest
    own.save_pretrained(tmp_path, max_shard_size="20KB")
    shutil.copy(folder / "preprocessor_config.json", tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    model = vitlens.load(f"hf:{tmp_path}")
    assert model.provenance.sha256 == hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()
    with torch.no_grad():
        assert torch.equal(model(pixels()), vitlens.load(f"hf:{folder}")(pixels()))


def test_random_weights_are_seeded_and_need_no_file_and_weights_are_taken_from_another(folders, changed):
    folder, images = changed(), pixels()
    (folder / "model.safetensors").unlink()
    first, second = (vitlens.load(f"hf:{folder}", random_weights=True, seed=seed) for seed in (0, 1))
    again = vitlens.load(f"hf:{folder}@random", seed=0)
    whole = folders("vit")[0]
    taken = vitlens.load(f"hf:{folder}@{whole / 'model.safetensors'}")
    with torch.no_grad():
        assert torch.equal(first(images), again(images))
        assert not torch.equal(first(images), second(images))
        assert torch.equal(taken(images), vitlens.load(f"hf:{whole}")(images))


def test_labels(changed):
    numbered = {str(index): f"LABEL_{index}" for index in range(5)}
    assert vitlens.load(f"hf:{changed(id2label=numbered)}").classes == ("0", "1", "2", "3", "4")
    with pytest.raises(ModelError, match=r"do not fit .* of another shape"):
        vitlens.load(f"hf:{changed(id2label={'0': 'one'})}")
    with pytest.raises(ModelError, match="id2label from 0 to 4"):
        vitlens.load(f"hf:{changed(id2label={number: number for number in '01235'})}")
    longer = {str(index): f"{name}, another name" for index, name in enumerate(imagenet_classes())}
    folder = changed(id2label=longer | {"999": "toilet tissue, toilet paper"})
    assert vitlens.load(f"hf:{folder}", random_weights=True).classes == imagenet_classes()


@pytest.mark.parametrize(
    ("fields", "mean", "std"),
    [
        ({"do_normalize": False}, 0, 1),
        ({"do_rescale": False}, 0.5 / 255, 0.5 / 255),
        ({"rescale_factor": 2 / 255}, 0.25, 0.25),
    ],
)
def test_normalisation_of_pixels_from_0_to_1(changed, fields, mean, std):
    folder = changed(file="preprocessor_config.json", **fields)
    model = vitlens.load(f"hf:{folder}")
    assert model.preprocessing.mean == pytest.approx((mean,) * 3)
    assert model.preprocessing.std == pytest.approx((std,) * 3)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    theirs = transformers.AutoImageProcessor.from_pretrained(folder)(photo, return_tensors="pt")["pixel_values"]
    ours = model.prepare(fit(photo, model.preprocessing)[None].float() / 255)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_processors_as_earlier_versions_wrote_them(changed):
    earlier = {"image_processor_type": None, "rescale_factor": None, "do_rescale": None}
    plain = changed(file="preprocessor_config.json", size=32, **earlier)
    assert vitlens.load(f"hf:{plain}").preprocessing == vitlens.load(f"hf:{changed()}").preprocessing
    squashed = {"feature_extractor_type": "DeiTFeatureExtractor", "size": 40, "crop_size": 32, "do_center_crop": True}
    model = vitlens.load(f"hf:{changed(file='preprocessor_config.json', **earlier | squashed)}")
    assert (model.preprocessing.size, model.preprocessing.resize) == ((32, 32), 40)
    assert any("whatever the proportions" in note for note in model.provenance.notes)
    convnext = changed(
        "convnext", "preprocessor_config.json", feature_extractor_type="ConvNextFeatureExtractor", size=32
    )
    assert vitlens.load(f"hf:{convnext}").preprocessing.resize == int(32 / (224 / 256))
    full = changed("convnext", "preprocessor_config.json", size={"shortest_edge": 384})
    assert vitlens.load(f"hf:{full}", image_size=(384, 384)).preprocessing.resize is None


PROCESSORS = {
    "resampling": ({"resample": 1}, "bicubic .3. resampling, found"),
    "padding": ({"do_pad": True}, "ViTImageProcessor do_pad"),
    "another processor": ({"image_processor_type": "Owlv2ImageProcessor"}, "Owlv2ImageProcessor"),
    "size": ({"size": {"longest_edge": 5}}, "Expected `int`, got `null`"),
    "huge size": ({"size": {"height": 10**6, "width": 32}}, "4096"),
    "factor": ({"rescale_factor": "x"}, "as numbers, found"),
    "crop": ({"image_processor_type": "ConvNextImageProcessor", "size": 32, "crop_pct": 0}, "as numbers, found"),
    "mean": ({"image_mean": ["a", 0, 0]}, "as numbers, found"),
    "std": ({"image_std": [0, 0, 0]}, "std"),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_processors_that_are_refused(changed, case):
    fields, text = PROCESSORS[case]
    with pytest.raises(InputError, match=text) as caught:
        vitlens.load(f"hf:{changed(file='preprocessor_config.json', **fields)}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Owlv2ImageProcessor", ""])
def test_a_processor_that_is_missing_or_not_plain_is_replaced_by_mean_std_and_image_size(folders, changed, kind):
    folder = changed(file="preprocessor_config.json", image_processor_type=kind)
    if not kind:
        (folder / "preprocessor_config.json").unlink()
    given = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "image_size": 32}
    for missing in given:
        with pytest.raises(UnsupportedError, match="--mean, --std and --image-size"):
            vitlens.load(f"hf:{folder}", **{key: value for key, value in given.items() if key != missing})
    model = vitlens.load(f"hf:{folder}", **given)
    mean, std = (torch.tensor(given[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        expected = folders("vit")[1](pixel_values=(pixels() - mean) / std).logits
        torch.testing.assert_close(model(pixels()), expected, rtol=1e-5, atol=1e-5)
    assert any("as the user gave it, with bilinear" in note for note in model.provenance.notes)


CONFIGS = {
    "no model_type": ({"model_type": None}, "without a model_type"),
    "remote code": ({"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}, "never run"),
    "unknown": ({"model_type": "bert"}, "vision model"),
    "naflex": ({"model_type": "siglip2"}, "NaFlex"),
    "timm": ({"model_type": "timm_wrapper"}, "timm:NAME"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "sigmoid": ({"problem_type": "multi_label_classification"}, "exclude each other"),
    "channels": ({"num_channels": 1}, "do not fit"),
    "huge": ({"hidden_size": 2**20, "intermediate_size": 2**20}, "at most"),
    "layers": ({"num_hidden_layers": 10**6}, "at most 999 layers"),
    "type": ({"hidden_size": "wide"}, "config.json"),
    "activation": ({"hidden_act": "none"}, "config.json"),
    "shape": ({"hidden_size": 64}, "do not fit"),
    "one architecture": ({"architectures": "ViTForImageClassification"}, "expected a list as architectures"),
    "architectures": ({"architectures": 5}, "expected a list as architectures"),
    "tower": ({"model_type": "clip", "vision_config": "wide"}, "expected a dict as vision_config"),
    "more layers": ({"num_hidden_layers": 3}, "missing"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_are_refused(changed, case):
    fields, text = CONFIGS[case]
    with pytest.raises(InputError, match=text) as caught:
        vitlens.load(f"hf:{changed(**fields)}")
    assert "\n" not in str(caught.value)


FOLDERS = {  # files written into a folder (None: removed), and the message
    "no configuration": ({"config.json": None}, r"expected a JSON file at .*config\.json.*save_pretrained"),
    "no JSON": ({"config.json": "{" * 100}, "JSON"),
    "no weights": ({"model.safetensors": None}, r"expected model\.safetensors .* found none"),
    "a pickle": (
        {"model.safetensors": None, "pytorch_model.bin": "x"}, r"pytorch_model\.bin alone.*save_pretrained"
    ),
    "an adapter": ({"adapter_config.json": "{}"}, r"found adapter_config\.json.*merge_and_unload"),
    "an index of other files": (
        {"model.safetensors": None, "model.safetensors.index.json": '{"weight_map": {"a": "../vit/w.safetensors"}}'},
        r"expected model\.safetensors .* found none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_are_refused(changed, case):
    files, text = FOLDERS[case]
    folder = changed()
    for name, content in files.items():
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(ModelError, match=text) as caught:
        vitlens.load(f"hf:{folder}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hf:", "hf:owner/..", "hf:./nothing", "hf:a/b/c", "hf:a b"])
def test_names_that_are_refused(name):
    with pytest.raises(ModelError, match=r"hf:FOLDER, or hf:REPO"):
        vitlens.load(name)


def test_a_repository_without_a_network(monkeypatch, tmp_path):
    from vitlens.models.sources import hub

    monkeypatch.setattr(hub, "_answers", lambda _: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"found no network; .*hf:FOLDER"):
        vitlens.load("hf:google/vit-base-patch16-224")


def test_what_a_configuration_cannot_choose_is_said(changed):
    folder = changed(
        auto_map={"AutoModelForImageClassification": "evil.Model"}, attn_implementation="flash_attention_2"
    )
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    model = vitlens.load(f"hf:{folder}")
    for words in ("was not run", "flash_attention_2"):
        assert any(words in note for note in model.provenance.notes)
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")} == {"sdpa"}


def test_nothing_is_printed(folders, capfd):
    vitlens.load(f"hf:{folders('clip')[0]}")
    assert capfd.readouterr() == ("", "")


def test_a_new_head_for_fine_tuning(folders):
    from vitlens.models.rebuild import for_classes

    for name in ("vit", "deit-distilled", "vit-features", "swin", "convnext"):
        model = for_classes(vitlens.load(f"hf:{folders(name)[0]}"), ("a", "b", "c"))
        assert model.classes == ("a", "b", "c")
        assert torch.equal(model(pixels()), torch.zeros(2, 3))


def test_a_saved_file_that_is_not_what_vitlens_wrote(folders, tmp_path):
    model = vitlens.load(f"hf:{folders('vit')[0]}")
    overrides = model.architecture["overrides"]
    for changes in ({"class": "AutoModel"}, {"config": "[]"}, {"config": '{"model_type": "bert"}'}, {"class": 3}):
        model.architecture["overrides"] = overrides | changes
        save(model, tmp_path / "model.safetensors")
        with pytest.raises((ModelError, UnsupportedError)) as caught:
            load_file(tmp_path / "model.safetensors", ModelRequest(SOURCES["run"], "x", "x"), "x")
        assert "\n" not in str(caught.value)
