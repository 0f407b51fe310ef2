"""
MPS: keeps NVIDIA's MPS control daemons running, one for each resource whose GPUs are shared by MPS on one node.

It reads the configuration and the GPUs itself and needs no bus. The allocator sees in a file whether a daemon serves
(`topoalign.plugin_config.mps_files`).
"""
