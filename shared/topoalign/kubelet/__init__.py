"""
What a kubelet writes and says: its files, and its protocols over gRPC.

Nothing here decides anything: that is `topoalign.core`.
"""
