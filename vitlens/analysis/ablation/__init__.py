"""Ablation."""
