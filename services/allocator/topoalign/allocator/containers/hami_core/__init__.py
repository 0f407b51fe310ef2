"""
Supports the limiter HAMi-core for GPUs in slots: provides what its library reads in a container, and where it writes.

The library itself, which enforces the limits, is not part of this package (docs/sharing.md). Its files are read for
metrics, and to make low-priority containers wait. No decision depends on them.
"""
