"""Registry of the statistics and labels of heads, free of torch.

Reports and documentation use the titles, units and definitions of the entries.

To add a statistic, add an entry to STATISTICS and its function to FUNCTIONS in rows.py:
`vitlens.statistics`, the report and figures of `vitlens stats` and the documentation take it from
here. The function's argument depends on `input`:
- "row": a `rows.Rows`; the function returns one number per row;
- "layer": a `rows.PatchRows`; the function returns one number per image and head;
- "tokens": a `rows.TokenNorms`; the function returns one number per image.

To add a label, add an entry to LABELS and its rule to RULES in specialisation.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

Need = Literal["grid", "prefix", "cls"]
View = Literal["maps", "training", "each head"]


@dataclass(frozen=True)
class Statistic:
    """One number for every head (or every block), a mean over queries and images.

    title: its name in figures and tables.
    unit: "px", "nats", "fraction", "keys", "tokens" or "".
    meaning: its definition.
    reading: the interpretation of a high and a low value, in one sentence.
    source: the paper, or the formula.
    input: the argument of its function; see the top of this module.
    rows: the queries of the attention rows from which it is computed. "tokens" stands for the
        residual stream instead of attention.
    needs: what a layer must have. "grid" stands for patches that attend to patches.
    views: the parts of reports that show it.
    whole_range: True if the colours of its maps span 0 to 1, False if they end at its largest
        value.
    tracked_as: the name under which `train --track` logs it by layer, "" if it is not logged.
    function: the name of its function in FUNCTIONS, "" if that is the statistic's name.
    counts: the kind of tokens that it counts, "" if it counts no tokens.
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
        """Return the least and the largest possible value in a layer with so many keys.

        patches: the number of patches of the whole map, None if unknown.
        prefix: the number of tokens before the patches, None if unknown.
        """
        if self.unit == "fraction":
            return 0.0, 1.0
        if self.input == "row":
            return self._bounds_of_row(keys)
        if self.input == "layer" and self.unit == "":  # a sum of squared weights
            return 0.0, 1.0
        most: int | None = None
        if self.unit == "keys":
            most = keys
        elif self.counts == "patches":
            most = patches
        elif self.counts == "prefix":
            most = prefix
        if most is None:
            return 0.0, math.inf
        return 0.0, float(most)

    def _bounds_of_row(self, keys: int) -> tuple[float, float]:
        if self.unit == "nats":  # entropy: of a single key, of uniform attention
            return 0.0, math.log(keys)
        if self.unit == "keys":  # effective number of keys
            return 1.0, float(keys)
        return -math.inf, math.inf


def _of_layer(
    *,
    title: str,
    unit: str,
    meaning: str,
    reading: str,
    source: str,
    views: tuple[View, ...] = (),
    need: Need = "grid",
    tracked_as: str = "",
) -> Statistic:
    """Return a statistic of the attention of patches, or of CLS if it needs CLS."""
    needs: tuple[Need, ...] = ("grid",) if need == "grid" else ("grid", need)
    rows: Literal["patches", "CLS"] = "CLS" if need == "cls" else "patches"
    return Statistic(
        title=title,
        unit=unit,
        meaning=meaning,
        reading=reading,
        source=source,
        rows=rows,
        needs=needs,
        views=views,
        tracked_as=tracked_as,
    )


def _of_cls(name: str, *, views: tuple[View, ...] = (), tracked_as: str = "") -> Statistic:
    """Return the statistic of that name, of the row of the CLS token or of a pooling query."""
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
    *,
    title: str,
    unit: str,
    meaning: str,
    reading: str,
    source: str,
    counts: Literal["", "patches", "prefix"] = "",
) -> Statistic:
    """Return a statistic of the residual stream after each block."""
    return Statistic(
        title=title,
        unit=unit,
        meaning=meaning,
        reading=reading,
        source=source,
        input="tokens",
        rows="tokens",
        views=(),
        counts=counts,
    )


