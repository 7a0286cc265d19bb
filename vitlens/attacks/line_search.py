"""From an adversarial image straight back towards the clean one, as far as it stays adversarial.

An attack that looks for the smallest change stops a step beyond a boundary; looks along the line between say how much
of that step was needed (foolbox shortens what such an attack has found in the same way, to each epsilon asked for).
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.norms import per_pixel
from vitlens.shapes import Images

LOOKS = 3
POINTS = 8  # on each line at a look: the line is known to 1/9 of what was left, so to 1/729 in the end
Points = Float[Tensor, "points 3 height width"]
Judge = Callable[[Points, Int[Tensor, " points"]], Bool[Tensor, " points"]]


def line_search(judge: Judge, clean: Images, found: Images, *, batch_size: int) -> Images:
    """The nearest images that were seen to be adversarial on the lines from the clean to the found ones.

    judge: whether images are adversarial, given the rows of which they are variants; batch_size: images it is given at
    a time. Lines on which nothing nearer was seen end where they began, to the bit.
    """
    change, rows = found - clean, torch.arange(len(clean), device=clean.device)
    ends = torch.stack((torch.zeros_like(clean[:, 0, 0, 0]), torch.ones_like(clean[:, 0, 0, 0])), 1)
    for _ in range(LOOKS):
        shares = _between(ends)
        tried, which = shares[:, 1:-1].flatten(), rows.repeat_interleave(POINTS)
        won = torch.cat([
            judge(_at(clean, change, which[part], tried[part]), which[part])
            for part in torch.arange(len(tried), device=tried.device).split(batch_size)
        ])  # fmt: skip
        sure = torch.cat((won.view(-1, POINTS), torch.ones_like(won[: len(rows), None])), 1)  # the far end is known
        first = sure.to(torch.uint8).argmax(1, keepdim=True)  # of several that are largest, the first
        ends = shares.gather(1, torch.cat((first, first + 1), 1))
    nearer = _at(clean, change, rows, ends[:, 1])
    return torch.where(per_pixel(ends[:, 1]) < 1, nearer, found)


def _between(ends: Float[Tensor, "batch 2"]) -> Float[Tensor, "batch points"]:
    """Both ends, and evenly spaced shares of the line between them."""
    steps = torch.arange(1, POINTS + 1, device=ends.device, dtype=ends.dtype) / (POINTS + 1)
    inner = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * steps
    return torch.cat((ends[:, :1], inner, ends[:, 1:]), 1)


def _at(clean: Images, change: Images, rows: Int[Tensor, " points"], shares: Float[Tensor, " points"]) -> Points:
    """The same arithmetic for what is judged and for what is handed out."""
    point: Points = (clean[rows] + per_pixel(shares) * change[rows]).clamp(0, 1)
    return point
