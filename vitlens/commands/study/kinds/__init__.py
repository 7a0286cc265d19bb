"""The kinds of controlled comparison: what `vitlens study --kind` trains, and what it says of it."""
