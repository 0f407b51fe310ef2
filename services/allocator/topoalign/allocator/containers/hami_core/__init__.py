"""
Serves the limiter HAMi-core for GPUs in slots: what its library reads in a container, and the directories that it writes to.

The library itself, which enforces the limits, is not part of this package (docs/sharing.md). Its files are read for metrics,
and to let containers of low priority wait. No decision depends on them.
"""
