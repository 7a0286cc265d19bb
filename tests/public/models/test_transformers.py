"""Models of transformers against transformers: outputs, attention, texts, preparation.

Folders that cannot be read are refused.
"""

import copy
import hashlib
import json
import shutil
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.marks import slow_among
from tests.kit.models.files import description, one_line, rewrite, written
from tests.kit.models.handwritten import half
from tests.kit.models.transformers import (
    FAMILIES,
    FEATURES,
    LABELS,
    changed,
    folder_of,
    pixels,
    save_family,
    tower,
)
from tests.kit.windows import unwindow
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.names import imagenet_classes

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="the extra hf is not installed"
)

PROCESSOR = "preprocessor_config.json"
REGISTERS = ["register"] * 4
SEQUENCES = {  # family -> the prefix of its tokens, and what reads them
    **dict.fromkeys(
        ("vit", "vit-features", "dinov2-features", "clip-projected", "clip"), (("cls",), "cls")
    ),
    **dict.fromkeys(("beit", "clip-classifier"), (("cls",), "mean")),
    "deit": (("cls", "distillation"), "cls"),
    "deit-distilled": (("cls", "distillation"), "cls+distillation"),
    **dict.fromkeys(("dinov2-registers", "dinov3"), (("cls", *REGISTERS), "cls")),
    "siglip": ((), "pool"),
    "siglip-classifier": ((), "mean"),  # its pooling head runs, but is not read
}
OTHERS = {"swin": "windowed", "swinv2": "windowed", "convnext": "cnn"}
# whose first hidden state is read
HIDDEN = (
    "vit",
    "deit-distilled",
    "dinov3",
    "clip",
    "siglip",
    "swin",
    "swinv2",
)


@cache
def loaded(name):
    """Load a model, which all tests share and none changes."""
    return vitlens.load(f"hf:{folder_of(name)[0]}")


TWINS = {
    "vit-features": "dinov2-features",
    "deit": "deit-distilled",
    "siglip-classifier": "clip-classifier",
}


@pytest.mark.parametrize(  # of two with the same parts, one
    "name",
    slow_among(FAMILIES, TWINS),
)
def test_outputs_are_those_of_transformers_on_pixels_normalised_by_its_processor(name, tmp_path):
    """And those of the model that is saved and loaded again without the folder; another image size
    is taken, too.
    """
    folder, reference = folder_of(name)
    model = loaded(name)
    larger = vitlens.load(f"hf:{folder}", image_size=48)
    images = pixels()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    inputs = processor(list(images), do_rescale=False, do_resize=False, return_tensors="pt")[
        "pixel_values"
    ]
    again = vitlens.load(str(written(model, tmp_path)))
    with torch.no_grad():
        theirs = tower(name, reference)(pixel_values=inputs, output_hidden_states=True)
        expected = (
            FEATURES[name](theirs)
            if name in FEATURES
            else theirs.get("logits", theirs.get("pooler_output"))
        )
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(again(images), model(images))
        assert larger(pixels(size=48)).shape == expected.shape
        if name == "vit":
            resized = reference(
                pixel_values=larger.prepare(pixels(size=48)), interpolate_pos_encoding=True
            ).logits
            torch.testing.assert_close(larger(pixels(size=48)), resized, rtol=1e-5, atol=1e-5)
    classifier = "Classification" in FAMILIES[name][1]
    assert (model.input_size, larger.input_size) == ((32, 32), (48, 48))
    assert model.classes == again.classes == (LABELS if classifier else ())
    assert again.preprocessing == model.preprocessing
    assert ("features:" in "\n".join(model.provenance.notes)) != classifier
    assert model.anatomy.family == OTHERS.get(name, "vit")
    assert (model.supports("stats") is None) == (name != "convnext")
    if name in HIDDEN:
        prefix = len(SEQUENCES[name][0]) if name in SEQUENCES else 0
        features = vitlens.features(model, images, embedding=True).at("embedding")
        torch.testing.assert_close(
            features, theirs.hidden_states[0][:, prefix:].mean(1), atol=1e-5, rtol=1e-4
        )


