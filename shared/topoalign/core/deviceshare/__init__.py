"""
Devices of several types for one pod: GPUs with the NICs beside them, by Koordinator's annotations.
"""
