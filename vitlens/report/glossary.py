"""The glossary: the field's terms that reports use, each in one sentence; for tooltips, glossaries and the docs."""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Term:
    """One term. sentence: what it is, without a full stop; also: other spellings under which a text may use it."""

    name: str
    sentence: str
    also: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every form under which it is found in a text."""
        return (self.name, *self.also)


_TERMS: Final = (
    Term(
        "ablation",
        "running the model without a part, here a head, an MLP or a block, whose output is replaced",
        ("ablating", "ablated"),
    ),
    Term(
        "activation patching",
        "replacing an activation of one run by that of another image, to find which activations carry an answer",
    ),
    Term(
        "affinity refinement",
        "smoothing a map so that patches which attend to the same patches get alike values",
        ("refined by attention between patches",),
    ),
    Term(
        "attention distance",
        "the mean distance in pixels between a patch and the patches that it attends to, weighted by attention",
    ),
    Term("attention entropy", "how evenly a query's attention is spread over the tokens, in nats; low: on few tokens"),
    Term(
        "attention weights",
        "for each query token, the shares with which the values of all tokens are added up; they sum to 1",
    ),
    Term("attribution map", "a value for each place of an image that says how much a prediction depends on it"),
    Term("bootstrap", "an interval from the spread of a number over many resamplings of the same images"),
    Term(
        "calibration error (ECE)",
        "the mean difference between confidence and accuracy, over bins of confidence",
        ("ECE", "calibration error"),
    ),
    Term("circuit", "the few heads, MLPs and patches that suffice for a prediction"),
    Term("CKA", "the similarity of two sets of features of the same images, from 0 to 1"),
    Term("clean accuracy", "accuracy on unchanged images"),
    Term("CLS token", "the token whose features the classifier reads", ("CLS",)),
    Term(
        "common corruptions", "noise, blur, weather and compression of graded severity (Hendrycks and Dietterich 2019)"
    ),
    Term("confidence", "the probability that a model gives its own prediction"),
    Term("deletion", "the probability of the class as the patches of highest value are removed; low is good"),
    Term("direct logit attribution", "the part of a logit that each head and MLP adds to it directly"),
    Term("epsilon", "the largest change of a pixel that an attack may make, in 255ths"),
    Term("GradCAM", "activations weighted by the gradient of the class (Selvaraju et al. 2017)"),
    Term("head importance", "how much the loss rises when a head is ablated, in nats", ("importance of heads",)),
    Term("Holm", "a correction of p-values for many tests, which bounds the chance of any false claim", ("Holm's",)),
    Term("insertion", "the probability of the class as the patches of highest value are restored; high is good"),
    Term("k-NN", "a classifier on frozen features: by the classes of the nearest training images"),
    Term("key", "the token that is looked at; each query distributes its attention over all keys"),
    Term("linear probe", "a classifier on frozen features: by one trained linear layer"),
    Term("logit lens", "what the classifier would answer if it read the tokens after an earlier layer"),
    Term("McNemar", "a paired test of two models by the images that only one of them gets right", ("McNemar's",)),
    Term("nats", "the unit of loss and entropy with natural logarithms; a loss of 1 nat is a probability of 37 %"),
    Term("overconfident", "with a confidence above the accuracy", ("overconfidence",)),
    Term(
        "PGD",
        "projected gradient descent: an attack by repeated small steps along the gradient's sign (Madry et al. 2018)",
    ),
    Term("pointing game", "whether the highest point of a map lies on the object"),
    Term("query", "the token that looks; each row of attention weights belongs to one query"),
    Term("randomisation check", "whether a map changes when the model's weights are replaced by random ones"),
    Term(
        "rank correlation", "the correlation of two orders, here of the patches by their values: 1 for the same order"
    ),
    Term(
        "register",
        "an added token without a place in the image, on which a model may keep what is global",
        ("registers",),
    ),
    Term("relevance", "attention weighted by gradients and multiplied through the layers (Chefer et al. 2021)"),
    Term("residual stream", "the features of a token that every block reads and adds to"),
    Term("ROAD", "deletion in which removed pixels are filled from their neighbours (Rong et al. 2022)"),
    Term(
        "ROAD score",
        "how much more probable the class stays when a map's lowest patches are filled in from their surroundings than "
        "when its highest are",
    ),
    Term("robust accuracy", "accuracy on images changed by an attack"),
    Term("rollout", "attention averaged over heads and multiplied through the layers (Abnar & Zuidema 2020)"),
    Term(
        "sink", "a token that takes much of the attention of most queries, whatever the image shows there", ("sinks",)
    ),
    Term("sparse autoencoder", "a layer trained to rewrite activations as few of many features"),
    Term("t-SNE", "a map of features to the plane that keeps neighbours together, but not distances"),
    Term("top-1 accuracy", "the share of images whose most probable class is the true one"),
    Term("uniform map", "a map with the same value everywhere, which explains nothing"),
    Term("Wilson", "an interval of a share that is valid for few images and for shares near 0 and 1 (Wilson 1927)"),
)
GLOSSARY: Final[dict[str, Term]] = {term.name: term for term in _TERMS}
SPELLINGS: Final[dict[str, Term]] = {spelling.lower(): term for term in _TERMS for spelling in term.spellings}
# the longest spelling first, so that "attention weights" is not found as another, shorter term
_PATTERN: Final = re.compile(
    r"(?<![\w.\-/])(?:" + "|".join(map(re.escape, sorted(SPELLINGS, key=len, reverse=True))) + r")(?![\w\-/]|\.\w)",
    re.IGNORECASE,
)


def found(text: str) -> tuple[tuple[int, int, Term], ...]:
    """Where a text uses a term: its first and last place, and the term; each use, in the order of the text."""
    return tuple((match.start(), match.end(), SPELLINGS[match[0].lower()]) for match in _PATTERN.finditer(text))
