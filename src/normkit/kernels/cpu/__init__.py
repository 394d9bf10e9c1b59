"""Fused row norms for the CPU: written in Python, compiled by Numba, run on PyTorch's threads."""
