"""
Why a pod fits on no node of a cluster, and where it would fit: questions about all nodes at once, for people.

`records` has what is known of each node as facts, which can be kept in a file; `nodes` what the kubelet of each would say;
`diagnosis` the answer: the nodes that would admit the pod, the reasons of the others, and in `changes` what would make it
fit; `gangs` counts how many pods of a kind fit at once.
"""
