"""Devices and precisions: requests against what is available, and settings that come back."""

from contextlib import suppress

import pytest
import torch

from vitlens.devices import as_device, autocast, device_name, in_bf16, one_thread, resolve_device
from vitlens.errors import InputError, UnknownNameError

CPU = torch.device("cpu")
attention = torch.nn.functional.scaled_dot_product_attention


def pretend(monkeypatch, *, cuda: int = 0, mps: bool = False, bf16: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


def test_auto_takes_the_best_there_is_and_what_is_not_there_is_refused(monkeypatch):
    for cuda, mps, expected in (
        (0, False, "cpu"),
        (0, True, "mps"),
        (1, False, "cuda"),
        (2, True, "cuda"),
    ):
        pretend(monkeypatch, cuda=cuda, mps=mps)
        assert resolve_device() == torch.device(expected)
    for name in ("cpu", "cuda", "cuda:1", "mps"):  # of two cards and Apple's
        assert resolve_device(name) == torch.device(name)
    for name in ("gpu", "cuda:", "cpu:0", "", "CUDA", "cuda:-1"):
        with pytest.raises(InputError, match="auto, cpu, cuda, cuda:N or mps"):
            resolve_device(name)
    for name, meant in (
        ("gpu", "cuda"),
        ("GPU:1", "cuda:1"),
        ("0", "cuda:0"),
        ("cuda1", "cuda:1"),
        ("metal", "mps"),
    ):
        with pytest.raises(InputError, match=f"did you mean '{meant}'"):
            resolve_device(name)
    for name, cuda in (("cuda", 0), ("cuda:1", 1), ("mps", 0)):
        pretend(monkeypatch, cuda=cuda)
        with pytest.raises(InputError, match="device='cpu'"):
            resolve_device(name)


def test_the_device_of_a_tensor_is_taken_where_it_is_there(monkeypatch):
    """That of a tensor on Apple's device is mps:0, which is no name that is typed."""
    pretend(monkeypatch, cuda=1, mps=True)
    for name in ("cpu", "meta", "cuda:0", "mps", "mps:0"):
        assert as_device(torch.device(name)) == torch.device(name)
    pretend(monkeypatch)
    for name in ("cuda:0", "mps:0"):
        with pytest.raises(InputError, match="device='cpu'"):
            as_device(torch.device(name))


def test_precision(monkeypatch):
    assert device_name(CPU)
    for precision, dtype in (
        ("fp32", torch.float32),
        ("auto", torch.float32),
        ("bf16", torch.bfloat16),
    ):
        with autocast(CPU, precision):
            assert (torch.rand(2, 2) @ torch.rand(2, 2)).dtype == dtype
    with pytest.raises(UnknownNameError):
        autocast(CPU, "fp16")
    for bf16 in (True, False):  # on a card that multiplies in it, or not
        pretend(monkeypatch, cuda=1, bf16=bf16)
        in_half = [
            in_bf16(torch.device("cuda"), precision) for precision in ("auto", "fp32", "bf16")
        ]
        assert in_half == [bf16, False, True]


@pytest.mark.parametrize("before", [True, False])
def test_fp32_on_cuda_is_fp32_in_convolutions(before, monkeypatch):
    """cuDNN would compute them in TF32, with 11 bits; the setting is the user's again
    afterwards."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    inside = []
    with suppress(ZeroDivisionError), autocast(torch.device("cuda"), "fp32"):
        inside.append(torch.backends.cudnn.allow_tf32)
        raise ZeroDivisionError
    assert inside == [False]
    assert torch.backends.cudnn.allow_tf32 == before


def test_threads_come_back():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with suppress(ZeroDivisionError), one_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def heads(tokens: int, dim: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, 2, tokens, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]


def test_attention_keeps_fp32_on_a_cpu_where_a_gradient_is_wanted_and_products_are_slow(
    monkeypatch,
):
    monkeypatch.setattr("vitlens.devices.multiplies_bf16", lambda _: False)
    query, key, value = heads(5)
    with autocast(CPU, "bf16"):
        assert attention(query, key, value).dtype == torch.float32
        assert (query @ key.transpose(-1, -2)).dtype == torch.bfloat16
        output = attention(query, key, value, attn_mask=torch.zeros(5, 5, dtype=torch.bfloat16))
        with torch.no_grad():
            assert attention(query, key, value).dtype == torch.bfloat16
    torch.testing.assert_close(
        output, attention(query.float(), key.float(), value.float()), atol=1e-6, rtol=1e-5
    )
    assert attention(query, key, value).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options", [{"scale": 0.2}, {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}]
)
def test_attention_by_products_is_attention_to_the_rounding_of_bf16(monkeypatch, options):
    monkeypatch.setattr("vitlens.devices.multiplies_bf16", lambda _: True)
    parts = heads(5)
    with autocast(CPU, "bf16"):
        output = attention(*parts, **options)
        masked = {"attn_mask": torch.zeros(5, 5, dtype=torch.bfloat16)}
        to_kernel = [(41, {}), (5, {"dropout_p": 0.5}), (5, {"is_causal": True}), (5, masked)]
        assert {attention(*heads(tokens), **more).dtype for tokens, more in to_kernel} == {
            torch.float32
        }
    assert output.dtype == torch.bfloat16
    wide = [part.detach().float().requires_grad_() for part in parts]
    exact = attention(*wide, **options)
    weights = torch.randn_like(exact)
    pairs = zip(
        torch.autograd.grad((output * weights).sum(), parts),
        torch.autograd.grad((exact * weights).sum(), wide),
    )
    for ours, theirs in [(output, exact), *pairs]:
        error = (ours.float() - theirs).abs().max() / theirs.abs().max()
        assert 0 < error < 2**-5
