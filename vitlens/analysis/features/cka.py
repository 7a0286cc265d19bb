"""Linear CKA from running sums, in memory independent of the number of images n.

It equals CKA of all images at once for any batches. Centred kernel alignment (Kornblith 2019) is
HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)). The unbiased estimator of HSIC (Song 2012, equation 5) of
the Gram matrices K = X X' and L = Y Y', their diagonals set to 0, is

    [ tr(K L) + 1'K1 1'L1 / ((n - 1)(n - 2)) - 2/(n - 2) 1'K L 1 ] / (n (n - 3)).

Minibatch CKA (Nguyen 2021) averages this estimator over batches, which is noisier and depends on
the batches. No Gram matrix is needed: with a_i = |x_i|^2, b_i = |y_i|^2, s = sum x_i, t = sum y_i
and C = X'Y,

    tr(K L) = |C|^2 - sum a_i b_i    (all pairs of images, less the diagonal)
    1'K1    = |s|^2 - sum a_i
    1'K L 1 = sum (x_i.s - a_i)(y_i.t - b_i)
            = s'C t - s.(sum b_i x_i) - t.(sum a_i y_i) + sum a_i b_i

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
    """The sums over n images of a layer X (n, dim) and several layers Y (n, widths), float64.

    The layers Y are concatenated; see the notation of the module.

    product: C.
    x: s.
    y: t.
    x_b: sum b_i x_i.
    y_a: sum a_i y_i.
    a, b, ab: of the squared lengths.
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
        """Return the sums over the images of both.

        With sign -1 they are over the images of this one without those of the other.
        """
        return Sums(*(first + sign * second for first, second in zip(self, other)))

    def hsic(self, widths: Sequence[int], *, biased: bool = False) -> Float[Tensor, " others"]:
        """Return HSIC with linear kernels of X and of each Y."""

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
    """Accumulates the features of two sets of layers (or heads), and computes CKA of every pair.

    centred: whether the mean of the first batch is subtracted; streams of several processes are
    joined without. Memory: one product of widths for every pair of layers.
    """

    def __init__(self, *, centred: bool = True) -> None:
        self.centred = centred
        self.centres: list[Tensor] = []
        self.layers = 0
        self.same = False
        self.widths = list[int]()
        # of each layer with itself, and with those that it is compared with
        self.sums: list[Sums] = []

    def add(self, first: Layers, second: Layers | None = None) -> None:
        """Add a batch: the same images (batch, dim) for each layer.

        second: None for the first set with itself.
        """
        layers = [part.double() for part in (*first, *(second or ()))]
        if not self.sums:
            self.layers = len(first)
            self.same = second is None
            self.widths = [part.shape[1] for part in layers]
        if self.centred:
            self.centres = self.centres or [part.mean(0) for part in layers]
            layers = [part - centre for part, centre in zip(layers, self.centres)]
        compared = layers if self.same else layers[self.layers :]
        joined = torch.cat(compared, 1)
        squares = torch.stack([part.square().sum(1) for part in compared], 1)
        n = torch.tensor(float(len(joined)), dtype=torch.float64)
        batch = list[Sums]()
        start = 0
        for i, x in enumerate(layers):
            a = x.square().sum(1)
            if self.same:  # with itself and with later layers
                y = joined[:, start:]
                b = squares[:, i:]
                start = start + x.shape[1]
            elif i < self.layers:
                y = torch.cat((x, joined), 1)
                b = torch.cat((a[:, None], squares), 1)
            else:
                y = x
                b = a[:, None]
            batch.append(
                Sums(n, x.T @ y, x.sum(0), y.sum(0), x.T @ b, a @ y, a.sum(), b.sum(0), a @ b)
            )
        if self.sums:
            batch = [total.plus(new) for total, new in zip(self.sums, batch)]
        self.sums = batch

    def without(self, other: "CKAStream") -> "CKAStream":
        """Return the stream of this one's images without those of another.

        Both must have the same centres.
        """
        remaining = copy(self)
        remaining.sums = [
            total.plus(removed, sign=-1) for total, removed in zip(self.sums, other.sums)
        ]
        return remaining

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up the streams of several processes.

        total: returns the sum of a tensor over all of them.
        """
        self.sums = [Sums(*map(total, sums)) for sums in self.sums]

    def cka(self, *, biased: bool = False) -> Matrix:
        """Return CKA (layers, others), float64, on the CPU.

        NaN for a layer that does not vary, and below 4 images.
        """
        rows = list[Tensor]()
        for i, sums in enumerate(self.sums):
            if self.same:
                widths = self.widths[i:]
            elif i < self.layers:
                widths = [self.widths[i], *self.widths[self.layers :]]
            else:
                widths = [self.widths[i]]
            rows.append(sums.hsic(widths, biased=biased).cpu())
        norms = torch.stack([row[0] for row in rows]).clamp_min(0).sqrt()
        if self.same:
            upper = [torch.cat((row.new_zeros(i), row)) for i, row in enumerate(rows)]
            hsic = torch.stack(upper)
            cka = (hsic + hsic.triu(1).T) / (norms[:, None] * norms)
        else:
            hsic = torch.stack([row[1:] for row in rows[: self.layers]])
            cka = hsic / (norms[: self.layers, None] * norms[self.layers :])
        cka = cka.clamp(-1.0, 1.0)  # rounding
        return cka.where(cka.isfinite(), torch.nan)
