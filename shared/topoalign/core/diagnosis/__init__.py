"""
Explains why a pod fits on no node of a cluster, and where it would fit.

`node_records` has what is known of each node as facts, which can be kept in a file. `node_decisions` decides for each
node as its kubelet would. `diagnosis` builds the answer: the nodes that would admit the pod, and the reasons of the
others. `changes` finds what would make the pod fit.
"""
