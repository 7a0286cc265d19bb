"""Linear CKA from running sums: equal to that of all images at once for any batches, in memory
independent of n.

Centred kernel alignment (Kornblith 2019) is HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)). The unbiased
estimator of HSIC (Song 2012, equation 5) of the Gram matrices K = X X' and L = Y Y', their
diagonals set to 0, is

    [ tr(K L) + 1'K1 1'L1 / ((n - 1)(n - 2)) - 2/(n - 2) 1'K L 1 ] / (n (n - 3)).

Minibatch CKA (Nguyen 2021) averages this estimator over batches, which is noisier and depends on
the batches. No Gram matrix is needed: with a_i = |x_i|^2, b_i = |y_i|^2, s = sum x_i, t = sum y_i
and C = X'Y,

    tr(K L) = |C|^2 - sum a_i b_i                                     (all pairs of images, less the
        diagonal)
    1'K1    = |s|^2 - sum a_i
    1'K L 1 = sum (x_i.s - a_i)(y_i.t - b_i) = s'C t - s.(sum b_i x_i) - t.(sum a_i y_i) + sum a_i
        b_i

so C, s, t, sum b_i x_i, sum a_i y_i, sum a_i, sum b_i and sum a_i b_i are sufficient. All are sums
over images, exact up to rounding in float64. The estimator does not change when a constant is added
to all rows, so the mean of the first batch is subtracted, to avoid cancellation where means are
large. The biased estimator is |C - s t' / n|^2 / (n - 1)^2.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Layers = Sequence[Tensor]  # by layer (batch, dim), of any widths
Matrix = Float[Tensor, "layers others"]
FEWEST = 4  # images: with fewer the unbiased estimator is not defined


class Sums(NamedTuple):
    """The sums over n images of a layer X (n, dim) and several layers Y side by side (n, widths),
    float64; see the module's notation.

    product: C; x: s; y: t; x_b: sum b_i x_i; y_a: sum a_i y_i; a, b, ab: of the squared lengths.
    """

    n: Tensor
    product: Float[Tensor, "dim widths"]
    x: Float[Tensor, " dim"]
    y: Float[Tensor, " widths"]
    x_b: Float[Tensor, "dim others"]
    y_a: Float[Tensor, " widths"]
    a: Float[Tensor, ""]
    b: Float[Tensor, " others"]
    ab: Float[Tensor, " others"]

    def plus(self, other: "Sums", *, sign: int = 1) -> "Sums":
        """Return the sums over the images of both; sign -1: over this one's images without the
        other's.
        """
        return Sums(*(own + sign * another for own, another in zip(self, other)))

    def hsic(self, widths: Sequence[int], *, biased: bool = False) -> Float[Tensor, " others"]:
        """HSIC with linear kernels of X and of each Y."""

        def by_other(values: Tensor) -> Tensor:
            return torch.stack([part.sum() for part in values.split(list(widths))])

        n = self.n.to(self.x.device)
        s = self.x
        t = self.y
        if biased:
            return by_other((self.product - torch.outer(s, t) / n).square().sum(0)) / (n - 1) ** 2
        trace = by_other(self.product.square().sum(0)) - self.ab
        ends = (s @ s - self.a) * (by_other(t.square()) - self.b) / ((n - 1) * (n - 2))
        chain = by_other((s @ self.product) * t) - s @ self.x_b - by_other(t * self.y_a) + self.ab
        return (trace + ends - 2 / (n - 2) * chain) / (n * (n - 3))


class CKAStream:
    """Accumulates the features of two sets of layers (or heads) batch by batch, and computes the
    CKA of every pair.

    centred: whether the mean of the first batch is subtracted; streams of several processes are
    joined without. Memory: one product of widths for every pair of layers.
    """

    def __init__(self, *, centred: bool = True) -> None:
        self.centred = centred
        self.centres: list[Tensor] = []
        self.layers = 0
        self.same = False
        self.widths = list[int]()
        self.sums: list[
            Sums
        ] = []  # of each layer with itself, and with those that it is compared with

    def add(self, first: Layers, second: Layers | None = None) -> None:
        """Add a batch: the same images (batch, dim) for each layer; None: the first set with
        itself.
        """
        both = [part.double() for part in (*first, *(second or ()))]
        if not self.sums:
            self.layers = len(first)
            self.same = second is None
            self.widths = [part.shape[1] for part in both]
        if self.centred:
            self.centres = self.centres or [part.mean(0) for part in both]
            both = [part - centre for part, centre in zip(both, self.centres)]
        others = both if self.same else both[self.layers :]
        wide = torch.cat(others, 1)
        squares = torch.stack([part.square().sum(1) for part in others], 1)
        n = torch.tensor(float(len(wide)), dtype=torch.float64)
        batch = []
        start = 0
        for i, x in enumerate(both):
            a = x.square().sum(1)
            if self.same:  # with itself and with later layers
                y = wide[:, start:]
                b = squares[:, i:]
                start = start + x.shape[1]
            elif i < self.layers:
                y = torch.cat((x, wide), 1)
                b = torch.cat((a[:, None], squares), 1)
            else:
                y = x
                b = a[:, None]
            batch.append(
                Sums(n, x.T @ y, x.sum(0), y.sum(0), x.T @ b, a @ y, a.sum(), b.sum(0), a @ b)
            )
        self.sums = [known.plus(new) for known, new in zip(self.sums, batch)] or batch

    def without(self, other: "CKAStream") -> "CKAStream":
        """Return the stream of this one's images without another's, which must have the same
        centres.
        """
        remaining = copy(self)
        remaining.sums = [sums.plus(own, sign=-1) for sums, own in zip(self.sums, other.sums)]
        return remaining

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up what the streams of several processes took in; total: the sum of a tensor over all
        of them.
        """
        self.sums = [Sums(*map(total, sums)) for sums in self.sums]

    def cka(self, *, biased: bool = False) -> Matrix:
        """CKA (layers, others), float64, on the CPU; NaN for a layer that does not vary, and below
        4 images.
        """
        rows = []
        for i, sums in enumerate(self.sums):
            others = self.widths[self.layers :] if i < self.layers else []
            widths = self.widths[i:] if self.same else [self.widths[i], *others]
            rows.append(sums.hsic(widths, biased=biased).cpu())
        own = torch.stack([row[0] for row in rows]).clamp_min(0).sqrt()
        if self.same:
            hsic = torch.stack([torch.cat((row.new_zeros(i), row)) for i, row in enumerate(rows)])
            cka = (hsic + hsic.triu(1).T) / (own[:, None] * own)
        else:
            hsic = torch.stack([row[1:] for row in rows[: self.layers]])
            cka = hsic / (own[: self.layers, None] * own[self.layers :])
        cka = cka.clamp(-1.0, 1.0)  # rounding
        return cka.where(cka.isfinite(), torch.nan)
