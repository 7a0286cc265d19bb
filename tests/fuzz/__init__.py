"""Wrong calls, damaged files, names with markup and kills: run by hand with `pytest -m slow tests/fuzz -n 2`.

Every case is a seed: VITLENS_FUZZ_SEED=N shifts them all, so that another N is another set of cases.
"""
