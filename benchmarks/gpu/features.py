"""Features of 50,000 images, and the classes of 10,000 by their neighbours among 50,000."""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from benchmarks.gpu.machine import computing
from benchmarks.gpu.session import Session, Values
from benchmarks.gpu.subjects import Subject, small, subject
from benchmarks.gpu.timing import once, timed
from vitlens.analysis.features.features import extract, features
from vitlens.analysis.features.neighbours import Neighbours, nearest, vote
from vitlens.data.split import InMemory, Split, Subset

SMALL: Final = "timm:vit_small_patch16_224"
IMAGES = 50_000
QUERIES = 10_000
DIM = 384
K = 20
CLASSES = 10
DIFFERENT: Final = 512  # images of which the others are repetitions: decoding is not measured
TOLERANCE: Final = 1e-4  # fp32, of features


def clustered_vectors(count: int, dim: int, *, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return vectors in clusters with much noise, so that votes are close, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    return 0.15 * centres[labels] + torch.randn(count, dim, generator=generator), labels


def run(session: Session) -> None:
    """Run the checks, the features in bf16 and fp32, k-NN on the device and on the CPU."""
    session.check("features of 8 images", _features, tolerance=TOLERANCE)
    session.check("nearest of 200 among 1,000, their indices", _indices, tolerance=0.0)
    one = subject(session.device, tiny=session.tiny, name=SMALL)
    for precision in ("bf16", "fp32"):
        title = f"features of the last layer, {precision}"
        session.case(
            title, partial(_extraction, session, one, precision), batch=one.batch, needs=30
        )
    bank = 1_000 if session.tiny else IMAGES
    session.case(
        "k-NN on the device",
        partial(_neighbours, session, session.device, bank),
        batch=bank // 5,
        needs=20,
    )
    cpu = torch.device("cpu")
    session.case(
        "k-NN on the CPU", partial(_neighbours, session, cpu, bank), batch=bank // 5, needs=20
    )


def _features(device: torch.device) -> Tensor:
    return features(*small(device), layer=-1).values[0]


def _indices(device: torch.device) -> Tensor:
    bank, _ = clustered_vectors(1_000, 32, classes=CLASSES, seed=0)
    queries, _ = clustered_vectors(200, 32, classes=CLASSES, seed=1)
    return nearest(queries.to(device), bank.to(device), k=K).indices


def _extraction(session: Session, one: Subject, precision: str, batch: int) -> Values:
    """8-bit pixels in memory to features on the CPU, as `vitlens features` reads them: the last
    layer, no cache.
    """
    count, different = (40, 8) if session.tiny else (IMAGES, DIFFERENT)
    height, width = one.model.input_size
    pixels = torch.randint(
        0,
        256,
        (different, 3, height, width),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.uint8,
    )
    source = Subset(InMemory(pixels), torch.arange(count) % different)
    split = Split("random", "test", source, (height, width), ("any",))
    work: Callable[[Split], object] = partial(
        extract,
        one.model,
        layer=-1,
        batch_size=batch,
        precision="fp32" if precision == "fp32" else "bf16",
    )
    with computing(session.device, "fp32"):  # extraction sets its own precision
        work(split.pick(torch.arange(min(count, 2 * batch))))
        seconds = once(lambda: work(split), session.device)
    return {
        "images/s": count / seconds,
        "images": count,
        "seconds": seconds,
        "TFLOP/s": count * one.flops / seconds / 1e12,
        "of peak (bf16, dense)": session.machine.share(count * one.flops / seconds),
    }


def _neighbours(session: Session, device: torch.device, bank: int, queries: int) -> Values:
    """From fp32 features to the predicted classes, plain majority, and scikit-learn's brute force
    on the same.
    """
    known, truth = clustered_vectors(bank, DIM, classes=CLASSES, seed=0)
    asked, labels = clustered_vectors(queries, DIM, classes=CLASSES, seed=1)
    found: list[Tensor] = []

    def work() -> None:
        near = nearest(asked.to(device), known.to(device), k=K)
        near = Neighbours(near.indices.cpu(), near.similarity.cpu())
        found[:] = [vote(near, truth, k=K, classes=CLASSES, weighting="majority")]

    with computing(device, "fp32"):
        time = timed(work, device, repeats=1 if session.tiny or device.type == "cpu" else 3)
    peer = KNeighborsClassifier(K, metric="cosine", algorithm="brute", n_jobs=-1).fit(
        known.numpy(), truth.numpy()
    )
    expected: list[Tensor] = []
    seconds = once(
        lambda: expected.append(torch.from_numpy(peer.predict(asked.numpy()))), torch.device("cpu")
    )
    return {
        "images in the bank": bank,
        "seconds": time.seconds,
        "scikit-learn on the CPU (s)": seconds,
        "labels that differ from its": int((found[0] != expected[0]).sum()),
        "correct": float((found[0] == labels).double().mean()),
        "peak memory (GB)": None if time.peak is None else time.peak / 1e9,
    }
