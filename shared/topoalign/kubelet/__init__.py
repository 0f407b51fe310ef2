"""
What a kubelet keeps in files: its configuration, and what it has given to which container.

Read here, these files tell by which rules a node's kubelet decides and what it holds, so that its next decision can be
predicted without asking it. Nothing here writes what the kubelet owns, except for the stand-in of tests and demos. The
only door to YAML is `topoalign.kubelet.documents`.
"""
