"""`vitlens reversal`: one attention layer trained on the spot to reverse, copy or sort vectors."""
