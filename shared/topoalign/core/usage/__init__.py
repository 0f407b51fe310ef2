"""
Measurements of how containers use the GPUs that they hold. They are not part of a node's state.

`cgroups` finds the container of a process from its control group (cgroup). `attribution` computes how much of each GPU
a container uses, and which containers use more than was allocated to them.
"""
