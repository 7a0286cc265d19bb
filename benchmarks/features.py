"""k-NN of many features: ours against scikit-learn's brute force by cosine, plain majority on both
sides.

    OMP_NUM_THREADS=2 python benchmarks/features.py [--bank 50000] [--queries 10000] [--dim 384]
        [--k 20] [--rounds 1]

The features are clusters with much noise, so that neighbours disagree and votes are close. Both are
timed from the fp32 vectors to the predicted labels; the labels must be equal to those of
scikit-learn in float64 (checked with --exact, which takes twice as long), and to those in fp32 up
to rounding.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import sklearn
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from vitlens.analysis.features.neighbours import nearest, vote


def made(count: int, dim: int, *, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    return 0.15 * centres[labels] + torch.randn(count, dim, generator=generator), labels


def timed(work: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bank", type=int, default=50_000)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    bank, truth = made(options.bank, options.dim, classes=options.classes, seed=0)
    queries, labels = made(options.queries, options.dim, classes=options.classes, seed=1)

    def ours() -> np.ndarray:
        found = nearest(queries, bank, k=options.k)
        return vote(
            found, truth, k=options.k, classes=options.classes, weighting="majority"
        ).numpy()

    def theirs(kind: type = np.float32) -> np.ndarray:
        model = KNeighborsClassifier(options.k, metric="cosine", algorithm="brute", n_jobs=-1)
        return model.fit(bank.numpy().astype(kind), truth.numpy()).predict(
            queries.numpy().astype(kind)
        )

    print(
        f"torch {torch.__version__}, scikit-learn {sklearn.__version__}, {torch.get_num_threads()} "
        "threads of "
        f"{os.cpu_count()}; {options.queries} queries, a bank of {options.bank}, {options.dim} "
        f"wide, k {options.k}"
    )
    nearest(queries[:64], bank[:1000], k=options.k)  # warm
    ratios = []
    for _ in range(options.rounds):
        slow, expected = timed(theirs)
        quick, found = timed(ours)
        ratios.append(slow / quick)
        print(
            f"scikit-learn {slow:.2f} s, ours {quick:.2f} s: {slow / quick:.2f} times as fast; "
            f"{int((found != expected).sum())} labels differ; right "
            f"{(found == labels.numpy()).mean():.3f}",
            flush=True,
        )
    if options.exact:
        print(
            f"{int((found != theirs(np.float64)).sum())} labels differ from scikit-learn's in "
            "float64"
        )
    print(f"median {statistics.median(ratios):.2f} times scikit-learn's speed")


if __name__ == "__main__":
    main()
