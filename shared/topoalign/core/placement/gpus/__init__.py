"""
The device policies for GPUs, one module each, and the scores of links that they compare.

The table of all policies is in `placement.preference`.
"""
