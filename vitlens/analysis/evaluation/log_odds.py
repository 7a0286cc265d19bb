"""Log-odds and cross-entropy of the label in double precision, for models that are certain.

In single precision a cross-entropy is a multiple of 6e-8, and 0 from log-odds of 17 on.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.shapes import Labels

Logits = Float[Tensor, "*sets images classes"]
PerImage = Float[Tensor, "*sets images"]


def log_odds(logits: Logits, labels: Labels) -> PerImage:
    """Return the log-odds of the label: its logit minus the logsumexp of the others, float64.

    labels (images,): columns of the logits. Infinite for a single class, NaN where the label's
    logit is not finite.
    """
    exact = logits.cpu() if logits.device.type == "mps" else logits  # which has no float64
    exact = exact.double()
    columns = labels.to(exact.device).expand(exact.shape[:-1])[..., None]
    of_label = exact.gather(-1, columns)[..., 0]
    of_others = exact.scatter(-1, columns, -torch.inf).logsumexp(-1)
    return torch.where(of_label.isfinite(), of_label - of_others, torch.nan)


def cross_entropy(logits: Logits, labels: Labels) -> PerImage:
    """Return the cross-entropy of each image in nats, float64.

    labels (images,): columns of the logits.
    """
    return loss_of(log_odds(logits, labels))


def loss_of(odds: PerImage) -> PerImage:
    """Return the cross-entropy in nats from the log-odds of the label, float64.

    It is 0 from log-odds of 745 on.
    """
    return torch.logaddexp(-odds, torch.zeros_like(odds))
