"""Folding norms into linear layers: the data flow that proves it, the algebra that does it, the float64 run that checks it."""
