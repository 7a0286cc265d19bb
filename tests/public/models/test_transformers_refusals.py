"""Folders of transformers that are refused: configurations, processors, files, names."""

import pytest
import torch

import vitlens
from tests.kit.models.files import description, rewrite, written
from tests.kit.models.transformers import changed, folder_of, pixels
from vitlens.errors import InputError, ModelError, UnsupportedError

pytest.importorskip("transformers", minversion="5", reason="the extra hf is not installed")

FIVE = {number: number for number in "01235"}
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
    "one architecture": ({"architectures": "ViTForImageClassification"}, "a list as architectures"),
    "tower": ({"model_type": "clip", "vision_config": "wide"}, "a dict as vision_config"),
    "more layers": ({"num_hidden_layers": 3}, "missing"),
    "fewer labels": ({"id2label": {"0": "one"}}, "another shape"),
    "a label left out": ({"id2label": FIVE}, "id2label from 0 to 4"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(tmp_path, case):
    fields, words = CONFIGS[case]
    with pytest.raises(InputError, match=words) as caught:
        vitlens.load(f"hf:{changed(tmp_path, **fields)}")
    assert "\n" not in str(caught.value)


PROCESSORS = {
    "resampling": ({"resample": 1}, "bicubic"),
    "padding": ({"do_pad": True}, "do_pad"),
    "another processor": ({"image_processor_type": "Owlv2ImageProcessor"}, "Owlv2ImageProcessor"),
    "size": ({"size": {"longest_edge": 5}}, "`int`"),
    "huge size": ({"size": {"height": 10**6, "width": 32}}, "4096"),
    "factor": ({"rescale_factor": "x"}, "as numbers"),
    "crop": ({"image_processor_type": "ConvNextImageProcessor", "size": 32, "crop_pct": 0}, "as numbers"),
    "mean": ({"image_mean": ["a", 0, 0]}, "as numbers"),
    "std": ({"image_std": [0, 0, 0]}, "std"),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_processors(tmp_path, case):
    fields, words = PROCESSORS[case]
    with pytest.raises(InputError, match=words) as caught:
        vitlens.load(f"hf:{changed(tmp_path, file='preprocessor_config.json', **fields)}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Owlv2ImageProcessor", ""])
def test_a_processor_that_is_missing_or_not_plain_is_replaced_by_mean_std_and_image_size(tmp_path, kind):
    folder = changed(tmp_path, file="preprocessor_config.json", image_processor_type=kind)
    if not kind:
        (folder / "preprocessor_config.json").unlink()
    given = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "image_size": 32}
    for missing in given:
        with pytest.raises(UnsupportedError, match="--mean, --std and --image-size"):
            vitlens.load(f"hf:{folder}", **{key: value for key, value in given.items() if key != missing})
    model = vitlens.load(f"hf:{folder}", **given)
    mean, std = (torch.tensor(given[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        expected = folder_of("vit")[1](pixel_values=(pixels() - mean) / std).logits
        torch.testing.assert_close(model(pixels()), expected, rtol=1e-5, atol=1e-5)
    assert any("bilinear" in note for note in model.provenance.notes)


FOLDERS = {  # files written into a folder (None: removed), and a word of the message
    "no configuration": ({"config.json": None}, "save_pretrained"),
    "no JSON": ({"config.json": "{" * 100}, "JSON"),
    "no weights": ({"model.safetensors": None}, "found none"),
    "a pickle": ({"model.safetensors": None, "pytorch_model.bin": "x"}, r"pytorch_model\.bin alone.*save_pretrained"),
    "an adapter": ({"adapter_config.json": "{}"}, "merge_and_unload"),
    "an index of other files": (
        {"model.safetensors": None, "model.safetensors.index.json": '{"weight_map": {"a": "../vit/w.safetensors"}}'},
        "found none",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders(tmp_path, case):
    files, words = FOLDERS[case]
    folder = changed(tmp_path)
    for name, content in files.items():
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(ModelError, match=words) as caught:
        vitlens.load(f"hf:{folder}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hf:", "hf:owner/..", "hf:./nothing", "hf:a/b/c", "hf:a b"])
def test_names(name):
    with pytest.raises(ModelError, match=r"hf:FOLDER, or hf:REPO"):
        vitlens.load(name)


@pytest.mark.parametrize(
    "changes", [{"class": "AutoModel"}, {"config": "[]"}, {"config": '{"model_type": "bert"}'}, {"class": 3}], ids=str
)
def test_a_saved_file_that_is_not_what_vitlens_wrote(tmp_path, changes):
    about = description(written(vitlens.load(f"hf:{folder_of('vit')[0]}"), tmp_path))
    about["architecture"]["overrides"] |= changes
    rewrite(tmp_path, about)
    with pytest.raises((ModelError, UnsupportedError)) as caught:
        vitlens.load(str(tmp_path))
    assert "\n" not in str(caught.value)
