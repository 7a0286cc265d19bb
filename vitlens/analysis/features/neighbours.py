"""The nearest neighbours of features by cosine, exactly, in chunks; what they vote for, and whose class they share.

Similarities are first had in fp32, as matrix products and their greatest; the candidates are then measured in float64.
Where the fp32 candidates could have missed one (a bound on rounding says so), the whole row is measured in float64. So
the neighbours are those of float64, whatever the chunks: most similar first, equal ones (to 1e-12) by lowest index.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.errors import InputError

_SPARE: Final = 16  # candidates beyond k
_GROUP: Final = 64  # columns of which first the greatest alone is looked at
_NUMBERS: Final = 1 << 24  # similarities held at once
_BANK: Final = 1 << 16  # vectors of the bank at a time
_DIGITS: Final = 12  # decimals to which similarities are compared

Queries = Float[Tensor, "queries dim"]
Bank = Float[Tensor, "bank _"]
Found = tuple[Tensor, Tensor]  # similarities and indices, (queries, candidates)


@dataclass(frozen=True)
class Neighbours:
    """The k nearest of each query, most similar first.

    indices: (queries, k) into the bank; similarity: (queries, k) cosines, float64; a vector of zeros is at 0 to all.
    """

    indices: Int[Tensor, "queries k"]
    similarity: Float[Tensor, "queries k"]


def nearest(queries: Queries, bank: Bank, *, k: int, leave_out: Int[Tensor, " left"] | None = None) -> Neighbours:
    """The k vectors of a bank that are most similar to each query by cosine.

    leave_out: for each query the row of the bank that is the query itself, and no neighbour of its own; None: the
    queries are other images. Memory does not grow with the bank beyond k and 16 candidates a query. Raises InputError
    for a k below 1 or above the bank's size, and for vectors of different widths.
    """
    _require(queries, bank, k, leave_out)
    wanted = k if leave_out is None else k + 1
    similarity, indices, floor = _candidates(queries, bank, min(wanted + _SPARE, len(bank)))
    similarity, indices = _measured(queries, bank, indices, wanted)
    # a vector outside the candidates is at most at floor in fp32, plus what rounding may have taken from it
    unsure = (floor + _rounding(queries.shape[1]) >= similarity[:, -1]).nonzero().flatten()
    for rows in unsure.split(max(1, _NUMBERS // (4 * len(bank)))):
        similarity[rows], indices[rows] = _exactly(queries[rows], bank, wanted)
    if leave_out is not None:
        similarity, indices = _without(similarity, indices, leave_out)
    return Neighbours(indices, similarity)


def _candidates(queries: Queries, bank: Bank, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The count most similar in fp32, (queries, count) each, and what all others are at most (-inf: no others)."""
    units = _units(queries.float())
    best = torch.full((len(queries), 0), -torch.inf)
    places = torch.zeros(len(queries), 0, dtype=torch.long)
    floor = torch.full((len(queries),), -torch.inf, dtype=torch.float64)
    for start in range(0, len(bank), _BANK):
        part = _units(bank[start : start + _BANK].float()).T
        found = [_greatest(units[rows] @ part, count) for rows in _chunks(len(queries), part.shape[1])]
        joined = torch.cat((best, torch.cat([values for values, _ in found])), 1)
        where = torch.cat((places, torch.cat([index for _, index in found]) + start), 1)
        best, order = joined.topk(min(count, joined.shape[1]))
        places = where.gather(1, order)
        if start + part.shape[1] > count:  # someone was left out: at most at the last that was kept
            floor = best[:, -1].double()
    return best, places, floor


def _greatest(values: Tensor, count: int) -> Found:
    """As topk, faster on long rows: the greatest lie in the groups of columns whose own greatest are greatest."""
    rows, columns = values.shape
    count = min(count, columns)
    groups = columns // _GROUP
    if groups < 4 * count:
        return values.topk(count)
    heads = values[:, : groups * _GROUP].view(rows, groups, _GROUP).amax(2)
    chosen = heads.topk(count, sorted=False).indices  # (rows, count)
    inside = (chosen[:, :, None] * _GROUP + torch.arange(_GROUP)).flatten(1)
    rest = torch.arange(groups * _GROUP, columns).expand(rows, -1)
    places = torch.cat((inside, rest), 1)
    found, order = values.gather(1, places).topk(count)
    return found, places.gather(1, order)


def _measured(queries: Queries, bank: Bank, indices: Tensor, k: int) -> Found:
    """The k most similar of the candidates, in float64."""
    indices = indices.sort(1).values  # so that a stable sort leaves equal ones by index
    parts = []
    for rows in _chunks(len(queries), indices.shape[1] * queries.shape[1]):
        mine = _units(queries[rows].double())
        others = _units(bank[indices[rows].flatten()].double()).view(*indices[rows].shape, -1)
        parts.append((others @ mine[:, :, None]).squeeze(2))
    return _ordered(torch.cat(parts), indices, k)


def _exactly(queries: Queries, bank: Bank, k: int) -> Found:
    """The k most similar of the whole bank, in float64."""
    units = _units(queries.double())
    found = torch.cat([units @ _units(part.double()).T for part in bank.split(_BANK)], 1)
    return _ordered(found, torch.arange(len(bank)).expand(len(queries), -1), k)


def _ordered(similarity: Tensor, indices: Tensor, k: int) -> Found:
    """The first k, the most similar first; equal ones stay in their order."""
    similarity = similarity.round(decimals=_DIGITS)
    order = similarity.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return similarity.gather(1, order), indices.gather(1, order)


def _without(similarity: Tensor, indices: Tensor, leave_out: Tensor) -> Found:
    """One fewer of each row: itself, or the last where it was not among them (copies of it stood before)."""
    own = indices == leave_out[:, None]
    own[:, -1] |= ~own.any(1)
    kept = (~own).nonzero()[:, 1].view(len(indices), -1)
    return similarity.gather(1, kept), indices.gather(1, kept)


def _units(vectors: Tensor) -> Tensor:
    """Of length 1; zeros stay zeros."""
    length = vectors.norm(dim=-1, keepdim=True)
    units: Tensor = vectors / length.where(length > 0, 1)
    return units


def _rounding(dim: int) -> float:
    """How far fp32 may be off a cosine of so many terms (Higham 2002, section 3.1), doubled for the lengths."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return 2 * (dim + 4) * (2.0**-24 if exact else 2.0**-8)


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _NUMBERS // max(width, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


def _require(queries: Tensor, bank: Tensor, k: int, leave_out: Tensor | None) -> None:
    most = len(bank) - (leave_out is not None)
    if not 1 <= k <= most:
        raise InputError(f"expected k from 1 to {most}, as many images as there are to choose from, found {k}")
    if queries.shape[1] != bank.shape[1]:
        raise InputError(f"expected features of the bank's width, {bank.shape[1]}, found {queries.shape[1]}")
    if leave_out is not None and len(leave_out) != len(queries):
        raise InputError(f"expected a row to leave out for each of {len(queries)} queries, found {len(leave_out)}")
