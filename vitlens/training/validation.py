"""A look at the test images while training, shared among the processes."""

import torch
from accelerate.utils import broadcast
from torch import nn
from torch.nn import functional as F

from vitlens.analysis.answers.evaluate import answers
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.processes import Processes, meeting
from vitlens.training.feed import share


def look(model: Model, split: Split, processes: Processes, *, precision: str) -> tuple[float, float]:
    """Mean loss (nats) and accuracy (fraction) on a labelled split; each process looks at its share of the images.

    Raises NonFiniteError for a logit that is NaN or infinite.
    """
    _agree_on_buffers(model, processes)
    mine = share(torch.arange(len(split)), processes.index, processes.count)
    sums = torch.zeros(2, dtype=torch.float64)
    if len(mine):  # fewer images than processes leave some without
        part = split.pick(mine)
        assert part.labels is not None
        logits, labels = answers(model, part, precision=precision), part.labels.cpu().long()
        sums[0] = F.cross_entropy(logits, labels, reduction="sum")
        sums[1] = (logits.argmax(1) == labels).sum()
    loss, right = (processes.total(sums) / len(split)).tolist()
    return loss, right


def _agree_on_buffers(module: nn.Module, processes: Processes) -> None:
    """Give every process the first one's buffers: batch statistics are each process's own while training."""
    if processes.count > 1:
        for buffer in module.buffers():
            with meeting():
                broadcast(buffer, from_process=0)
