"""The script for a GPU, on a CPU: every part runs small, resumes, and never passes for a GPU."""

import json
import time

import pytest
import torch

from benchmarks.gpu import registry, train
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.machine import Machine, peak_of
from benchmarks.gpu.profile import Busy, kind_of, summary
from benchmarks.gpu.registry import PARTS, Part
from benchmarks.gpu.rows import Row, Rows
from benchmarks.gpu.session import OutOfTimeError, Session
from benchmarks.gpu.table import TINY
from tests.kit.marks import slow_among
from tests.kit.select import select, values_of

CPU = torch.device("cpu")
LONG = ("ablation", "observation", "attacks", "profile", "train")  # over 5 s on a busy core


@pytest.fixture
def session(tmp_path):
    return Session(
        CPU, Machine("a processor", "versions", None), Rows(tmp_path / "gpu.jsonl"), part="any"
    )


@pytest.mark.filterwarnings("ignore")  # of torch's compiler and profiler, and of foolbox
@pytest.mark.parametrize("name", slow_among(PARTS, LONG))
def test_a_part_runs_small_on_a_cpu_and_measures_nothing_twice(name, tmp_path, capsys):
    out = tmp_path / "gpu.jsonl"
    line = ["--part", name, "--device", "cpu", "--out", str(out)]
    assert main(line) == 0, capsys.readouterr().err
    rows = Rows(out).rows
    checks = select(rows, kind="check")
    cases = select(rows, kind="case")
    assert {row.values["result"] for row in checks} <= {"passed"}
    assert cases
    for row in rows:
        assert row.tiny
        assert row.part == name
    for row in rows:
        for value in row.values.values():
            assert value is None or value == value, "NaN"
    page = (tmp_path / "gpu.md").read_text()
    assert TINY in page
    for row in cases:
        assert f"| {row.case} |" in page
    before = out.read_bytes()
    assert main(line) == 0
    assert out.read_bytes() == before


def with_part(monkeypatch, run):
    monkeypatch.setattr(Part, "run", property(lambda _: run))
    monkeypatch.setitem(registry.PARTS, "any", Part("any", "Any", "nowhere"))


def test_training_without_data_says_what_to_add(tmp_path, monkeypatch, capsys):
    with_part(monkeypatch, lambda session: train._data(Session(CPU, session.machine, session.rows)))
    assert main(["--part", "any", "--out", str(tmp_path / "gpu.jsonl")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("add --data TRAIN.zip,TEST.zip")


def test_a_part_stops_when_its_time_is_up_and_the_next_run_goes_on(
    session, tmp_path, monkeypatch, capsys
):
    runs = []

    def run(session):
        for name in ("quick", "slow"):
            session.case(name, lambda _, name=name: measured(name), batch=1)

    def measured(name):
        runs.append(name)
        if name == "slow" and runs.count("slow") == 1:
            time.sleep(30)
        return {"seconds": 1.0}

    with_part(monkeypatch, run)
    out = tmp_path / "gpu.jsonl"
    line = ["--part", "any", "--seconds", "0.3", "--out", str(out)]
    began = time.monotonic()
    assert main(line) == 1
    assert time.monotonic() - began < 10
    assert "missing: any, the rest: the 0 s of a part were up" in capsys.readouterr().err
    assert values_of(Rows(out).rows, "case") == ["quick"]
    assert main(line) == 0
    assert runs == ["quick", "slow", "slow"]
    assert values_of(Rows(out).rows, "case") == ["quick", "slow"]
    session.seconds = 5
    # the time left is too short for it: not begun
    with pytest.raises(OutOfTimeError, match="long"):
        session.case("long", lambda _: pytest.fail("begun"), batch=1, needs=60)


def test_too_little_memory_halves_the_batch_and_says_what_fits(session, capsys):
    tried = []

    def measure(batch):
        tried.append(batch)
        if batch > 20:
            raise torch.OutOfMemoryError
        return {"images/s": 3.0}

    session.case("bf16", measure, batch=128)
    assert tried == [128, 64, 32, 16]
    (row,) = session.rows.rows
    assert (row.values["images at a time"], row.values["out of memory at"]) == (16, 32)
    said = capsys.readouterr().err.splitlines()
    assert said == ["any, bf16: out of memory with 32 images at a time; --batch-size 16 fits"]
    session.case("huge", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError()), batch=4)
    assert session.missing == ["any, huge: out of memory with a single image"]


@pytest.mark.parametrize(("off", "passed"), [(0.9e-4, True), (1.1e-4, False)])
def test_a_check_holds_to_its_tolerance_relative_to_the_largest_value(session, off, passed):
    values = iter([torch.tensor([5.0, 10.0]), torch.tensor([5.0, 10.0 * (1 + off)])])
    with session.of_part("any", 60):
        session.check("anything", lambda _: next(values), tolerance=1e-4)
    assert bool(session.missing) is not passed
    with session.of_part("any", 60):  # from the file: the same
        session.check("anything", lambda _: pytest.fail("computed again"), tolerance=1e-4)
    assert len(session.missing) == 2 * (not passed)


def test_a_line_that_was_cut_off_is_measured_again_and_rows_of_another_machine_or_size_do_not_count(
    tmp_path,
):
    path = tmp_path / "gpu.jsonl"
    row = Row("part", "case", "case", "a card", "versions", True, {"seconds": 1.0})
    Rows(path).add(row)
    path.write_text(path.read_text() + json.dumps({"part": "part"})[:-3])
    rows = Rows(path)
    assert rows.rows == [row]
    rows.add(row)
    assert Rows(path).rows == [row, row]
    here = {"device": "a card", "versions": "versions", "tiny": True}
    assert rows.find("part", "case", **here)
    for other in ({"device": "another card"}, {"versions": "others"}, {"tiny": False}):
        assert rows.find("part", "case", **{**here, **other}) is None
        assert rows.of(**{**here, **other}) == []


def test_the_share_of_a_cards_peak_is_known_for_known_cards():
    cards = {
        "NVIDIA H100 80GB HBM3, 85 GB": 989e12,
        "NVIDIA H200": 989e12,
        "NVIDIA L4": 121e12,
        "Tesla V100": None,
    }
    assert {card: peak_of(card) for card in cards} == cards
    assert Machine("any", "", None).share(1e12) == "not known"
    assert Machine("any", "", 989e12).share(98.9e12) == "10.0%"


def test_time_is_shared_by_kinds_of_kernels_and_with_the_time_in_which_the_card_waits():
    kernels = {
        "void pytorch_flash::flash_fwd_kernel<...>": "attention",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN": "matrix products",
        "Memcpy DtoH (Device -> Pageable)": "copies",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>": (
            "elementwise and sums"
        ),
    }
    assert {kernel: kind_of(kernel) for kernel in kernels} == kernels
    busy = summary(Busy(2.0, {"sgemm": 0.5, "gemm_2": 0.2, "gelu": 0.5}), torch.device("cuda"))
    assert busy["shares"] == "idle 40%, matrix products 35%, elementwise and sums 25%"
    assert str(busy["largest kernels"]).startswith("sgemm 25%; gelu 25%; gemm_2 10%")
