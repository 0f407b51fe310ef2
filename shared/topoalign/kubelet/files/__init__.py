"""
The files of a kubelet: its configuration, its checkpoints, the directories of pods; and manifests of pods.

They contain the rules by which a node's kubelet decides and what its containers hold, so that its next decision can be
predicted without asking it. Nothing here writes files of a real kubelet; only the fake kubelet of tests and demos
writes them. Only `documents` imports the YAML library.
"""
