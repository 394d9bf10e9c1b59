"""`normkit lab train`: wirings, norms and models of one's own, trained side by side over a grid and judged in pairs."""
