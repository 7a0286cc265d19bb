"""Photographs against the transforms of timm, torchvision, open_clip and transformers."""

from pathlib import Path

import pytest
import timm
import torch
import torchvision
from PIL import Image
from timm.data import create_transform, resolve_data_config

import vitlens
from tests.kit.models.evaluations import (
    prepared,
    preprocessing_of_timm,
    preprocessing_of_torchvision,
    write_photographs,
)
from tests.kit.models.transformers import changed

TIMM = {  # weights of each rule
    "vit_base_patch16_224.augreg_in21k_ft_in1k": "crop of the centre",
    "eva02_base_patch14_448.mim_in22k_ft_in22k_in1k": "squash",
    "convnext_base.clip_laion2b_augreg_ft_in12k_in1k_384": "squash",
    "vit_base_patch16_sapiens2.fb": "squash, not square",
    "volo_d4_448.sail_in1k": "a crop that is larger than the image",
    "resnet50.tv_in1k": "bilinear",
}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_photographs(tmp_path_factory.mktemp("photographs"))


def opened(files: list[Path]) -> list[Image.Image]:
    return [Image.open(file).convert("RGB") for file in files]


def timm_pixels(name: str, files: list[Path], **changes: object) -> torch.Tensor:
    config = resolve_data_config(
        changes, pretrained_cfg=timm.models.get_pretrained_cfg(name).to_dict()
    )
    transform = create_transform(**config, is_training=False, normalize=False)
    return torch.stack([transform(image) for image in opened(files)])


def with_border() -> list[str]:
    configs = ((name, timm.models.get_pretrained_cfg(name)) for name in timm.list_pretrained())
    return [name for name, config in configs if config.crop_mode == "border"]


def with_part_squashed() -> list[str]:
    configs = ((name, timm.models.get_pretrained_cfg(name)) for name in timm.list_pretrained())
    return [
        name for name, config in configs if config.crop_mode == "squash" and config.crop_pct < 1
    ]


# an older timm lacks some of them
KNOWN = [name for name in TIMM if name in timm.list_pretrained()]


@pytest.mark.parametrize("name", [*KNOWN, *with_border()[:1], *with_part_squashed()[:1]])
def test_pixels_are_those_of_timms_evaluation(name, photographs):
    assert torch.equal(
        prepared(photographs, preprocessing_of_timm(name)), timm_pixels(name, photographs)
    )


@pytest.mark.parametrize("name", [*KNOWN, *with_border()[:1]])
def test_another_size_that_is_not_square_is_prepared_as_by_timm(name, photographs):
    expected = timm_pixels(name, photographs, input_size=(3, 96, 160))
    assert torch.equal(prepared(photographs, preprocessing_of_timm(name, (96, 160))), expected)


@pytest.mark.slow
def test_pixels_are_those_of_timms_evaluation_for_all_of_its_weights(photographs, real_data):
    files = [*photographs, *sorted(real_data.glob("photos/*/*"))[::60]]
    compared = set()
    for name in timm.list_pretrained():
        preprocessing = preprocessing_of_timm(name)
        config = timm.models.get_pretrained_cfg(name)
        rule = (
            preprocessing.geometry,
            config.crop_mode,
            config.crop_pct,
            config.interpolation,
            config.input_size,
        )
        assert (preprocessing.mean, preprocessing.std) == (config.mean, config.std)
        if rule not in compared:
            compared.add(rule)
            assert torch.equal(prepared(files, preprocessing), timm_pixels(name, files)), name
    assert len(compared) > 100


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_pixels_are_those_of_torchvisions_transforms(step, photographs):
    for name in torchvision.models.list_models(module=torchvision.models)[::step]:
        transforms = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        transforms.mean = [0.0] * 3
        transforms.std = [1.0] * 3
        expected = torch.stack([transforms(image) for image in opened(photographs)])
        pixels = prepared(photographs, preprocessing_of_torchvision(name))
        assert torch.equal(pixels, (255 * expected).round().byte()), name


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("resize_mode", ["shortest", "longest", "squash"])
def test_pixels_are_those_of_open_clips_transform(
    resize_mode, interpolation, photographs, monkeypatch
):
    open_clip = pytest.importorskip(
        "open_clip", reason="needs the extra clip: pip install open_clip_torch"
    )
    from tests.kit.models.clip import tiny

    settings = {
        "resize_mode": resize_mode,
        "interpolation": interpolation,
        "mean": (0.5,) * 3,
        "std": (0.25,) * 3,
    }
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", lambda _: ["planted"])
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda *_: settings)
    model = tiny()
    transform = open_clip.transform.image_transform_v2(
        open_clip.transform.PreprocessCfg(
            **open_clip.get_model_preprocess_cfg(model.module.text.model)
        ),
        is_train=False,
    )
    expected = torch.stack([transform(image) for image in opened(photographs)])
    pixels = model.prepare(vitlens.images(photographs, model))
    torch.testing.assert_close(pixels, expected, atol=1e-5, rtol=0)


