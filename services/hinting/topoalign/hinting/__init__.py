"""Hinting: answers on which NUMA nodes a container or pod of one node could be placed."""
