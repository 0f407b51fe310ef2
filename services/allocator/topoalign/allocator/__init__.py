"""Allocates the devices of one node to containers, records the allocations, and publishes them."""
