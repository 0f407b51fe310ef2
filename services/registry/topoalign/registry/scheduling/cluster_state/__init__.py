"""The state on which each kubelet would decide next: nodes, reported pods and assumed pods."""
