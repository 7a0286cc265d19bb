"""Reasons for failures: error taxonomy, properties of images, shape bias, disturbed images."""
