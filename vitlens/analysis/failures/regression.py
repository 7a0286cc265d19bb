"""Logistic regression of errors on properties of images."""

import warnings
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# penalty on standardised coefficients, which keeps them finite if a property separates completely
_RIDGE: Final = 1e-4
_TINY: Final = 1e-12  # avoids a division by 0


@dataclass(frozen=True)
class Fit:
    """A fitted regression.

    deviance: minus twice the log likelihood.
    slopes: the slopes of the standardised columns.
    chances: the probability of an error for each image.
    """

    deviance: float
    slopes: Array
    chances: Array


def standardise(columns: Array) -> Array:
    """Return columns (n, properties) of mean 0 and standard deviation 1; constant ones are 0."""
    scaled: Array = (columns - columns.mean(0)) / np.maximum(columns.std(0), _TINY)
    return scaled


def fit_errors(columns: Array, wrong: NDArray[np.bool_]) -> Fit:
    """Return the logistic regression of `wrong` on standardised columns and a constant."""
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    design = columns
    if not columns.shape[1]:
        design = np.zeros((len(wrong), 1))  # scikit-learn fits no constant without a column
    model = LogisticRegression(C=1 / _RIDGE, solver="newton-cholesky", tol=1e-8, max_iter=1000)
    # it warns if Newton's steps do not descend, and continues with L-BFGS
    with warnings.catch_warnings(action="ignore"):
        scores = model.fit(design, wrong).decision_function(design)
    # an image has the log likelihood score - log(1 + exp(score)), without the first term if correct
    log_likelihood = scores[wrong].sum() - np.logaddexp(0, scores).sum()
    chances = 1 / (1 + np.exp(-scores))
    return Fit(deviance=-2 * float(log_likelihood), slopes=model.coef_[0], chances=chances)


def likelihood_ratio(columns: Array, column: int, wrong: NDArray[np.bool_]) -> float:
    """Return the fall in deviance by one column, given the others; at least 0."""
    without = fit_errors(np.delete(columns, column, 1), wrong).deviance
    return max(0.0, without - fit_errors(columns, wrong).deviance)
