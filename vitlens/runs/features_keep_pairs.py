"""What `vitlens features` writes of two models' features side by side: which of them know more."""

from collections.abc import Sequence
from itertools import combinations

from vitlens.commands.scaffold.folder import RunFolder
from vitlens.data.split import Split
from vitlens.runs.features_keep import PROBE, Knowledge, end_of
from vitlens.uncertainty import Estimate, bootstrap_difference, holm, mcnemar


def keep_pairs(folder: RunFolder, known: Sequence[Knowledge], split: Split, *, seed: int) -> None:
    """Compare the models two by two on the same images, for every classifier of the last layer (Holm's correction)."""
    found: list[tuple[str, str, str, Estimate, float]] = []
    groups = None if split.groups is None else split.groups.cpu().numpy()
    for one, two in combinations(known, 2):
        for name in (word for word in one.classifiers if word in two.classifiers):
            first, second = one.classifiers[name], two.classifiers[name]
            gap = bootstrap_difference(
                100.0 * first.numpy(), 100.0 * second.numpy(), groups=groups, seed=seed, unit="points"
            )
            p = mcnemar(int((first & ~second).sum()), int((second & ~first).sum()))
            found.append((name, one.alias, two.alias, gap, p))
    rows = []
    for (name, first_name, second_name, gap, p), p_holm in zip(found, holm([p for *_, p in found])):
        word = "probe_difference" if name == PROBE else "knn_difference"
        folder.metric(f"{word}/{first_name}/{second_name}{end_of(name)}", gap)
        ends = {"difference": gap.value, "low": gap.low, "high": gap.high, "n": gap.n}
        rows.append({"classifier": name, "first": first_name, "second": second_name, **ends, "p": p, "p_holm": p_holm})
    if rows:
        folder.table("pairs", rows)