_OF_ROWS: Final = {
    "entropy": Statistic(
        title="entropy",
        unit="nats",
        meaning="spread of a row over all keys, ln(keys) when uniform",
        reading="High: attention spreads over many keys; 0: it lies on a single key.",
        source="Shannon 1948: -sum of w ln w",
        input="row",
        views=("each head",),
    ),
    "normalised_entropy": Statistic(
        title="entropy, share of ln(keys)",
        unit="fraction",
        meaning="entropy over that of uniform attention",
        reading="1: uniform attention over all keys; 0: a single key. If it falls, attention "
        "sharpens.",
        source="entropy / ln(keys)",
        input="row",
        views=("maps", "training"),
        whole_range=True,
        tracked_as="entropy/patches",
    ),
    "effective_keys": Statistic(
        title="effective number of keys",
        unit="keys",
        meaning="exp of the entropy, a mean over rows",
        reading="All keys when attention is uniform, 1 for a single key.",
        source="exp(entropy)",
        input="row",
        views=(),
    ),
    "hoyer": Statistic(
        title="sparsity (Hoyer)",
        unit="fraction",
        meaning="0 for uniform attention, 1 for a single key",
        reading="High: a few keys have most of the weight; 0: all keys have the same.",
        source="Hoyer 2004: (sqrt(n) - l1 / l2) / (sqrt(n) - 1)",
        input="row",
        views=("maps", "each head"),
        whole_range=True,
    ),
    "gini": Statistic(
        title="sparsity (Gini)",
        unit="fraction",
        meaning="inequality of a row's weights, 0 for uniform attention",
        reading="High: few keys have most of the weight; 0: all keys have the same.",
        source="Gini 1912; Hurley & Rickard 2009",
        input="row",
        whole_range=True,
    ),
}

