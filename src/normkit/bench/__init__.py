"""`normkit bench`: what a norm costs here, against what else there is, in one interleaved run."""
