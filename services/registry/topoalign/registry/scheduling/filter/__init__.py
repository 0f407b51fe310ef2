"""Filter, score and preemption, decided from the state of the cluster."""
