"""
Serves kube-scheduler: which nodes would admit a pod, which is best, and what is reserved there.

`server` serves what `extender` answers to kube-scheduler and `webhook` to the API server, `view` knows for each node what
its kubelet would answer next, and what is asked and answered between them is in `model`.
"""
