"""Wrong calls, damaged files and kills: run by hand with `pytest -m slow tests/fuzz -n 2`.

Every case is a seed: VITLENS_FUZZ_SEED=N shifts them all, so that another N is another set of cases. Names with markup
are tests/contracts/test_names_shown.py's.
"""
