"""Hinting: computes the sets of NUMA nodes on which a container or pod of one node can be placed."""
