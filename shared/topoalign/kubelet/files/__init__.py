"""
The files of a kubelet: its configuration, its checkpoints, the directories of pods; and manifests of pods.

They contain the rules by which a node's kubelet decides, and the resources that its containers hold. So its next
decision can be predicted without a call. topoalign never writes the files of a real kubelet; only the fake kubelet of
tests and demos writes such files. Only `yaml_text` imports the YAML library.
"""
