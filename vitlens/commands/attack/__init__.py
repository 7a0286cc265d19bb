"""`vitlens attack`: accuracy under adversarial attack over epsilon, and under common corruptions."""
