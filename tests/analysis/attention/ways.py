"""Moved to tests/kit/attention.py."""

from functools import partial

from tests.kit.attention import product_by_matrices as product_by_matrices
from vitlens.attribution.explain import explain

gradient_rollout = partial(explain, method="gradient-rollout")
