"""`vitlens look`: one photograph, one page: the prediction, where the evidence lies, the heads that
matter.
"""
