"""
Gaia's limiter for GPUs in units: what its library, vcuda, reads in a container, and the socket on which it registers.

The library itself is not part of this: it is what limits (docs/sharing.md).
"""
