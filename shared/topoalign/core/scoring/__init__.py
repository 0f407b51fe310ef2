"""
How good a node is for a pod that it would admit: the scores of `prioritize`, 0 to 10.

`zones` has what each NUMA node of a node has left, `numa` the scores that look at these amounts, `quality` the score that
looks at the GPUs which the pod would get, `gaia` the order in which gpu-admission tries nodes, `hami` that in which HAMi
ranks them. Whether the pod fits is not asked here: `admission` decides that.
"""
