"""`vitlens attack`: accuracy under adversarial attack over epsilon, and what changes inside the
models.
"""
