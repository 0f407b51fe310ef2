"""
Scores how good a node is for a pod that it would admit: the scores of `prioritize`, 0 to 10.

`zones` counts what each NUMA node has left, and `numa` scores these amounts. `quality` scores the GPUs that the pod
would get. `scorers` has the scores by name, those in the order of gpu-admission and of HAMi included. Whether the pod
fits is decided in `admission`.
"""
