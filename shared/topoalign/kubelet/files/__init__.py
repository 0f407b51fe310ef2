"""
The files that a kubelet keeps: its configuration, its checkpoints, the directories of pods; and manifests of pods.

Read here, they tell by which rules a node's kubelet decides and what it holds, so that its next decision can be predicted
without asking it. Nothing here writes what the kubelet owns, except for the fake kubelet of tests and demos. The only door
to YAML is `documents`.
"""
