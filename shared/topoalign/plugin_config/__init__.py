"""
The configuration of what a node offers: the resources, how devices are shared, and how a container receives them.

The format is that of the configuration file of NVIDIA's device plugin, so a file for that plugin works unchanged;
additional fields are topoalign's own.
"""
