"""The ranking of heads in bf16 compared with fp32: exact ablation of all heads of a model on a
folder of images.

    python benchmarks/ablate_precision.py MODEL FOLDER [--limit 300]

Prints Spearman's correlation of the two rankings, the largest difference of an importance (nats),
and the seconds.
"""

import argparse
import time

import torch
from scipy.stats import spearmanr

from vitlens.analysis.ablation.importance import ablate
from vitlens.data.catalogue import load_data
from vitlens.devices import autocast
from vitlens.models import loading


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    model = loading.load(options.model)
    split = load_data(options.folder, part="test", preprocessing=model.preprocessing).limit(
        options.limit
    )
    images = split.source.read(torch.arange(len(split))).float() / 255
    assert split.labels is not None
    labels = torch.tensor(
        [model.classes.index(split.classes[label]) for label in split.labels.tolist()]
    )
    deltas = {}
    seconds = {}
    for precision in ("bf16", "fp32"):
        start = time.perf_counter()
        with autocast(images.device, precision):
            deltas[precision] = ablate(model, images, labels, batch_size=32).delta_loss.flatten()
        seconds[precision] = time.perf_counter() - start
    rank = spearmanr(deltas["bf16"], deltas["fp32"]).statistic
    largest = (deltas["bf16"] - deltas["fp32"]).abs().max().item()
    print(
        f"{model.alias}, {len(images)} images, {len(deltas['fp32'])} heads, "
        f"{torch.get_num_threads()} threads: ",
        end="",
    )
    print(
        f"Spearman {rank:.4f}, largest difference {largest:.1e} nats (of "
        f"{deltas['fp32'].max():.3f}), ",
        end="",
    )
    print(
        f"bf16 {seconds['bf16']:.0f} s, fp32 {seconds['fp32']:.0f} s, ratio "
        f"{seconds['bf16'] / seconds['fp32']:.2f}"
    )


if __name__ == "__main__":
    main()
