"""What computes a norm: the reference, and the registry through which faster kernels are chosen."""
