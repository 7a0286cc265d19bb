"""What vitlens costs on a GPU: `python -m benchmarks.gpu`, which needs torch, torchvision, timm and
vitlens alone.
"""
