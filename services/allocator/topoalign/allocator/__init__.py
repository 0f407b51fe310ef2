"""Gives the devices of one node to containers, keeps the record of it, and announces it."""
