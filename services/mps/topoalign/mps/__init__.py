"""
Keeps NVIDIA's MPS control daemons of one node running, one for each resource whose GPUs are shared by MPS.

It reads the configuration and the GPUs itself, and needs no bus. The allocator reads from a file whether a daemon
serves (`topoalign.plugin_config.mps_files`).
"""