SHORT_SIDE = {
    "size": {"shortest_edge": 43},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
}
WHOLE = {"size": {"height": 32, "width": 32}}
LARGER = {
    "size": {"height": 45, "width": 52},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
}
SMALLER = {
    "size": {"height": 26, "width": 26},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
}
PROCESSORS = [
    ("ViT", WHOLE),
    ("ViT", WHOLE | {"resample": 1}),
    ("DeiT", LARGER),
    ("DeiT", SMALLER),
    ("CLIP", SHORT_SIDE),
    ("CLIP", LARGER),
    ("ChineseCLIP", SHORT_SIDE),
    ("Siglip", WHOLE),
    ("Beit", LARGER),
    ("Bit", SHORT_SIDE),
    ("ConvNext", {"size": {"shortest_edge": 32}, "crop_pct": 0.875}),
    pytest.param("ConvNext", {"size": {"shortest_edge": 384}}, marks=pytest.mark.slow),
    ("EfficientNet", WHOLE | {"include_top": True, "resample": 0}),
    (
        "EfficientNet",
        LARGER | {"include_top": False, "rescale_offset": True, "rescale_factor": 1 / 127.5},
    ),
    ("Levit", SHORT_SIDE | {"size": {"shortest_edge": 32}}),
    ("MobileNetV1", SHORT_SIDE),
    ("MobileNetV2", SHORT_SIDE),
    ("PoolFormer", SHORT_SIDE | {"crop_pct": 0.9}),
    ("PoolFormer", LARGER | {"crop_pct": 0.9}),
    ("Pvt", WHOLE),
    ("Segformer", WHOLE),
]


@pytest.mark.parametrize(("family", "fields"), PROCESSORS)
def test_pixels_are_those_of_transformers_processors(family, fields, photographs, tmp_path):
    """Equal to those resized by Pillow; the default, torchvision's resizing, rounds some 8-bit
    values differently.
    """
    transformers = pytest.importorskip(
        "transformers", minversion="5", reason="the extra hf is not installed"
    )
    folder = changed(
        tmp_path,
        file="preprocessor_config.json",
        image_processor_type=f"{family}ImageProcessor",
        **fields,
    )
    model = vitlens.load(f"hf:{folder}")
    pixels = model.prepare(vitlens.images(photographs, model))
    for backend, tolerance in (("pil", 1e-5), ("torchvision", 3 / 255)):
        if backend == "torchvision" and fields.get("resample") in (0, 1):
            # its nearest pixel is another one, and its Lanczos in 8 bits differs by 1 or 5 between
            # machines
            continue
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
        expected = processor(opened(photographs), return_tensors="pt")["pixel_values"]
        difference = (pixels - expected).abs() * model.std
        assert difference.max() <= tolerance
        assert difference.mean() < 0.1 / 255
