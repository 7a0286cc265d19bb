"""Rows of dictionaries and their latents; free of torch."""

from dataclasses import dataclass
from typing import Final

from vitlens.analysis.naming.words import CORRELATES, MATTERS, NOTHING, SEVERAL
from vitlens.record import OfModel, col
from vitlens.uncertainty import Estimate

CONFIRMED: Final = "confirmed"
NONE: Final = "none"
# the state of a latent for each state of a head (naming/words.py)
STATES: Final = {MATTERS: CONFIRMED, CORRELATES: CORRELATES, NOTHING: NONE, SEVERAL: SEVERAL}


@dataclass(frozen=True, kw_only=True)
class DictionaryRow(OfModel):
    """A dictionary, or a baseline in its place, on held-out images.

    dictionary: its name.
    latents: the number of latents.
    recovered_loss, recovered_accuracy: None without labels, and if mean ablation of the place does
        not change the loss (the accuracy) significantly.
    """

    dictionary: str = col("dictionary")
    latents: int = col("latents")
    l0: Estimate = col(
        "L0", term="mean number of latents of a token", metric="l0/{model}/{dictionary}"
    )
    variance: Estimate = col(
        "explained variance",
        term="1 minus the squared error of the reconstruction over the variance of the tokens",
        metric="explained_variance/{model}/{dictionary}",
    )
    dead: Estimate = col(
        "dead",
        term="latents that are active in no token of the held-out images",
        metric="dead_latents/{model}/{dictionary}",
        share=True,
    )
    recovered_loss: Estimate | None = col(
        "loss recovered",
        term="loss with the reconstruction in the place of the tokens, on the scale from mean "
        "ablation (0) to the unchanged model (1)",
        metric="loss_recovered/{model}/{dictionary}",
        default=None,
    )
    recovered_accuracy: Estimate | None = col(
        "accuracy recovered",
        term="the same for the accuracy",
        metric="accuracy_recovered/{model}/{dictionary}",
        default=None,
    )
    accuracy: Estimate | None = col(
        "accuracy with it",
        metric="accuracy_with_dictionary/{model}/{dictionary}",
        share=True,
        default=None,
    )
    stability: float | None = col(
        "matched cosine of two seeds",
        unit="",
        term="mean cosine of the directions of two trainings, matched one to one",
        default=None,
    )
    monosemanticity: Estimate | None = col(
        "monosemanticity",
        term="mean similarity of two images by an independent encoder, weighted by the activations "
        "of a latent (Pach 2025); mean over latents",
        metric="monosemanticity/{model}/{dictionary}",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class LatentRow(OfModel):
    """One latent: what it separates, and what happens if it is removed or doubled.

    effect: the fall of the log-odds of the label without the latent, over the images in which it is
        active.
    word: the classes or attributes that it stands for, None for none or too many.
    points_to: the class to which an attribute such as "hue = 3" points. The latent is then tested
        by the log-odds of this class.
    margin: how much more the log-odds fall without it in images of `word` than in others.
    gain: how much more the log-odds rise with twice of it in images of `word` than in others.
    pushes: the classes whose logits it raises most, above the mean of all classes.
    """

    latent: int = col("latent")
    frequency: float = col("share of patches", unit="fraction")
    images: float = col("share of images", unit="fraction")
    effect: Estimate | None = col(
        "log-odds lost without it",
        term="fall of the log-odds of the label in images where the latent is active",
        default=None,
    )
    lost: Estimate | None = col("accuracy lost without it", default=None)
    state: str = col("state", default=NONE)
    word: str | None = col("stands for", default=None)
    points_to: str | None = col("class that the attribute points to", default=None)
    best: str | None = col("best separated", default=None)
    auc: Estimate | None = col(
        "AUC",
        term="the chance that the latent is larger in an image of the class than in another image",
        default=None,
    )
    control: float | None = col("AUC with permuted labels", unit="", default=None)
    margin: Estimate | None = col("more log-odds lost without it", default=None)
    gain: Estimate | None = col("more log-odds gained with twice its activation", default=None)
    p: float | None = col("p", default=None)
    pushes: tuple[str, ...] = col("pushes", default=())
    monosemanticity: float | None = col("monosemanticity", unit="", default=None)


@dataclass(frozen=True, kw_only=True)
class ClassLatentRow(OfModel):
    """One of the latents that matter most for a class, by the gradient.

    rank: its rank for the class, from 1.
    effect: the estimated fall of the log-odds of the class without the latent, in images of the
        class.
    """

    name: str = col("class")
    rank: int = col("rank")
    latent: int = col("latent")
    effect: float = col(
        "estimated log-odds lost",
        unit="nats",
        term="gradient of the log-odds times the latent, summed over patches; images of the class",
    )
