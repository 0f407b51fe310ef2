"""
Chooses the devices, CPUs and memory of a container, once its NUMA affinity is known.

`gpus` has the device policies for GPUs, and `partition` the search of policy `best-effort`. The NUMA affinity is
decided before, in `hints` and `policy`.
"""
