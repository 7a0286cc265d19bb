import shutil

import pytest
import torch

from tests.kit.trainings import tiny_model
from vitlens.training import speed
from vitlens.training.speed import choose_compiling, choose_precision, fast_attention, gradient_checkpointing

CPU = torch.device("cpu")


def test_auto_is_bf16_where_the_device_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for able, precision in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(speed, "multiplies_bf16", lambda _, able=able: able)
        assert choose_precision(CPU, "auto") == (precision, f"precision {precision} (chosen)")
    assert choose_precision(CPU, "fp32") == ("fp32", "precision fp32 (given)")


@pytest.mark.parametrize(
    ("asked", "steps", "compiler", "compiled", "note"),
    [
        ("auto", 2000, "g++", True, "compile on (2000 steps)"),
        ("auto", 1999, "g++", False, "compile off (1999 steps)"),
        ("auto", 2000, "clang++", True, "compile on (2000 steps)"),
        ("auto", 2000, "", False, "compile off (no compiler found)"),
        ("off", 2000, "g++", False, "compile off (given)"),
        ("on", 1, "", True, "compile on (given)"),
    ],
)
def test_auto_compiles_long_trainings_where_it_can(
    asked: str, steps: int, compiler: str, compiled: bool, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name == compiler else None)
    assert choose_compiling(CPU, asked, steps=steps) == (compiled, note)


def test_recomputed_blocks_give_the_same_gradients_from_fewer_saved_tensors() -> None:
    model = tiny_model(drop_path=0.3, dropout=0.2).train().requires_grad_(True)
    images = torch.rand(4, 3, 8, 12, generator=torch.Generator().manual_seed(0))

    def gradients() -> tuple[list[torch.Tensor], int]:
        model.zero_grad()
        saved: list[int] = []
        torch.manual_seed(5)

        def count(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(images).square().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], sum(saved)

    plain, kept = gradients()
    with gradient_checkpointing(model):
        again, fewer = gradients()
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(plain, again, strict=True))
    assert fewer < kept / 2


def test_blocks_come_back_as_they_were_also_after_an_exception() -> None:
    model = tiny_model()
    with gradient_checkpointing(model):
        assert all("forward" in block.__dict__ for block in model.module.blocks)
    with pytest.raises(RuntimeError), gradient_checkpointing(model):
        raise RuntimeError
    assert not any("forward" in block.__dict__ for block in model.module.blocks)


def test_attention_over_few_tokens_uses_matrix_products_in_training_on_a_cpu() -> None:
    model = tiny_model().eval()
    images = torch.rand(4, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    expected = model(images)
    with fast_attention(model, CPU):
        assert [block.attn.fused for block in model.module.blocks] == [False, False]
        assert torch.allclose(model(images), expected, atol=1e-6)
    with pytest.raises(RuntimeError), fast_attention(model, CPU):
        raise RuntimeError
    assert [block.attn.fused for block in model.module.blocks] == [True, True]
    with fast_attention(model, torch.device("cuda")):
        assert all(block.attn.fused for block in model.module.blocks)
