"""Registry of the statistics and labels of heads, free of torch.

Reports and documentation use the titles, units and definitions of the entries.

To add a statistic, add an entry to STATISTICS and its function to FUNCTIONS in rows.py:
`vitlens.statistics`, the report and figures of `vitlens stats` and the documentation take it from
here. The function's argument depends on `input`: "row", a `rows.Rows`, for one number per row;
"layer", a `rows.PatchRows`, for one number per image and head; "tokens", a `rows.TokenNorms`, for
one number per image. To add a label, add an entry to LABELS and its rule to RULES in
specialisation.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

Need = Literal["grid", "prefix", "cls"]
View = Literal["maps", "training", "each head"]


@dataclass(frozen=True)
class Statistic:
    """One number for every head (or every block), a mean over queries and images.

    title: in figures and tables.
    unit: "px", "nats", "fraction", "keys" or "".
    meaning: its definition.
    reading: the interpretation of a high and a low value, in one sentence.
    source: the paper, or the formula.
    input: the argument of the function.
    rows: the queries of the attention rows from which it is computed ("tokens": the residual stream
        instead).
    needs: requirements of a layer ("grid": patches that attend to patches).
    views: the parts of reports that show it.
    whole_range: True if the colours of its maps span 0 to 1, False if they end at its greatest
        value.
    tracked_as: its name where `train --track` logs it by layer, "" if it does not.
    function: the name of its function in FUNCTIONS, "" for the statistic's name.
    counts: the tokens that it is a number of, "" for any other.
    """

    title: str
    unit: str
    meaning: str
    reading: str
    source: str = ""
    input: Literal["row", "layer", "tokens"] = "layer"
    rows: Literal["patches", "CLS", "tokens"] = "patches"
    needs: tuple[Need, ...] = ()
    views: tuple[View, ...] = ("maps",)
    whole_range: bool = False
    tracked_as: str = ""
    function: str = ""
    counts: Literal["", "patches", "prefix"] = ""

    def bounds(
        self, keys: int, *, patches: int | None = None, prefix: int | None = None
    ) -> tuple[float, float]:
        """Return the least and the largest possible value of a layer with so many keys.

        patches, prefix: tokens of the whole map, and before the patches, None if unknown.
        """
        if self.unit == "fraction":
            return 0.0, 1.0
        if self.input == "layer" and self.unit == "":
            return 0.0, 1.0
        if self.input != "row":
            most = {"patches": patches, "prefix": prefix}.get(self.counts)
            if self.unit == "keys":
                most = keys
            return 0.0, math.inf if most is None else float(most)
        if self.unit == "nats":
            return 0.0, math.log(keys)
        if self.unit == "keys":
            return 1.0, float(keys)
        return -math.inf, math.inf


def _of_layer(
    title: str,
    unit: str,
    meaning: str,
    reading: str,
    source: str,
    *views: View,
    need: Need = "grid",
    tracked_as: str = "",
) -> Statistic:
    """Return a statistic of the attention between patches; of the row of CLS where it needs CLS."""
    needs: tuple[Need, ...] = ("grid",) if need == "grid" else ("grid", need)
    rows: Literal["patches", "CLS"] = "CLS" if need == "cls" else "patches"
    return Statistic(
        title,
        unit,
        meaning,
        reading,
        source,
        rows=rows,
        needs=needs,
        views=views,
        tracked_as=tracked_as,
    )


def _of_cls(name: str, *views: View, tracked_as: str = "") -> Statistic:
    """Return the same statistic of the row of the CLS token or of a pooling query."""
    of_patches = _OF_ROWS[name]
    return replace(
        of_patches,
        title=f"{of_patches.title} of the CLS row",
        meaning=f"{of_patches.meaning}; the row of CLS",
        rows="CLS",
        needs=("cls",),
        views=views,
        tracked_as=tracked_as,
        function=name,
    )


def _of_tokens(
    title: str,
    unit: str,
    meaning: str,
    reading: str,
    source: str,
    *,
    counts: Literal["", "patches", "prefix"] = "",
) -> Statistic:
    """Return a statistic of the residual stream after each block."""
    return Statistic(
        title, unit, meaning, reading, source, "tokens", "tokens", views=(), counts=counts
    )


_OF_ROWS: Final = {
    "entropy": Statistic(
        "entropy",
        "nats",
        "spread of a row over all keys, ln(keys) when uniform",
        "High: attention spreads over many keys; 0: it lies on a single key.",
        "Shannon 1948: -sum of w ln w",
        "row",
        views=("each head",),
    ),
    "normalised_entropy": Statistic(
        "entropy, share of ln(keys)",
        "fraction",
        "entropy over that of uniform attention",
        "1 is uniform attention, over all keys, 0 a single key; a fall is attention that sharpens.",
        "entropy / ln(keys)",
        "row",
        views=("maps", "training"),
        whole_range=True,
        tracked_as="entropy/patches",
    ),
    "effective_keys": Statistic(
        "effective number of keys",
        "keys",
        "exp of the entropy, a mean over rows",
        "All keys when attention is uniform, 1 for a single key.",
        "exp(entropy)",
        "row",
        views=(),
    ),
    "hoyer": Statistic(
        "sparsity (Hoyer)",
        "fraction",
        "0 for uniform attention, 1 for a single key",
        "High: a few keys have most of the weight; 0: all keys have the same.",
        "Hoyer 2004: (sqrt(n) - l1 / l2) / (sqrt(n) - 1)",
        "row",
        views=("maps", "each head"),
        whole_range=True,
    ),
    "gini": Statistic(
        "sparsity (Gini)",
        "fraction",
        "inequality of a row's weights, 0 for uniform attention",
        "High: few keys have most of the weight; 0: all keys have the same.",
        "Gini 1912; Hurley & Rickard 2009",
        "row",
        whole_range=True,
    ),
}

STATISTICS: Final[dict[str, Statistic]] = {
    "distance": _of_layer(
        "attention distance",
        "px",
        "mean distance from a patch to the patches that it attends to",
        "Low: attention is local; near uniform attention's: spread, or on the same keys for all "
        "patches.",
        "Dosovitskiy 2021, appendix D.8; Raghu 2021",
        "training",
        "each head",
        tracked_as="distance",
    ),
    **_OF_ROWS,
    "self_mass": _of_layer(
        "mass on itself",
        "fraction",
        "attention of a patch on its own token",
        "High: patches attend to their own token; 0: they do not.",
        "mean over patches of w[i, i]",
        "maps",
    ),
    "neighbour_mass": _of_layer(
        "mass on neighbours",
        "fraction",
        "attention on the four adjacent patches",
        "High: patches attend to adjacent patches; low: to others, or to themselves.",
        "mean over patches of the weights at grid distance 1",
    ),
    "cls_mass": _of_layer(
        "mass on CLS",
        "fraction",
        "attention of patches on the CLS token",
        "High: patches attend to the CLS token instead of the image.",
        "mean over patches of w[i, CLS]",
        "maps",
        need="prefix",
    ),
    "register_mass": _of_layer(
        "mass on registers",
        "fraction",
        "attention of patches on registers and distillation token",
        "High: patches attend to registers instead of the image.",
        "Darcet 2024",
        need="prefix",
    ),
    "prefix_mass": _of_layer(
        "mass on the prefix",
        "fraction",
        "attention of patches on all tokens before the patches",
        "High: patches attend to CLS and registers instead of the image.",
        "mean over patches of the weights on prefix tokens",
        need="prefix",
    ),
    "sinks": _of_layer(
        "sinks",
        "keys",
        "keys that receive more than median + 5 median absolute deviations",
        "The number of keys with exceptional attention from all patches; 0: none.",
        "Xiao 2024; Darcet 2024; the threshold is ours",
    ),
    "sink_mass": _of_layer(
        "mass on sinks",
        "fraction",
        "attention of patches that lies on those keys",
        "High: a few keys receive much of the attention of all patches.",
        "weight received by the sinks, a share of all",
        "maps",
    ),
    "energy": _of_layer(
        "mean square sum of a row",
        "",
        "sum of a patch row's squared weights on patches",
        "1: a single patch has all the weight; 1 / patches: uniform attention.",
        "mean over patches of the sum of w[i, j] squared",
    ),
    "cls_entropy": _of_cls("entropy"),
    "cls_normalised_entropy": _of_cls("normalised_entropy", "training", tracked_as="entropy/cls"),
    "cls_effective_keys": _of_cls("effective_keys"),
    "cls_hoyer": _of_cls("hoyer"),
    "cls_gini": _of_cls("gini"),
    "cls_self_mass": _of_layer(
        "mass of CLS on itself",
        "fraction",
        "attention of the CLS token on itself",
        "High: the CLS token attends to itself; low: it attends to other tokens.",
        "w[CLS, CLS]",
        need="cls",
    ),
    "cls_register_mass": _of_layer(
        "mass of CLS on registers",
        "fraction",
        "attention of the CLS token on registers and distillation token",
        "High: the CLS token attends to the registers.",
        "sum of w[CLS, registers]",
        need="cls",
    ),
    "token_norm": _of_tokens(
        "median token norm",
        "",
        "Euclidean norm of a token after the block, the median of an image",
        "The norm of the residual stream's tokens; it commonly grows with depth.",
        "median of the tokens' Euclidean norms",
    ),
    "greatest_norm": _of_tokens(
        "greatest token norm",
        "",
        "the largest norm of a token of an image",
        "Many times the median norm: some tokens are outliers.",
        "greatest of the tokens' Euclidean norms",
    ),
    "high_norm_patches": _of_tokens(
        "high-norm patches",
        "tokens",
        "patches with a norm above median + 5 median absolute deviations",
        "The number of patches of outlying norm; in large ViTs such patches hold global "
        "information.",
        "Darcet 2024; the threshold is ours",
        counts="patches",
    ),
    "high_norm_prefix": _of_tokens(
        "high-norm prefix tokens",
        "tokens",
        "CLS and registers with a norm above that",
        "The number of CLS and register tokens of outlying norm.",
        "Darcet 2024; the threshold is ours",
        counts="prefix",
    ),
}


def head_statistics() -> dict[str, Statistic]:
    """Return the statistics of attention: one number per layer and head."""
    return {name: statistic for name, statistic in STATISTICS.items() if statistic.rows != "tokens"}


def token_statistics() -> dict[str, Statistic]:
    """Return the statistics of the residual stream: one number per block."""
    return {name: statistic for name, statistic in STATISTICS.items() if statistic.rows == "tokens"}


def shown_in(view: View) -> tuple[str, ...]:
    """Return the names of the statistics that a view shows, in the registry's order."""
    return tuple(name for name, statistic in STATISTICS.items() if view in statistic.views)


