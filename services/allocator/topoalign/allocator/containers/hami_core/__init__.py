"""
HAMi-core, the limiter for GPUs in slots: what its library reads in a container, and the directories that it writes to.

The library itself is not part of this: it is what limits (docs/sharing.md). What it writes is read to be shown, and so that
containers of low priority wait; no decision stands on it.
"""
