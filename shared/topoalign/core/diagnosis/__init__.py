"""
Explains why a pod fits on no node of a cluster, and where it would fit.

`node_records` has the known facts of each node, which can be written to a file. `node_decisions` decides for each node
as its kubelet would. `diagnosis` builds the answer: the nodes that would admit the pod, and why the others refuse it.
`changes` finds changes that would make the pod fit.
"""
