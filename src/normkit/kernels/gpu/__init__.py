"""Fused norms in Triton. Nothing here is imported before a call needs it; `kernel` is what the registry sees."""
