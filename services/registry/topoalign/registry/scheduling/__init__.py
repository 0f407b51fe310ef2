"""Serves kube-scheduler: which nodes would admit a pod, which node is best, and which devices are reserved there."""
