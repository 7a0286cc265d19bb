"""Predictions against labels: accuracy, calibration, pairs of models, paired tests and
intervals."""