THRESHOLD: Final = 0.5  # of a score: most of the information in the head's attention
MARGIN: Final = 0.1  # over the next label; also the least score of the second label of a mixed head
_PARTLY: Final = 0.2  # a score from which on a label is named for a head that it does not describe
MIXED: Final = "mixed"
UNLABELLED: Final = "no single pattern"
FAULTY: Final = ("dead", "uniform")  # heads that do nothing, or do not choose


@dataclass(frozen=True)
class Label:
    """A label of heads.

    sentence: the rule in words.
    code: the short form below a panel, "" for none.
    colour: the colour of its frame.
    within: the more general labels that it is a case of.
    first: True if its score decides before those of others are compared.
    """

    sentence: str
    code: str
    colour: str
    within: tuple[str, ...] = ()
    first: bool = False


# Colours: Okabe and Ito's eight and Tol's; codes distinguish labels of one colour family.
LABELS: Final[dict[str, Label]] = {
    "dead": Label(
        "the head adds next to nothing to the residual stream: less than 0.5 % of the mean norm of "
        "the model's heads",
        "dead",
        "#000000",
        first=True,
    ),
    "uniform": Label(
        "a row has less than half a bit: attention is nearly the same for all keys",
        "unif",
        "#F0E442",
    ),
    "CLS": Label("patches attend to the CLS token", "CLS", "#CC79A7"),
    "register": Label("patches attend to registers or the distillation token", "reg", "#AA4499"),
    "position": Label(
        "attends to the same places of the image, whatever the query and the image (predicted from "
        "other images)",
        "place",
        "#D55E00",
    ),
    "sink": Label(
        "all queries attend to a few patches (at most 10 %) that differ from image to image, "
        "beyond what position, object and background explain",
        "sink",
        "#882255",
    ),
    "high-norm": Label(
        "attends to the patches of exceptional norm in the residual stream (more than median + 5 "
        "median absolute deviations)",
        "norm",
        "#AA3377",
        ("sink",),
    ),
    "border": Label(
        "attends to the outermost patches of the image", "edge", "#DDAA33", ("position",)
    ),
    "object": Label("attends to the patches of the object's mask", "obj", "#117733"),
    "background": Label("attends to the patches off the object's mask", "back", "#999933"),
    "similar": Label(
        "attends to the patches most similar in mean colour (10 %), beyond what the offset and "
        "the popularity of keys explain",
        "sim",
        "#332288",
    ),
    "self": Label(
        "a patch attends to itself",
        "self",
        "#44AA99",
        ("local", "same row", "same column", "similar"),
    ),
    "previous": Label(
        "a patch attends to its left neighbour", "prev", "#0072B2", ("local", "same row", "left")
    ),
    "next": Label(
        "a patch attends to its right neighbour", "next", "#56B4E9", ("local", "same row", "right")
    ),
    "above": Label(
        "a patch attends to the patch above", "above", "#4477AA", ("local", "same column", "up")
    ),
    "below": Label(
        "a patch attends to the patch below", "below", "#88CCEE", ("local", "same column", "down")
    ),
    "same row": Label("a patch attends along its row", "row", "#E69F00"),
    "same column": Label("a patch attends along its column", "col", "#DDCC77"),
    "left": Label("a patch attends to the side left of it", "left", "#661100"),
    "right": Label("a patch attends to the side right of it", "right", "#CC6677"),
    "up": Label("a patch attends to the side above it", "up", "#6699CC"),
    "down": Label("a patch attends to the side below it", "down", "#AA4466"),
    "local": Label(
        "a patch attends to its neighbourhood (a disc of at most a quarter of the patches)",
        "local",
        "#009E73",
    ),
    MIXED: Label(
        "the two best labels explain most of the attention together, or each alone: neither is "
        "clearly the better",
        "mixed",
        "#777777",
    ),
    UNLABELLED: Label(
        "not even the two best labels together explain most of the attention", "", "#CCCCCC"
    ),
}


def head_words(label: str, best: str, other: str | None, score: float) -> str:
    """Describe what a head attends to in a few words, from its label.

    best, other: the labels of the highest scores; score: of `best`.
    """
    if label == MIXED and other is not None:
        return f"mixed: {best} and {other}"
    if label in LABELS and label not in (MIXED, UNLABELLED):
        main_clause = LABELS[label].sentence.split(" (")[0].split(",")[0]
        return f"{label}: {main_clause}"
    if score >= _PARTLY:
        return f"{UNLABELLED}, partly {best}"
    return UNLABELLED
