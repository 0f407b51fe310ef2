"""Chooses devices of several types for one pod: GPUs with the NICs near them, by Koordinator's annotations."""
