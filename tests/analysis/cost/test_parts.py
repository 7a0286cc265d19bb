"""Parts of a model: every parameter has one, and the counts are those that follow from the shapes."""

import pytest

from tests.lens.tiny import EACH_FAMILY, shared_model, timm_model
from vitlens.analysis.cost.flops import (
    BETWEEN,
    EMBEDDING,
    HEAD,
    MLP,
    NORMS,
    OTHER,
    PARTS,
    POSITIONS,
    PROJECTIONS,
    STEM,
    Parts,
    in_order,
    parameters_by_part,
)
from vitlens.models.loading import load


@pytest.mark.parametrize(
    ("name", "count"), [("vit-micro", 1_205_898), ("vit-tiny", 2_693_578), ("vit-mini", 809_354), ("resnet20", 269_722)]
)
def test_the_counts_of_the_presets_follow_from_their_shapes(name, count):
    model = load(name, random_weights=True)
    assert sum(parameters_by_part(model).values()) == model.parameter_count() == count


def test_every_part_of_our_vit_has_what_its_shape_says():
    dim, depth, hidden, tokens = 128, 6, 512, 65
    assert parameters_by_part(load("vit-micro", random_weights=True)) == {
        EMBEDDING: 3 * 4 * 4 * dim + dim,
        POSITIONS: tokens * dim + dim,  # and the CLS token
        PROJECTIONS: depth * (4 * dim * dim + 4 * dim),
        MLP: depth * (2 * dim * hidden + hidden + dim),
        NORMS: (2 * depth + 1) * 2 * dim,
        HEAD: 10 * dim + 10,
    }


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_parameter_of_every_family_has_a_known_part(family):
    model = shared_model(family)
    found = parameters_by_part(model)
    assert sum(found.values()) == model.parameter_count()
    assert set(found) <= set(PARTS) - {OTHER}
    assert {EMBEDDING, PROJECTIONS, MLP, NORMS, HEAD} <= set(found)


def test_what_stands_between_the_stages_of_swin_is_its_patch_merging():
    model = timm_model("swin_tiny_patch4_window7_224")
    found = parameters_by_part(model)
    assert found[BETWEEN] == 4 * 16 * 32  # without its norm
    assert found[POSITIONS] == sum(
        value.numel() for name, value in model.module.named_parameters() if "relative_position_bias_table" in name
    )


@pytest.mark.parametrize("family", ["torchvision-vit", "torchvision-swin", "beit", "swinv2", "siglip"])
def test_positions_are_found_under_every_library_s_names(family):
    parts = Parts(shared_model(family))
    names = {
        "torchvision-vit": ["encoder.pos_embedding", "class_token"],
        "torchvision-swin": ["features.1.0.attn.relative_position_bias_table"],
        "beit": ["cls_token", "blocks.0.attn.relative_position_bias_table"],
        "swinv2": ["layers.0.blocks.0.attn.cpb_mlp.0.weight"],
        "siglip": ["pos_embed", "attn_pool.latent"],
    }[family]
    assert {parts.of_parameter(name) for name in names} == {POSITIONS}


def test_a_cnn_has_a_stem_and_stages_and_a_head():
    found = parameters_by_part(load("resnet20", random_weights=True))
    blocks = {16: 6 * (9 * 16 * 16 + 2 * 16)}
    for channels in (32, 64):  # the first convolution of a stage comes from half the channels
        blocks[channels] = 9 * channels * channels // 2 + 5 * 9 * channels * channels + 6 * 2 * channels
    assert found == {
        STEM: 27 * 16 + 2 * 16,
        "stage 0": blocks[16],
        "stage 1": blocks[32],
        "stage 2": blocks[64],
        HEAD: 650,
    }


def test_downsampling_is_counted_with_the_stage_that_it_leads_to():
    parts = Parts(load("torchvision:convnext_tiny", random_weights=True))
    places = {"features.0.0": STEM, "features.1.2.block.0": "stage 0", "features.2.1": "stage 1", "classifier.2": HEAD}
    assert {name: parts.of_module(name) for name in places} == places


def test_parts_stand_in_the_order_of_a_forward_pass():
    shuffled = [HEAD, "stage 10", MLP, "stage 2", STEM, MLP]
    assert in_order(shuffled) == [STEM, MLP, "stage 2", "stage 10", HEAD]
