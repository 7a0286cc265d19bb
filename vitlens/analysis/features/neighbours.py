"""The exact nearest neighbours of features by cosine, in chunks.

Similarities are first computed in fp32; the greatest of each row are candidates, measured again in float64. Where a
bound on rounding allows that a neighbour is not among the candidates, the whole row is computed in float64. So the
neighbours are those of float64 for any chunks: most similar first, equal ones (to 1e-12) by lowest index.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.errors import InputError

_SPARE: Final = 16  # candidates beyond k
_GROUP: Final = 64  # columns whose maximum is compared first
_NUMBERS: Final = 1 << 24  # similarities held at once
_BANK: Final = 1 << 16  # vectors of the bank in a chunk
_DIGITS: Final = 12  # decimals to which similarities are rounded before they are compared

Queries = Float[Tensor, "queries dim"]
Bank = Float[Tensor, "bank _"]
Candidates = tuple[Tensor, Tensor]  # similarities and indices, (queries, candidates)


@dataclass(frozen=True)
class Neighbours:
    """The k nearest of each query, most similar first.

    indices: (queries, k) into the bank; similarity: (queries, k) cosines, float64; that of a zero vector is 0. Both
    are on the device of the features.
    """

    indices: Int[Tensor, "queries k"]
    similarity: Float[Tensor, "queries k"]


def nearest(queries: Queries, bank: Bank, *, k: int, leave_out: Int[Tensor, " left"] | None = None) -> Neighbours:
    """The k vectors of a bank that are most similar to each query by cosine.

    leave_out: for each query the row of the bank that is the query itself and is no neighbour; None: no query is in the
    bank. Memory does not grow with the bank beyond k + 16 candidates a query. Raises InputError for a k below 1 or
    above the bank's size, and for vectors of different widths.
    """
    _require(queries, bank, k, leave_out)
    count = k if leave_out is None else k + 1
    similarity, indices, floor = _candidates(queries, bank, min(count + _SPARE, len(bank)))
    similarity, indices = _measured(queries, bank, indices, count)
    # the similarity of any vector outside the candidates is at most floor, plus the rounding error of fp32
    uncertain = (floor + _rounding(queries.shape[1]) >= similarity[:, -1]).nonzero().flatten()
    for rows in uncertain.split(max(1, _NUMBERS // (4 * len(bank)))):
        similarity[rows], indices[rows] = _exactly(queries[rows], bank, count)
    if leave_out is not None:
        similarity, indices = _without(similarity, indices, leave_out)
    return Neighbours(indices, similarity)


def _candidates(queries: Queries, bank: Bank, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The count most similar in fp32, (queries, count) each, and an upper bound of all others (-inf: no others)."""
    units = _units(queries.float())
    best = units.new_full((len(queries), 0), -torch.inf)
    places = units.new_zeros((len(queries), 0), dtype=torch.long)
    floor = units.new_full((len(queries),), -torch.inf, dtype=torch.float64)
    for start in range(0, len(bank), _BANK):
        part = _units(bank[start : start + _BANK].float()).T
        greatest = [_greatest(units[rows] @ part, count) for rows in _chunks(len(queries), part.shape[1])]
        joined = torch.cat((best, torch.cat([values for values, _ in greatest])), 1)
        where = torch.cat((places, torch.cat([index for _, index in greatest]) + start), 1)
        best, order = joined.topk(min(count, joined.shape[1]))
        places = where.gather(1, order)
        if start + part.shape[1] > count:  # vectors left out are at most as similar as the last candidate
            floor = best[:, -1].double()
    return best, places, floor


def _greatest(values: Tensor, count: int) -> Candidates:
    """As topk, faster on long rows: the greatest values lie in the groups of columns with the greatest maxima."""
    rows, columns = values.shape
    count = min(count, columns)
    groups = columns // _GROUP
    if groups < 4 * count:
        return values.topk(count)
    maxima = values[:, : groups * _GROUP].view(rows, groups, _GROUP).amax(2)
    chosen = maxima.topk(count, sorted=False).indices  # (rows, count)
    inside = (chosen[:, :, None] * _GROUP + torch.arange(_GROUP, device=values.device)).flatten(1)
    rest = torch.arange(groups * _GROUP, columns, device=values.device).expand(rows, -1)
    places = torch.cat((inside, rest), 1)
    greatest, order = values.gather(1, places).topk(count)
    return greatest, places.gather(1, order)


def _measured(queries: Queries, bank: Bank, indices: Tensor, k: int) -> Candidates:
    """The k most similar candidates, measured in float64."""
    indices = indices.sort(1).values  # so that the stable sort orders equal values by index
    parts = []
    for rows in _chunks(len(queries), indices.shape[1] * queries.shape[1]):
        of_queries = _units(queries[rows].double())
        of_candidates = _units(bank[indices[rows].flatten()].double()).view(*indices[rows].shape, -1)
        parts.append((of_candidates @ of_queries[:, :, None]).squeeze(2))
    return _ordered(torch.cat(parts), indices, k)


def _exactly(queries: Queries, bank: Bank, k: int) -> Candidates:
    """The k most similar of the whole bank, in float64."""
    units = _units(queries.double())
    similarity = torch.cat([units @ _units(part.double()).T for part in bank.split(_BANK)], 1)
    return _ordered(similarity, torch.arange(len(bank), device=bank.device).expand(len(queries), -1), k)


def _ordered(similarity: Tensor, indices: Tensor, k: int) -> Candidates:
    """The k most similar, the most similar first; equal ones stay in their order."""
    similarity = similarity.round(decimals=_DIGITS)
    order = similarity.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return similarity.gather(1, order), indices.gather(1, order)


def _without(similarity: Tensor, indices: Tensor, leave_out: Tensor) -> Candidates:
    """Each row without the query itself, or without its last entry where copies of the query displaced it."""
    own = indices == leave_out.to(indices.device)[:, None]
    own[:, -1] |= ~own.any(1)
    columns = (~own).nonzero()[:, 1].view(len(indices), -1)
    return similarity.gather(1, columns), indices.gather(1, columns)


def _units(vectors: Tensor) -> Tensor:
    """Vectors scaled to length 1; zeros stay zeros."""
    length = vectors.norm(dim=-1, keepdim=True)
    units: Tensor = vectors / length.where(length > 0, 1)
    return units


def _rounding(dim: int) -> float:
    """A bound on the fp32 error of a cosine of this dimension (Higham 2002, section 3.1), doubled for the norms."""
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
