"""
Measurements of how containers use the GPUs that they hold. They are not part of a node's state.

`cgroups` reads from the control group of a process in which container it runs. `attribution` computes which container
uses how much of which GPU, and which uses more than it was given.
"""
