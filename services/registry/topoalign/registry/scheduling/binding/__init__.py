"""Binds pods: checks, reservations by compare-and-set, confirmation by the node, and gangs."""
