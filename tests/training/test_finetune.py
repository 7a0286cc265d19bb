"""What is trained further, and what is not: gradients, modes, and that both come back."""

import pytest
import torch

from tests.training.tiny import CLASSES, tiny_specimen
from vitlens.errors import InputError
from vitlens.models.specimen import Specimen
from vitlens.models.zoo import load, untrained
from vitlens.training.finetune import partly_trainable, require_learned, trained_names, trained_share
from vitlens.training.optimiser import rate_shares


class BrokenError(Exception):
    """Raised in the middle of a training."""


def cnn() -> Specimen:
    return untrained("resnet20", classes=CLASSES)


def trained_after(specimen: Specimen, last: int | None) -> set[str]:
    """The parameters that have a gradient after one backward pass."""
    with partly_trainable(specimen, last=last):
        specimen(torch.rand(2, 3, *specimen.input_size)).square().sum().backward()
        return {name for name, value in specimen.model.named_parameters() if value.grad is not None}


def test_everything_the_last_block_or_the_head() -> None:
    names = [name for name, _ in tiny_specimen().model.named_parameters()]
    assert trained_after(tiny_specimen(), None) == set(names)
    assert trained_after(tiny_specimen(), 0) == {"head.weight", "head.bias"}
    last = {name for name in names if name.startswith(("blocks.1.", "norm.", "head."))}
    assert trained_after(tiny_specimen(), 1) == last == trained_names(tiny_specimen(), last=1)
    both = {name for name in names if name.startswith(("blocks.", "norm.", "head."))}
    assert trained_after(tiny_specimen(), 2) == both


def test_a_cnns_stages_and_its_head() -> None:
    found = trained_after(cnn(), 3)
    assert found == {name for name, _ in cnn().model.named_parameters() if name.startswith(("layer3.", "fc."))}


def test_both_heads_of_a_distilled_model() -> None:
    specimen = load("timm:deit_tiny_distilled_patch16_224", random_weights=True, image_size=(32, 32))
    assert trained_names(specimen, last=0) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}
    assert trained_share(specimen, last=0) == (2 * (192 * 1000 + 1000), specimen.parameter_count())
    assert trained_share(specimen, last=None)[0] == specimen.parameter_count()


@pytest.mark.parametrize("last", [0, 1])
def test_what_is_frozen_is_in_evaluation_mode_and_comes_back(last: int) -> None:
    specimen = tiny_specimen().eval().requires_grad_(False)
    first, second = specimen.model.get_submodule("blocks.0"), specimen.model.get_submodule("blocks.1")
    with partly_trainable(specimen, last=last):
        assert not any(module.training for module in first.modules())
        assert all(module.training for module in second.modules()) == bool(last)
        assert specimen.model.get_submodule("head").training
        assert not specimen.model.get_submodule("pos_drop").training
    with pytest.raises(BrokenError), partly_trainable(specimen, last=last):
        raise BrokenError
    assert not any(module.training for module in specimen.modules())
    assert not any(parameter.requires_grad for parameter in specimen.parameters())


def test_frozen_batch_statistics_stay() -> None:
    specimen = cnn()
    before = {name: value.clone() for name, value in specimen.model.named_buffers()}
    with partly_trainable(specimen, last=3):
        specimen(torch.rand(4, 3, 32, 32))
    after = dict(specimen.model.named_buffers())
    for name, value in before.items():
        assert torch.equal(after[name], value) == (not name.startswith("layer3.")), name


@pytest.mark.parametrize("last", [3, -1])
def test_more_blocks_than_there_are(last: int) -> None:
    with (
        pytest.raises(InputError, match=f"--train-last from 1 to 2, the blocks of vit-mini, found {last}"),
        partly_trainable(tiny_specimen(), last=last),
    ):
        pass


def test_nothing_learned_is_nothing_to_freeze() -> None:
    with pytest.raises(InputError, match="found vit-mini from scratch: there is nothing learned to freeze; give timm:"):
        require_learned(tiny_specimen(), option="--freeze-backbone")
    with pytest.raises(InputError, match="trained model with --train-last"):
        require_learned(load("vit-mini", random_weights=True), option="--train-last")
    require_learned(load("vit-digits"), option="--freeze-backbone")


def test_rates_by_depth_by_hand() -> None:
    """BEiT's convention: rate x decay^(depth + 1 - layer), embeddings layer 0, block i layer i + 1, head depth + 1."""
    specimen = tiny_specimen()  # two blocks
    shares = rate_shares(specimen.model, specimen.anatomy.blocks, decay=0.5)
    by_hand = {
        "cls_token": 1 / 8,
        "pos_embed": 1 / 8,
        "patch_embed.proj.weight": 1 / 8,
        "blocks.0.attn.qkv.weight": 1 / 4,
    }
    by_hand |= {"blocks.1.mlp.fc2.bias": 1 / 2, "norm.weight": 1.0, "head.weight": 1.0, "head.bias": 1.0}
    assert {name: shares[name] for name in by_hand} == by_hand
    assert set(shares.values()) == {1 / 8, 1 / 4, 1 / 2, 1.0}
