"""Adversarial attacks: registry.py lists them, attack.py runs one at one or several epsilons."""
