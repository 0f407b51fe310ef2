"""
The kubelet's files, and its protocols over gRPC.

Nothing here makes decisions: that is `topoalign.core`.
"""
