"""
The state of one node: the fold over its facts, the health of its devices, and its memory account.

How facts look is in `model`; how they are written down and published is the allocator's business.
"""
