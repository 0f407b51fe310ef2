"""
Scores how good a node is for a pod that it would admit: the scores of `prioritize`, 0 to 10.

`zones` counts the free resources of each NUMA node, and `numa` scores them. `quality` scores the GPUs that the pod
would get. `scorers` has the scores by name, including those in the order of gpu-admission and of HAMi. `admission`
decides whether the pod fits.
"""
