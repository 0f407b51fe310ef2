"""
The kubelet's files, and its protocols over gRPC.

This package makes no decisions; `topoalign.core` does.
"""
