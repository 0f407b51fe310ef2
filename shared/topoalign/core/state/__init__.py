"""
The state of one node: the fold over its facts, the health of its devices, and its memory account.

`model` defines the facts; the services of the node publish them, and registries its reservations.
"""
