"""
How a node's devices are served: which resources they make up, how they are shared, and what a container is told of them.

The configuration has the shape of the one that NVIDIA's device plugin reads, so that a file written for it can be used as it
is; what that plugin does not know stands beside it.
"""
