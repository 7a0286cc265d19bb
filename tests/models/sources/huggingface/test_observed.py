"""What the lens sees of transformers' models: attention under sdpa equals transformers' own eager attention."""

import pytest
import torch

import vitlens
from tests.lens.oracles import unwindow
from tests.models.sources.huggingface.tiny import FAMILIES, TOWERS
from vitlens.lens.capture import capture_attention
from vitlens.lens.observe import observe
from vitlens.models.pretraining import pretraining_of

transformers = pytest.importorskip("transformers", minversion="5", reason="the extra hf is not installed")

SEQUENCES = {  # family -> the prefix of its tokens, and what reads them
    "vit": (("cls",), "cls"),
    "vit-features": (("cls",), "cls"),
    "deit": (("cls", "distillation"), "cls"),
    "deit-distilled": (("cls", "distillation"), "cls+distillation"),
    "beit": (("cls",), "mean"),
    "beit-shared": (("cls",), "mean"),
    "dinov2": (("cls",), "cls"),
    "dinov2-features": (("cls",), "cls"),
    "dinov2-registers": (("cls", "register", "register"), "cls"),
    "dinov3": (("cls", *["register"] * 4), "cls"),
    "clip-vision": (("cls",), "cls"),
    "clip-projected": (("cls",), "cls"),
    "clip": (("cls",), "cls"),
    "clip-classifier": (("cls",), "mean"),
    "siglip-vision": ((), "pool"),
    "siglip": ((), "pool"),
    "siglip-classifier": ((), "mean"),  # its pooling head runs, but is not read
}
# and the others of FAMILIES
OTHERS = {"swin": "windowed", "swin-features": "windowed", "swinv2": "windowed", "convnext": "cnn", "convnextv2": "cnn"}


def pixels():
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", SEQUENCES)
def test_attention_under_sdpa_is_transformers_own_eager_attention(folders, name):
    folder, own = folders(name)
    model = vitlens.load(f"hf:{folder}")
    prefix, readout = SEQUENCES[name]
    assert model.layout.prefix == prefix
    assert model.layout.grid == (4, 4)
    assert model.anatomy.readout == readout
    assert len(model.anatomy.blocks) == 2
    own.set_attn_implementation("eager")
    eager = TOWERS.get(name, lambda whole: whole)(own)
    with torch.no_grad():
        expected = eager(pixel_values=model.prepare(pixels()), output_attentions=True).attentions
        observed = vitlens.attention(model, pixels())
    own.set_attn_implementation("sdpa")
    kernels = {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")}
    assert kernels == {"sdpa"}
    pooled = model.anatomy.readout == "pool"  # by attention of one query, which transformers does not return
    assert [layer.shape[-2] for layer in observed] == [layer.shape[-2] for layer in expected] + [1] * pooled
    for theirs, ours in zip(expected, observed):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_families_without_one_sequence_of_tokens(folders, name):
    model = vitlens.load(f"hf:{folders(name)[0]}")
    assert model.anatomy.family == OTHERS[name]
    assert model.supports("explain") is None
    assert (model.supports("stats") is None) == (OTHERS[name] == "windowed")
    assert vitlens.load(f"hf:{folders('vit')[0]}").supports("walkthrough") is None


@pytest.mark.parametrize("name", ["swin", "swinv2"])
def test_windows_under_the_default_kernel_are_transformers_own_eager_attention(folders, name):
    folder, own = folders(name)
    model = vitlens.load(f"hf:{folder}")
    before = own.config._attn_implementation
    own.set_attn_implementation("eager")
    with torch.no_grad():
        expected = own(pixel_values=model.prepare(pixels()), output_attentions=True).attentions
        observed = capture_attention(model, pixels()).layers
    own.set_attn_implementation(before)
    assert len(observed) == 4
    for theirs, ours in zip(expected, observed[1::2]):  # transformers returns the last block of each stage
        torch.testing.assert_close(ours.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [4, 5])  # 5: the map of 16 x 16 is padded
@pytest.mark.parametrize("name", ["swin", "swinv2"])
def test_windows_are_placed_where_patches_depend_on_each_other(name, window):
    family, kind, fields, _, _ = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**fields | {"window_size": window})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        own = getattr(transformers, family + kind)(config).eval()
    model = vitlens.wrap(own, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    for layer, placed in zip(model.anatomy.blocks[:2], attended(model)):  # the second one's windows are shifted
        block, tokens = model.module.get_submodule(layer), torch.randn(1, 256, 16).requires_grad_()
        output = block(tokens, (16, 16))[0]
        for patch in (0, 37, 255):
            (gradient,) = torch.autograd.grad(output[0, patch].square().sum(), tokens, retain_graph=True)
            assert torch.equal(gradient[0].abs().sum(1) > 1e-12, placed[patch])


def attended(model):
    """Of each layer: whether each patch of the map attends to each other, (patches, patches)."""
    placed = []

    def keep(call):
        placed.append(unwindow(call.weights(), call.site.windows)[0].mean(0) > 1e-12)  # masked by -100, not by -inf

    observe(model, pixels()[:1], keep)
    return placed


@pytest.mark.parametrize("kernel", ["flex_attention", "kernels-community/flash-attn"])
def test_a_kernel_that_cannot_be_observed_is_refused_by_name(folders, kernel):
    _, own = folders("vit")
    before = own.config._attn_implementation
    try:
        own.config._attn_implementation_internal = kernel
        with pytest.raises(vitlens.errors.UnsupportedError, match=f"found '{kernel}'.*set_attn_implementation"):
            vitlens.wrap(own, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    finally:
        own.config._attn_implementation_internal = before
    wrapped = vitlens.wrap(own, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    with torch.no_grad():
        assert torch.equal(wrapped(pixels()), own((pixels() - 0.5) / 0.5).logits)


@pytest.mark.parametrize("name", ["vit", "deit-distilled", "dinov3", "clip", "siglip", "swin", "swinv2"])
def test_the_embedding_is_transformers_own_first_hidden_state(folders, name):
    folder, own = folders(name)
    model = vitlens.load(f"hf:{folder}")
    tower = TOWERS.get(name, lambda whole: whole)(own)
    with torch.no_grad():
        first = tower(pixel_values=model.prepare(pixels()), output_hidden_states=True).hidden_states[0]
    prefix = len(SEQUENCES[name][0]) if name in SEQUENCES else 0
    found = vitlens.features(model, pixels(), embedding=True)
    torch.testing.assert_close(found.at("embedding"), first[:, prefix:].mean(1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit", ("not known", "")),  # the architecture of supervised models and of DINO
        ("dinov2-features", ("self-supervised", "DINOv2")),
        ("dinov3", ("self-supervised", "DINOv3")),
        ("beit", ("self-supervised", "BEiT")),
        ("clip", ("language-image", "CLIP")),
        ("clip-vision", ("language-image", "CLIP")),
        ("siglip", ("language-image", "SigLIP")),
        ("swin", ("not known", "")),
    ],
)
def test_the_pretraining_of_a_folder_is_that_of_its_model_type(folders, name, expected):
    folder, _ = folders(name)
    read = pretraining_of(vitlens.load(f"hf:{folder}"))
    assert (read.objective, read.recipe) == expected
