"""`vitlens profile`: the cost of models: parameters, FLOPs, memory, latency."""
