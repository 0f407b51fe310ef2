"""`topoalign demo`: the main job before your eyes, on a described machine or on this one."""
