"""Attacks compared with foolbox and torchattacks: agreement, strength, time and memory, as rows of
attacks.md.

    python benchmarks/attacks.py agreement [--models vit-digits,cnn-digits,deit] [--images 200]
        [--only fgsm,pgd,c&w]
    python benchmarks/attacks.py strength  [--models ...] [--images 200] [--steps 20,100]   APGD
        against PGD, same steps
    python benchmarks/attacks.py speed     [--models ...] [--images 200] [--batch 64]   a PGD-20
        sweep over six epsilons
    python benchmarks/attacks.py memory    [--models ...]                   peak of a process that
        does one side alone
    python benchmarks/attacks.py precision [--models ...] [--images 200]    gradients in bf16
        against fp32

foolbox comes with the extra `test`. torchattacks pins old packages: it is installed in a separate
environment, which sees the packages of this one through a path file (without torchattacks its
columns are empty):

    python -m venv --without-pip BENCH
    OURS=$(python -c "import site; print(site.getsitepackages()[0])"); PACKAGES=$(echo
        BENCH/lib/python3*/site-packages)
    echo "import site; site.addsitedir('$OURS')" > $PACKAGES/beside.pth
    python -m pip install --no-deps --target $PACKAGES torchattacks
    BENCH/bin/python benchmarks/attacks.py ...

(or in a fresh environment: `pip install -e .[test,bench]`). `deit` is DeiT-tiny with the
photographs of VITLENS_DATA. Same images, batch size, step, steps and start for all libraries. A
robust accuracy is the number of images classified correctly when clean and under attack; the other
libraries attack each epsilon by itself, and images misclassified at a smaller one count as
misclassified. Times are medians of alternating runs.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from attack_peers import PEERS, STEPS, Case, Standing, case, every_side, ours, pgd_sides

SIDES = "ours", "foolbox", "torchattacks"
VARIANTS: dict[str, dict[str, object]] = {  # of ours in `speed`
    "gradients in bf16": {"precision": "bf16"},
    "downwards": {"downwards": True},
    "downwards, gradients in bf16": {"downwards": True, "precision": "bf16"},
}


def agreement(cases: Sequence[Case], only: str, wanted: str) -> None:
    print(
        "| model | n | attack | epsilon | ours | foolbox | torchattacks | ours at most one in 200 "
        "higher |"
    )
    print("|---|---:|---|---|---:|---:|---:|---|")
    for one in cases:
        for name, axis, sides in every_side(one):
            if not name.lower().startswith(tuple(only.split(","))):
                continue
            found = {side: run() for side, run in sides.items() if side in wanted.split(",")}
            slack = max(1, len(one.labels) // 200)
            peers = [found[side] for side in found if side != "ours"]
            own = found.get("ours", [])
            sound = all(
                int(o.sum()) <= int(t.sum()) + slack for peer in peers for o, t in zip(own, peer)
            )
            cells = " | ".join(counts(found[side]) if side in found else "" for side in SIDES)
            verdict = ("yes" if sound else "**no**") if own and peers else ""
            print(
                f"| {one.name} | {len(one.labels)} | {name} | {axis} | {cells} | {verdict} |",
                flush=True,
            )


def strength(cases: Sequence[Case], budgets: Sequence[int]) -> None:
    print(
        "| model | n | steps | epsilon (1/255) | PGD | APGD-CE | APGD-DLR | APGD-CE at least as "
        "strong |"
    )
    print("|---|---:|---:|---|---:|---:|---:|---|")
    for one in cases:
        for steps in budgets:
            found = {
                name: ours(one, name, one.epsilons, steps=steps)
                for name in ("pgd", "apgd-ce", "apgd-dlr")
            }
            sound = all(
                int(a.sum()) <= int(p.sum()) for a, p in zip(found["apgd-ce"], found["pgd"])
            )
            cells = " | ".join(counts(standing) for standing in found.values())
            print(
                f"| {one.name} | {len(one.labels)} | {steps} | {one.axis} | {cells} | "
                f"{'yes' if sound else '**no**'} |",
                flush=True,
            )


def timed(work: Callable[[], Standing], device: torch.device) -> tuple[float, Standing]:
    start = time.perf_counter()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


def speed(cases: Sequence[Case], repeats: int) -> None:
    print("| model | n | batch | epsilon (1/255) | side | seconds | times ours | robust |")
    print("|---|---:|---:|---|---|---:|---:|---:|")
    for one in cases:
        sides = pgd_sides(one)
        for name, more in VARIANTS.items():
            sides[f"ours, {name}"] = partial(ours, one, "pgd", one.epsilons, steps=STEPS, **more)
        runs = [
            {side: timed(work, one.model.device) for side, work in sides.items()}
            for _ in range(repeats)
        ]
        for side in sides:
            seconds = statistics.median(run[side][0] for run in runs)
            ratio = statistics.median(run[side][0] / run["ours"][0] for run in runs)
            robust = counts(runs[0][side][1])
            print(
                f"| {one.name} | {len(one.labels)} | {one.batch} | {one.axis} | {side} | "
                f"{seconds:.1f} | {ratio:.2f} | {robust} |",
                flush=True,
            )


def memory(names: Sequence[str], data: str, device: str) -> None:
    """Print the peak memory (MB) of a process that runs one side once, on three batches.

    The memory that the process had before does not count.
    """
    print("| model | side | peak (MB) |")
    print("|---|---|---:|")
    for name in names:
        for side in ("ours", *PEERS):
            command = [
                sys.executable,
                __file__,
                "peak",
                "--models",
                name,
                "--side",
                side,
                "--data",
                data,
                "--device",
                device,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"| {name} | {side} | {float(done.stdout.split()[-1]):.0f} |", flush=True)


def peak(name: str, side: str, data: str, device: str) -> None:
    count = 3 * case(name, 1, data=data, device=device).batch
    one = case(name, count, data=data, device=device)
    sides = pgd_sides(one)
    with torch.no_grad():
        one.model(one.images[:1].to(device))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sides[side]()
    if device == "cuda":
        print(torch.cuda.max_memory_allocated() / 1e6)
    else:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before)


def precision(cases: Sequence[Case]) -> None:
    print("| model | n | attack | gradients | seconds | robust |")
    print("|---|---:|---|---|---:|---:|")
    for one in cases:
        for attack in ("fgsm", "pgd", "apgd-ce"):
            for kind in ("fp32", "bf16"):
                work = partial(ours, one, attack, one.epsilons, steps=STEPS, precision=kind)
                seconds, found = timed(work, one.model.device)
                print(
                    f"| {one.name} | {len(one.labels)} | {attack} | {kind} | {seconds:.1f} | "
                    f"{counts(found)} |",
                    flush=True,
                )


def counts(standing: Standing) -> str:
    return " / ".join(str(int(row.sum())) for row in standing)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", choices=["agreement", "strength", "speed", "memory", "precision", "peak"]
    )
    parser.add_argument("--models", default="vit-digits,cnn-digits,deit")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--batch", type=int, help="on every side; without it, the one that vitlens takes"
    )
    parser.add_argument("--epsilons", default="", help="255ths, instead of the usual six")
    parser.add_argument("--side", default="ours")
    parser.add_argument("--steps", default="20,100", help="of strength: the numbers of steps")
    parser.add_argument("--sides", default=",".join(SIDES), help="of agreement: who is run")
    parser.add_argument(
        "--only", default="fgsm,pgd,c&w", help="of agreement: how the attacks' names begin (c&w: 9)"
    )
    asked = parser.parse_args()
    names = asked.models.split(",")
    if asked.what == "peak":
        peak(names[0], asked.side, asked.data, asked.device)
        return
    if len(PEERS) == 1:
        print("torchattacks is not installed; see the docstring of this file\n", file=sys.stderr)
    if asked.what == "memory":
        memory(names, asked.data, asked.device)
        return
    epsilons = [float(epsilon) / 255 for epsilon in asked.epsilons.split(",") if epsilon]
    cases = [
        case(
            name,
            asked.images,
            data=asked.data,
            device=asked.device,
            size=asked.batch,
            epsilons=epsilons,
        )
        for name in names
    ]
    if asked.what == "speed":
        speed(cases, asked.repeats)
    elif asked.what == "agreement":
        agreement(cases, asked.only, asked.sides)
    elif asked.what == "strength":
        strength(cases, [int(count) for count in asked.steps.split(",")])
    else:
        precision(cases)


if __name__ == "__main__":
    main()
