"""
Supports Gaia's limiter vcuda for GPUs in units: provides the files that its library reads, and its registration socket.

The library itself, which enforces the limits, is not part of this package (docs/sharing.md).
"""
