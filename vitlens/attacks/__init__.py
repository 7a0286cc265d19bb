"""Adversarial attacks: registry.py lists them, attack.py runs one, sweep.py measures curves over epsilon."""