def eager_attention(name):
    """Return the attention of transformers for the same pixels."""
    reference = folder_of(name)[1]
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = tower(name, reference)(
            pixel_values=loaded(name).prepare(pixels()), output_attentions=True
        ).attentions
    reference.set_attn_implementation("sdpa" if type(reference)._supports_sdpa else "eager")
    return attentions


@pytest.mark.parametrize("name", SEQUENCES)
def test_attention_under_sdpa_is_transformers_own_eager_attention(name):
    model, (prefix, readout) = loaded(name), SEQUENCES[name]
    assert (model.layout.prefix, model.layout.grid, model.anatomy.readout) == (
        prefix,
        (4, 4),
        readout,
    )
    assert len(model.anatomy.blocks) == 2
    expected = eager_attention(name)
    observed = vitlens.attention(model, pixels())
    assert {
        part.config._attn_implementation for part in model.modules() if hasattr(part, "config")
    } == {"sdpa"}
    pooled = readout == "pool"  # by attention of one query, which transformers does not return
    assert [layer.shape[-2] for layer in observed] == [layer.shape[-2] for layer in expected] + [
        1
    ] * pooled
    for theirs, ours in zip(expected, observed):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def windowed(model, images):
    """Return each layer's attention weights: of its windows, and between all patches of the map."""
    weights = []
    patches = []

    def keep(call):
        weights.append(call.weights())
        patches.append(unwindow(call.weights(), call.site.windows))

    vitlens.observe(model, images, keep)
    return weights, patches


@pytest.mark.parametrize("name", ["swin", "swinv2"])
def test_windows_under_the_default_kernel_are_transformers_own_eager_attention(name):
    observed, _ = windowed(loaded(name), pixels())
    assert len(observed) == 4
    for theirs, ours in zip(eager_attention(name), observed[1::2]):  # the last block of each stage
        torch.testing.assert_close(ours.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "window"), [("swin", 5), ("swinv2", 4)])  # 5: 16 x 16 are padded
def test_windows_are_placed_where_patches_depend_on_each_other(name, window):
    family, kind, fields, _, _ = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**fields | {"window_size": window})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = getattr(transformers, family + kind)(config).eval()
    model = half(reference, 32)
    # the second one is shifted
    for layer, weights in zip(model.anatomy.blocks[:2], windowed(model, pixels()[:1])[1]):
        block = model.module.get_submodule(layer)
        tokens = torch.randn(1, 256, 16).requires_grad_()
        output = block(tokens, (16, 16))[0]
        for patch in (0, 37, 255):
            (gradient,) = torch.autograd.grad(
                output[0, patch].square().sum(), tokens, retain_graph=True
            )
            placed = weights[0].mean(0)[patch] > 1e-12  # masked by -100, not by -inf
            assert torch.equal(gradient[0].abs().sum(1) > 1e-12, placed)


def test_a_kernel_that_cannot_be_observed_is_refused_by_name():
    reference = copy.deepcopy(folder_of("vit")[1])
    for kernel in ("flex_attention", "kernels-community/flash-attn"):
        reference.config._attn_implementation_internal = kernel
        with pytest.raises(UnsupportedError, match=f"'{kernel}'.*set_attn_implementation"):
            half(reference, 32)


def save_tokenizer(folder):
    """Write a tokenizer of letters as CLIP's, with a start and an end of the largest id."""
    letters = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    words = letters | {f"{letter}</w>": 26 + index for letter, index in letters.items()}
    words |= {"<|startoftext|>": 52, "<|endoftext|>": 53}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_zero_shot_logits_are_transformers_own(name, tmp_path):
    reference = save_family(name, tmp_path)
    texts = ["a cat", "a dog", "an owl"]
    tokenizer = save_tokenizer(tmp_path)
    model = vitlens.load(f"hf:{tmp_path}")
    ids = tokenizer(texts, padding="max_length", max_length=16, return_tensors="pt")["input_ids"]
    classifier = vitlens.zero_shot(model, texts, templates=["{}"])
    with torch.no_grad():
        inputs = model.prepare(pixels())
        torch.testing.assert_close(
            model(pixels()), reference.get_image_features(pixel_values=inputs).pooler_output
        )
        expected = reference(input_ids=ids, pixel_values=inputs).logits_per_image
    torch.testing.assert_close(classifier(pixels()), expected, rtol=1e-4, atol=1e-4)
    assert (model.classes, classifier.classes, classifier.layout.grid) == ((), tuple(texts), (4, 4))
    assert "image tower" in model.supports("train")
    # 14, a start and an end
    assert vitlens.zero_shot(model, ["a b c d e f g h i j k l m n"], templates=["{}"])
    with pytest.raises(InputError, match="at most 16 tokens"):
        vitlens.zero_shot(model, ["a b c d e f g h i j k l m n o"], templates=["{}"])