STATISTICS: Final[dict[str, Statistic]] = {
    "distance": _of_layer(
        title="attention distance",
        unit="px",
        meaning="mean distance from a patch to the patches that it attends to",
        reading="Low: attention is local. Near the value of uniform attention: it is spread "
        "out, or all patches attend to the same keys.",
        source="Dosovitskiy 2021, appendix D.8; Raghu 2021",
        views=("training", "each head"),
        tracked_as="distance",
    ),
    **_OF_ROWS,
    "self_mass": _of_layer(
        title="mass on itself",
        unit="fraction",
        meaning="attention of a patch on its own token",
        reading="High: patches attend to their own token; 0: they do not.",
        source="mean over patches of w[i, i]",
        views=("maps",),
    ),
    "neighbour_mass": _of_layer(
        title="mass on neighbours",
        unit="fraction",
        meaning="attention on the four adjacent patches",
        reading="High: patches attend to adjacent patches; low: to others, or to themselves.",
        source="mean over patches of the weights at grid distance 1",
    ),
    "cls_mass": _of_layer(
        title="mass on CLS",
        unit="fraction",
        meaning="attention of patches on the CLS token",
        reading="High: patches attend to the CLS token instead of the image.",
        source="mean over patches of w[i, CLS]",
        views=("maps",),
        need="prefix",
    ),
    "register_mass": _of_layer(
        title="mass on registers",
        unit="fraction",
        meaning="attention of patches on registers and distillation token",
        reading="High: patches attend to registers instead of the image.",
        source="Darcet 2024",
        need="prefix",
    ),
    "prefix_mass": _of_layer(
        title="mass on the prefix",
        unit="fraction",
        meaning="attention of patches on all tokens before the patches",
        reading="High: patches attend to CLS and registers instead of the image.",
        source="mean over patches of the weights on prefix tokens",
        need="prefix",
    ),
    "sinks": _of_layer(
        title="sinks",
        unit="keys",
        meaning="keys that receive more than median + 5 median absolute deviations",
        reading="The number of keys with exceptional attention from all patches; 0: none.",
        source="Xiao 2024; Darcet 2024; the threshold is ours",
    ),
    "sink_mass": _of_layer(
        title="mass on sinks",
        unit="fraction",
        meaning="attention of patches that lies on those keys",
        reading="High: a few keys receive much of the attention of all patches.",
        source="weight received by the sinks, a share of all",
        views=("maps",),
    ),
    "energy": _of_layer(
        title="mean square sum of a row",
        unit="",
        meaning="sum of a patch row's squared weights on patches",
        reading="1: a single patch has all the weight; 1 / patches: uniform attention.",
        source="mean over patches of the sum of w[i, j] squared",
    ),
    "cls_entropy": _of_cls(name="entropy"),
    "cls_normalised_entropy": _of_cls(
        name="normalised_entropy", views=("training",), tracked_as="entropy/cls"
    ),
    "cls_effective_keys": _of_cls(name="effective_keys"),
    "cls_hoyer": _of_cls(name="hoyer"),
    "cls_gini": _of_cls(name="gini"),
    "cls_self_mass": _of_layer(
        title="mass of CLS on itself",
        unit="fraction",
        meaning="attention of the CLS token on itself",
        reading="High: the CLS token attends to itself; low: it attends to other tokens.",
        source="w[CLS, CLS]",
        need="cls",
    ),
    "cls_register_mass": _of_layer(
        title="mass of CLS on registers",
        unit="fraction",
        meaning="attention of the CLS token on registers and distillation token",
        reading="High: the CLS token attends to the registers.",
        source="sum of w[CLS, registers]",
        need="cls",
    ),
    "token_norm": _of_tokens(
        title="median token norm",
        unit="",
        meaning="Euclidean norm of a token after the block, the median of an image",
        reading="The norm of the residual stream's tokens; it commonly grows with depth.",
        source="median of the tokens' Euclidean norms",
    ),
    "greatest_norm": _of_tokens(
        title="greatest token norm",
        unit="",
        meaning="the largest norm of a token of an image",
        reading="Many times the median norm: some tokens are outliers.",
        source="greatest of the tokens' Euclidean norms",
    ),
    "high_norm_patches": _of_tokens(
        title="high-norm patches",
        unit="tokens",
        meaning="patches with a norm above median + 5 median absolute deviations",
        reading="The number of patches of outlying norm; in large ViTs such patches hold global "
        "information.",
        source="Darcet 2024; the threshold is ours",
        counts="patches",
    ),
    "high_norm_prefix": _of_tokens(
        title="high-norm prefix tokens",
        unit="tokens",
        meaning="CLS and registers with a norm above that",
        reading="The number of CLS and register tokens of outlying norm.",
        source="Darcet 2024; the threshold is ours",
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


THRESHOLD: Final = 0.5  # least score of a head's label: most of the information in its attention
# least distance to the score of the next label; also the least score of a mixed head's second label
MARGIN: Final = 0.1
_PARTLY: Final = 0.2  # least score of a label that is named as a part of a head's attention
MIXED: Final = "mixed"
UNLABELLED: Final = "no single pattern"
FAULTY: Final = ("dead", "uniform")  # labels of heads that add nothing, or do not select keys


@dataclass(frozen=True)
class Label:
    """A label of heads.

    sentence: the rule in words.
    code: the short form below a panel, "" for none.
    colour: the colour of the panel's frame.
    within: the more general labels that it is a case of.
    first: True if a score above THRESHOLD decides, without a comparison with other labels.
    """

    sentence: str
    code: str
    colour: str
    within: tuple[str, ...] = ()
    first: bool = False


# Colours: Okabe and Ito's eight and Tol's; codes distinguish labels of one colour family.
LABELS: Final[dict[str, Label]] = {
    "dead": Label(
        sentence="the head adds next to nothing to the residual stream (less than 0.5 % of the "
        "mean norm of the model's heads)",
        code="dead",
        colour="#000000",
        first=True,
    ),
    "uniform": Label(
        sentence="attention is nearly the same for all keys (a row has less than half a bit)",
        code="unif",
        colour="#F0E442",
    ),
    "CLS": Label(sentence="patches attend to the CLS token", code="CLS", colour="#CC79A7"),
    "register": Label(
        sentence="patches attend to registers or the distillation token",
        code="reg",
        colour="#AA4499",
    ),
    "position": Label(
        sentence="attends to the same places of the image, whatever the query and the image "
        "(predicted from other images)",
        code="place",
        colour="#D55E00",
    ),
    "sink": Label(
        sentence="all queries attend to a few patches (at most 10 %) that differ from image to "
        "image, beyond what position, object and background explain",
        code="sink",
        colour="#882255",
    ),
    "high-norm": Label(
        sentence="attends to the patches of exceptional norm in the residual stream (more than "
        "median + 5 median absolute deviations)",
        code="norm",
        colour="#AA3377",
        within=("sink",),
    ),
    "border": Label(
        sentence="attends to the outermost patches of the image",
        code="edge",
        colour="#DDAA33",
        within=("position",),
    ),
    "object": Label(
        sentence="attends to the patches of the object's mask", code="obj", colour="#117733"
    ),
    "background": Label(
        sentence="attends to the patches off the object's mask", code="back", colour="#999933"
    ),
    "similar": Label(
        sentence="attends to the patches most similar in mean colour (10 %), beyond what the "
        "offset and the popularity of keys explain",
        code="sim",
        colour="#332288",
    ),
    "self": Label(
        sentence="a patch attends to itself",
        code="self",
        colour="#44AA99",
        within=("local", "same row", "same column", "similar"),
    ),
    "previous": Label(
        sentence="a patch attends to its left neighbour",
        code="prev",
        colour="#0072B2",
        within=("local", "same row", "left"),
    ),
    "next": Label(
        sentence="a patch attends to its right neighbour",
        code="next",
        colour="#56B4E9",
        within=("local", "same row", "right"),
    ),
    "above": Label(
        sentence="a patch attends to the patch above",
        code="above",
        colour="#4477AA",
        within=("local", "same column", "up"),
    ),
    "below": Label(
        sentence="a patch attends to the patch below",
        code="below",
        colour="#88CCEE",
        within=("local", "same column", "down"),
    ),
    "same row": Label(sentence="a patch attends along its row", code="row", colour="#E69F00"),
    "same column": Label(sentence="a patch attends along its column", code="col", colour="#DDCC77"),
    "left": Label(sentence="a patch attends to the side left of it", code="left", colour="#661100"),
    "right": Label(
        sentence="a patch attends to the side right of it", code="right", colour="#CC6677"
    ),
    "up": Label(sentence="a patch attends to the side above it", code="up", colour="#6699CC"),
    "down": Label(sentence="a patch attends to the side below it", code="down", colour="#AA4466"),
    "local": Label(
        sentence="a patch attends to its neighbourhood (a disc of at most a quarter of the "
        "patches)",
        code="local",
        colour="#009E73",
    ),
    MIXED: Label(
        sentence="the two best labels, together or separately, explain most of the attention, "
        "and neither is clearly better",
        code="mixed",
        colour="#777777",
    ),
    UNLABELLED: Label(
        sentence="not even the two best labels together explain most of the attention",
        code="",
        colour="#CCCCCC",
    ),
}


def head_words(label: str, best: str, other: str | None, score: float) -> str:
    """Describe what a head attends to in a few words, from its label.

    best: the label of the highest score.
    other: the best label that contradicts it, None if there is none.
    score: the score of `best`.
    """
    if label == MIXED and other is not None:
        return f"mixed: {best} and {other}"
    if label in LABELS and label not in (MIXED, UNLABELLED):
        # the sentence up to its first bracket or comma
        main_clause = LABELS[label].sentence.split(" (")[0].split(",")[0]
        return f"{label}: {main_clause}"
    if score >= _PARTLY:
        return f"{UNLABELLED}, partly {best}"
    return UNLABELLED
