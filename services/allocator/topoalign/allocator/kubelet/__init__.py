"""The door to the kubelet: its device plugin API, its PodResources API, and a stand-in for it in tests and demos."""
