"""A look at the test images while training, shared among the processes."""

import torch
from accelerate import Accelerator
from torch.nn import functional as F

from vitlens.analysis.evaluate import answers
from vitlens.data.split import Split
from vitlens.models.specimen import Specimen
from vitlens.training.feed import share
from vitlens.training.processes import agree_on_buffers, total


def look(
    specimen: Specimen, split: Split, accelerator: Accelerator, *, device: torch.device, precision: str
) -> tuple[float, float]:
    """Mean loss (nats) and accuracy (fraction) on a labelled split; each process looks at its share of the images.

    Raises NonFiniteError for a logit that is NaN or infinite.
    """
    agree_on_buffers(accelerator, specimen)
    mine = share(torch.arange(len(split)), accelerator.process_index, accelerator.num_processes)
    sums = torch.zeros(2, dtype=torch.float64)
    if len(mine):  # fewer images than processes leave some without
        part = split.pick(mine)
        assert part.labels is not None
        logits, labels = answers(specimen, part, precision=precision), part.labels.cpu().long()
        sums[0] = F.cross_entropy(logits, labels, reduction="sum")
        sums[1] = (logits.argmax(1) == labels).sum()
    loss, right = (total(accelerator, sums, device) / len(split)).tolist()
    return loss, right
