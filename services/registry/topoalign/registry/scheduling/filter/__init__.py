"""Decides filter, score and preemption from the state of the cluster."""
