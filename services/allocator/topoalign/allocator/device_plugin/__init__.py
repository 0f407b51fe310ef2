"""
The node's place in the kubelet: one device plugin per resource, and what containers are told of their devices (CDI).

It knows the allocator by the ports of `allocator.ports` only. The protocols and the servers under it are in `kubelet.grpc`.
"""
