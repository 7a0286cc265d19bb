"""Predictions against labels: accuracy, calibration, pairs of models, tests and intervals."""
