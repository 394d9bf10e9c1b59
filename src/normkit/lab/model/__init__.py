"""The lab's Transformer and how it is trained, a screen a concept."""
