"""
The device policies for GPUs, and the scores of links that they compare.

The table of all device policies is `PLACEMENTS` in `placement.preference`.
"""
