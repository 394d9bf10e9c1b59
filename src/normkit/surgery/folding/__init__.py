"""Folding norms into linear layers: the data flow that proves it, the algebra, the float64 run that checks it."""
