"""Linear CKA from running sums: the memory does not depend on the number of images n.

The result is CKA of all images at once, whatever the batches. Centred kernel alignment (CKA,
Kornblith 2019) of features X and Y is HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)). It takes the Gram
matrices K = X X' and L = Y Y'. If their diagonals are set to 0, the unbiased estimator of HSIC
(Song 2012, equation 5) is

    [ tr(K L) + 1'K1 1'L1 / ((n - 1)(n - 2)) - 2/(n - 2) 1'K L 1 ] / (n (n - 3)).

Minibatch CKA (Nguyen 2021) averages this estimator over batches, which is noisier and depends on
the batches. Here no Gram matrix is needed. With a_i = |x_i|^2, b_i = |y_i|^2, s = sum x_i,
t = sum y_i and C = X'Y, the three terms are

    tr(K L) = |C|^2 - sum a_i b_i    (all pairs of images, less the diagonal)
    1'K1    = |s|^2 - sum a_i
    1'K L 1 = sum (x_i.s - a_i)(y_i.t - b_i)
            = s'C t - s.(sum b_i x_i) - t.(sum a_i y_i) + sum a_i b_i

So C, s, t, sum b_i x_i, sum a_i y_i, sum a_i, sum b_i and sum a_i b_i are sufficient. All are sums
over images, exact up to rounding in float64. The estimator does not change if a constant is added
to all rows. So the mean of the first batch is subtracted, to avoid cancellation if means are large.
The biased estimator is |C - s t' / n|^2 / (n - 1)^2.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Layers = Sequence[Tensor]  # a tensor (batch, dim) for each layer; layers may differ in width
Matrix = Float[Tensor, "layers others"]
FEWEST = 4  # the unbiased estimator is not defined for fewer images


class Sums(NamedTuple):
    """Sums over n images of a layer X (n, dim) and several other layers Y, float64.

    The layers Y are concatenated to (n, widths). `others` is their number. The notation is that of
    the module.

    n: the number of images.
    product (dim, widths): C = X'Y.
    x (dim,): s, the sum of x_i.
    y (widths,): t, the sum of y_i.
    x_b (dim, others): the sum of b_i x_i, for each layer Y.
    y_a (widths,): the sum of a_i y_i.
    a: the sum of a_i, the squared lengths in X.
    b (others,): the sum of b_i, the squared lengths in each layer Y.
    ab (others,): the sum of a_i b_i, for each layer Y.
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

        With sign -1, return the sums over this one's images without those of the other.
        """
        return Sums(*(mine + sign * theirs for mine, theirs in zip(self, other)))

    def hsic(self, widths: Sequence[int], *, biased: bool = False) -> Float[Tensor, " others"]:
        """Return HSIC of X with each layer Y.

        widths: the width of each layer Y.
        """

        def sum_by_layer(values: Float[Tensor, " widths"]) -> Float[Tensor, " others"]:
            return torch.stack([part.sum() for part in values.split(list(widths))])

        n = self.n.to(self.x.device)
        s = self.x
        t = self.y
        if biased:
            centred = self.product - torch.outer(s, t) / n
            return sum_by_layer(centred.square().sum(0)) / (n - 1) ** 2
        # the three terms of the estimator, in the formulas of the module
        trace_kl = sum_by_layer(self.product.square().sum(0)) - self.ab
        sum_of_k = s @ s - self.a
        sum_of_l = sum_by_layer(t.square()) - self.b
        s_c_t = sum_by_layer((s @ self.product) * t)
        sum_of_kl = s_c_t - s @ self.x_b - sum_by_layer(t * self.y_a) + self.ab
        ends = sum_of_k * sum_of_l / ((n - 1) * (n - 2))
        return (trace_kl + ends - 2 / (n - 2) * sum_of_kl) / (n * (n - 3))


class CKAStream:
    """Accumulates the features of two sets of layers (or heads), and computes CKA of every pair.

    It holds one matrix for every pair of layers, of the size of their widths.

    centred: True to subtract the mean of the first batch. It must be False for streams of several
        processes, which have different first batches.
    centres: the mean of the first batch for each layer, empty if it is not subtracted.
    layers: the number of layers in the first set.
    same: True if there is no second set: the first set is then compared with itself.
    widths: the width of each layer of the first set, then of the second.
    sums: for each of these layers, the sums with the layers that it is compared with. The first of
        them is always the layer itself, for the denominator of CKA. Layer i of a single set is
        compared with layers i, i + 1 and so on. A layer of the first of two sets is compared with
        itself and the whole second set. A layer of the second set is compared with itself only.
    """

    def __init__(self, *, centred: bool = True) -> None:
        self.centred = centred
        self.centres: list[Tensor] = []
        self.layers = 0
        self.same = False
        self.widths = list[int]()
        self.sums: list[Sums] = []

    def add(self, first: Layers, second: Layers | None = None) -> None:
        """Add the features (batch, dim) of a batch of images at each layer.

        second: the features of the same images at the second set of layers, None for a single set.
        """
        layers = [part.double() for part in first]
        if second is not None:
            layers += [part.double() for part in second]
        if not self.sums:
            self.layers = len(first)
            self.same = second is None
            self.widths = [part.shape[1] for part in layers]
        if self.centred:
            if not self.centres:
                self.centres = [part.mean(0) for part in layers]
            layers = [part - centre for part, centre in zip(layers, self.centres)]
        squares = [part.square().sum(1) for part in layers]  # for each layer (batch,)
        batch = list[Sums]()
        for i, x in enumerate(layers):
            compared = self._compared(i)
            y = torch.cat([layers[layer] for layer in compared], 1)  # (batch, widths)
            b = torch.stack([squares[layer] for layer in compared], 1)  # (batch, layers)
            batch.append(_sums(x, y, a=squares[i], b=b))
        if self.sums:
            batch = [total.plus(new) for total, new in zip(self.sums, batch)]
        self.sums = batch

    def _compared(self, layer: int) -> list[int]:
        """Return the layers that one is compared with, itself first; see `sums`."""
        if self.same:
            return list(range(layer, len(self.widths)))
        if layer < self.layers:
            return [layer, *range(self.layers, len(self.widths))]
        return [layer]

    def without(self, other: "CKAStream") -> "CKAStream":
        """Return a stream of this one's images without those of another stream.

        Both must have the same centres.
        """
        remaining = copy(self)
        remaining.sums = [
            total.plus(removed, sign=-1) for total, removed in zip(self.sums, other.sums)
        ]
        return remaining

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add up the streams of several processes.

        total: returns the sum of a tensor over all processes.
        """
        self.sums = [Sums(*map(total, sums)) for sums in self.sums]

    def cka(self, *, biased: bool = False) -> Matrix:
        """Return CKA of every pair of layers, float64, on the CPU.

        It is NaN for a layer that does not vary. Without `biased`, it is also NaN for fewer than 4
        images.
        """
        rows = list[Tensor]()  # HSIC of each layer with itself, then with the others in its sums
        for i, sums in enumerate(self.sums):
            widths = [self.widths[layer] for layer in self._compared(i)]
            rows.append(sums.hsic(widths, biased=biased).cpu())
        norms = torch.stack([row[0] for row in rows]).clamp_min(0).sqrt()
        if self.same:
            # row i starts at its diagonal element; the rest follows by symmetry
            padded = [torch.cat((row.new_zeros(i), row)) for i, row in enumerate(rows)]
            upper = torch.stack(padded)
            hsic = upper + upper.triu(1).T
            cka = hsic / (norms[:, None] * norms)
        else:
            # without the first number, that of the layer itself, which is in the norms
            hsic = torch.stack([row[1:] for row in rows[: self.layers]])
            cka = hsic / (norms[: self.layers, None] * norms[self.layers :])
        cka = cka.clamp(-1.0, 1.0)  # rounding may exceed the limits
        return cka.where(cka.isfinite(), torch.nan)


def _sums(
    x: Float[Tensor, "batch dim"],
    y: Float[Tensor, "batch widths"],
    *,
    a: Float[Tensor, " batch"],
    b: Float[Tensor, "batch others"],
) -> Sums:
    """Return the sums over a batch, from the rows of both layers and their squared lengths."""
    return Sums(
        n=torch.tensor(float(len(x)), dtype=torch.float64),
        product=x.T @ y,
        x=x.sum(0),
        y=y.sum(0),
        x_b=x.T @ b,
        y_a=a @ y,
        a=a.sum(),
        b=b.sum(0),
        ab=a @ b,
    )
