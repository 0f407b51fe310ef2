"""The state for the next decision of each kubelet: nodes, reported pods and assumed pods."""
