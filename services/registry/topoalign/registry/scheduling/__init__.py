"""Serves kube-scheduler: which nodes would admit a pod, which is best, and what is reserved there."""
