"""`vitlens audit`: one model on one data set, judged for a release."""
