"""Answers filter, score and preemption calls from the state of the cluster."""
