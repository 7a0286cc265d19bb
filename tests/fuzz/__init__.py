"""Wrong calls and damaged files: run by hand with `pytest -m slow tests/fuzz -n 2`.

Every case is a seed: VITLENS_FUZZ_SEED=N shifts them all. Names with markup are
tests/contracts/test_names_shown.py's.
"""
