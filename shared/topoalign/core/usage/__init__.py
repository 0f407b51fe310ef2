"""
What containers use of the GPUs that they hold: measurements, which are no part of a node's state.

`cgroups` reads from the control group of a process in which container it runs, `attribution` which container uses how much
of which GPU, `excess` who uses more than it was given.
"""
