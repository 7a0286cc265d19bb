"""What a model costs: parameters, FLOPs, memory, latency and throughput."""
