"""
The scheduler's side of the registry: which nodes would admit a pod, which is best, and what is reserved there.

`extender` speaks kube-scheduler's protocol, `view` knows for each node what its kubelet would say next, and what is asked
and answered between them is in `model`.
"""