def test_without_a_tokenizer_the_tower_of_images_is_a_model_of_features(tmp_path):
    save_family("clip", tmp_path)
    with pytest.raises(UnsupportedError, match="embeds no texts"):
        vitlens.zero_shot(vitlens.load(f"hf:{tmp_path}"), ["a"])
    (tmp_path / "tokenizer.json").write_text("{}")
    with one_line(ModelError, "tokenizer"):
        vitlens.zero_shot(vitlens.load(f"hf:{tmp_path}"), ["a"])
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**30)  # a gigabyte of nothing
    with pytest.raises(ModelError, match="tokenizer of at most"):
        vitlens.zero_shot(vitlens.load(f"hf:{tmp_path}"), ["a"])


def test_provenance_has_the_sha256_of_one_file_and_of_several(tmp_path):
    folder, reference = folder_of("vit")
    in_one_file = loaded("vit")
    assert (
        in_one_file.provenance.sha256
        == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    )
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    shutil.copy(folder / PROCESSOR, tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    model = vitlens.load(f"hf:{tmp_path}")
    assert (
        model.provenance.sha256
        == hashlib.sha256(b"".join(shard.read_bytes() for shard in shards)).hexdigest()
    )
    assert torch.equal(model(pixels()), in_one_file(pixels()))


def test_random_weights_are_seeded_and_need_no_file_and_weights_are_taken_from_another(tmp_path):
    folder = changed(tmp_path)
    images = pixels()
    (folder / "model.safetensors").unlink()
    first = vitlens.load(f"hf:{folder}", random_weights=True, seed=0)(images)
    second = vitlens.load(f"hf:{folder}", random_weights=True, seed=1)(images)
    assert torch.equal(first, vitlens.load(f"hf:{folder}@random", seed=0)(images))
    assert not torch.equal(first, second)
    taken = vitlens.load(f"hf:{folder}@{folder_of('vit')[0] / 'model.safetensors'}")
    assert torch.equal(taken(images), loaded("vit")(images))


def test_labels(tmp_path):
    numbered = {str(index): f"LABEL_{index}" for index in range(5)}
    assert vitlens.load(f"hf:{changed(tmp_path, id2label=numbered)}").classes == (
        "0",
        "1",
        "2",
        "3",
        "4",
    )
    longer = {str(index): f"{name}, another name" for index, name in enumerate(imagenet_classes())}
    folder = changed(tmp_path, id2label=longer | {"999": "toilet tissue, toilet paper"})
    assert vitlens.load(f"hf:{folder}@random").classes == imagenet_classes()


def test_what_a_configuration_cannot_choose_is_said_and_nothing_is_printed(tmp_path, capfd):
    folder = changed(
        tmp_path,
        auto_map={"AutoModelForImageClassification": "evil.Model"},
        attn_implementation="flash_attention_2",
    )
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    capfd.readouterr()
    model = vitlens.load(f"hf:{folder}")
    for words in ("was not run", "flash_attention_2"):
        assert words in "\n".join(model.provenance.notes)
    assert capfd.readouterr() == ("", "")


# ---- how images are prepared


def photo(size):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("name", "size"), [("vit", (40, 60)), ("convnext", (60, 40)), ("dinov2-features", (33, 50))]
)
def test_a_photograph_is_prepared_as_by_transformers(name, size, tmp_path):
    image = photo(size).resize((size[1] * 4, size[0] * 4), Image.Resampling.BICUBIC)
    image.save(tmp_path / "photo.png")
    processor = transformers.AutoImageProcessor.from_pretrained(folder_of(name)[0], backend="pil")
    model = loaded(name)
    prepared = model.prepare(vitlens.images(str(tmp_path / "photo.png"), model))
    theirs = processor(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(prepared, theirs, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("fields", "mean", "std"),
    [
        ({"do_normalize": False}, 0, 1),
        ({"do_rescale": False}, 0.5 / 255, 0.5 / 255),
        ({"rescale_factor": 2 / 255}, 0.25, 0.25),
    ],
)
def test_normalisation_of_pixels_from_0_to_1(fields, mean, std, tmp_path):
    folder = changed(tmp_path, file=PROCESSOR, **fields)
    model = vitlens.load(f"hf:{folder}")
    image = photo((32, 32))
    assert model.preprocessing.mean == pytest.approx((mean,) * 3)
    assert model.preprocessing.std == pytest.approx((std,) * 3)
    theirs = transformers.AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")[
        "pixel_values"
    ]
    ours = model.prepare(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


EARLIER = {"image_processor_type": None, "rescale_factor": None, "do_rescale": None}
SQUASHED = {
    "feature_extractor_type": "DeiTFeatureExtractor",
    "size": 40,
    "crop_size": 32,
    "do_center_crop": True,
}
CONVNEXT = {"feature_extractor_type": "ConvNextFeatureExtractor", "size": 32}
# family, fields of the processor's file, side, short side or box before a crop, word of a note
PREPARED = {
    "as earlier versions wrote it": ("vit", EARLIER | {"size": 32}, 32, None, ""),
    "squashed": ("vit", EARLIER | SQUASHED, 32, (40, 40), ""),
    "with a short side alone": ("clip", {"do_center_crop": False}, 32, 32, "does not crop"),
    "without resizing": ("vit", {"do_resize": False}, 32, None, "does not resize"),
    "a ConvNeXt's": ("convnext", CONVNEXT, 32, int(32 / (224 / 256)), ""),
    "a large ConvNeXt's": ("convnext", {"size": {"shortest_edge": 384}}, 384, None, ""),
}


@pytest.mark.parametrize("case", PREPARED)
def test_other_processors(case, tmp_path):
    name, fields, side, resize, words = PREPARED[case]
    model = vitlens.load(f"hf:{changed(tmp_path, name, PROCESSOR, **fields)}")
    preprocessing = model.preprocessing
    assert (preprocessing.size, preprocessing.resize or preprocessing.box) == ((side, side), resize)
    assert words in " ".join(model.provenance.notes)


# ---- what is refused

REFUSED = {  # fields of config.json, or of the image processor's, and a word of the message
    "no model_type": ({"model_type": None}, "without a model_type"),
    "remote code": ({"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}, "never run"),
    "unknown": ({"model_type": "bert"}, "vision model"),
    "naflex": ({"model_type": "siglip2"}, "NaFlex"),
    "timm": ({"model_type": "timm_wrapper"}, "timm:NAME"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "sigmoid": ({"problem_type": "multi_label_classification"}, "exclude each other"),
    "huge": ({"hidden_size": 2**20, "intermediate_size": 2**20}, "at most"),
    "layers": ({"num_hidden_layers": 10**6}, "at most 999 layers"),
    "type": ({"hidden_size": "wide"}, "config.json"),
    "activation": ({"hidden_act": "none"}, "config.json"),
    "shape": ({"hidden_size": 64}, "do not fit"),
    "one architecture": ({"architectures": "ViTForImageClassification"}, "a list as architectures"),
    "tower": ({"model_type": "clip", "vision_config": "wide"}, "a dict as vision_config"),
    "more layers": ({"num_hidden_layers": 3}, "missing"),
    "fewer labels": ({"id2label": {"0": "one"}}, "another shape"),
    "a label left out": (
        {"id2label": {number: number for number in "01235"}},
        "id2label from 0 to 4",
    ),
    "resampling": ({"file": PROCESSOR, "resample": 6}, "0 to 5"),
    "two edges": (
        {"file": PROCESSOR, "size": {"shortest_edge": 32, "longest_edge": 64}},
        "longest_edge",
    ),
    "padding": ({"file": PROCESSOR, "do_pad": True}, "do_pad"),
    "size": ({"file": PROCESSOR, "size": {"longest_edge": 5}}, "`int`"),
    "huge size": ({"file": PROCESSOR, "size": {"height": 10**6, "width": 32}}, "4096"),
    "mean": ({"file": PROCESSOR, "image_mean": ["a", 0, 0]}, "as numbers"),
    "std": ({"file": PROCESSOR, "image_std": [0, 0, 0]}, "std"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_and_processors_that_are_refused(tmp_path, case):
    fields, words = REFUSED[case]
    with one_line(InputError, words):
        vitlens.load(f"hf:{changed(tmp_path, **fields)}")


@pytest.mark.parametrize("kind", ["Owlv2ImageProcessor", ""])
def test_a_processor_that_is_missing_or_not_plain_is_replaced_by_mean_std_and_image_size(
    tmp_path, kind
):
    folder = changed(tmp_path, file=PROCESSOR, image_processor_type=kind)
    if not kind:
        (folder / PROCESSOR).unlink()
    settings = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "image_size": 32}
    for missing in settings:
        with pytest.raises(UnsupportedError, match="mean=, std= and image_size="):
            vitlens.load(
                f"hf:{folder}", **{key: value for key, value in settings.items() if key != missing}
            )
    model = vitlens.load(f"hf:{folder}", **settings)
    mean = torch.tensor(settings["mean"])[:, None, None]
    std = torch.tensor(settings["std"])[:, None, None]
    with torch.no_grad():
        expected = folder_of("vit")[1](pixel_values=(pixels() - mean) / std).logits
        torch.testing.assert_close(model(pixels()), expected, rtol=1e-5, atol=1e-5)
    assert "bilinear" in "\n".join(model.provenance.notes)


FOLDERS = {  # files written into a folder (None: removed), and a word of the message
    "no configuration": ({"config.json": None}, "save_pretrained"),
    "no JSON": ({"config.json": "{" * 100}, "JSON"),
    "no weights": ({"model.safetensors": None}, "found none"),
    "a pickle": (
        {"model.safetensors": None, "pytorch_model.bin": "x"},
        r"pytorch_model\.bin.*save_pretrained",
    ),
    "an adapter": ({"adapter_config.json": "{}"}, "write hf:BASE@"),
    "an index of other files": (
        {
            "model.safetensors": None,
            "model.safetensors.index.json": '{"weight_map": {"a": "../vit/w.safetensors"}}',
        },
        "found none",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_are_refused(tmp_path, case):
    files, words = FOLDERS[case]
    folder = changed(tmp_path)
    for name, content in files.items():
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with one_line(ModelError, words):
        vitlens.load(f"hf:{folder}")


@pytest.mark.parametrize("name", ["hf:", "hf:owner/..", "hf:./nothing", "hf:a/b/c", "hf:a b"])
def test_names_that_are_neither(name):
    with pytest.raises(ModelError, match=r"hf:FOLDER, or hf:REPO"):
        vitlens.load(name)


@pytest.mark.parametrize(
    "changes", [{"class": "AutoModel"}, {"config": "[]"}, {"class": 3}], ids=str
)
def test_a_saved_file_that_is_not_what_vitlens_wrote(tmp_path, changes):
    about = description(written(loaded("vit"), tmp_path))
    about["architecture"]["overrides"] |= changes
    rewrite(tmp_path, about)
    with one_line((ModelError, UnsupportedError)):
        vitlens.load(str(tmp_path))


@pytest.mark.parametrize("version", ["4.57.1", "5.3.0"])
def test_a_library_older_than_the_bound_of_the_package_is_refused(tmp_path, monkeypatch, version):
    settings = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    [requirement] = settings["project"]["optional-dependencies"]["hf"]
    oldest = requirement.partition(">=")[2]
    folder = written(loaded("vit"), tmp_path)
    monkeypatch.setattr("transformers.__version__", version)
    with one_line(ModelError, rf"transformers {oldest} or newer.*version {version}"):
        vitlens.load(str(folder))
    monkeypatch.setattr("transformers.__version__", f"{oldest}.0")
    vitlens.load(str(folder))
