"""Log-odds and cross-entropy of the label in double precision, for models that are certain.

In single precision, a cross-entropy is a multiple of 6e-8, and 0 for log-odds of 17 or more.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.shapes import Labels

Logits = Float[Tensor, "*sets images classes"]
PerImage = Float[Tensor, "*sets images"]


def log_odds(logits: Logits, labels: Labels) -> PerImage:
    """Return the log-odds of the label: its logit minus the logsumexp of the others, float64.

    They are infinite for a single class, and NaN if the label's logit is not finite.

    labels (images,): columns of the logits.
    """
    if logits.device.type == "mps":  # it has no float64
        logits = logits.cpu()
    exact = logits.double()
    # the column of the label (.., images, 1), the same in all sets
    columns = labels.to(exact.device).expand(exact.shape[:-1])[..., None]
    label_logit = exact.gather(-1, columns)[..., 0]
    logits_of_others = exact.scatter(-1, columns, -torch.inf)
    odds = label_logit - logits_of_others.logsumexp(-1)
    return torch.where(label_logit.isfinite(), odds, torch.nan)


def cross_entropy(logits: Logits, labels: Labels) -> PerImage:
    """Return the cross-entropy of each image in nats, float64.

    labels (images,): columns of the logits.
    """
    return loss_of(log_odds(logits, labels))


def loss_of(odds: PerImage) -> PerImage:
    """Return the cross-entropy in nats from the log-odds of the label, float64.

    It is 0 for log-odds of 745 or more.
    """
    return torch.logaddexp(-odds, torch.zeros_like(odds))
