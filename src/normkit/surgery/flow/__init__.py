"""What one forward did: every operator, the norms among them, and the residual stream that they sit around."""
