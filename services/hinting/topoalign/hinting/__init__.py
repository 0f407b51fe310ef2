"""Hinting: answers where a container or pod of one node could be placed."""
