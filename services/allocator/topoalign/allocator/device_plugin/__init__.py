"""
The kubelet's device plugins: one per resource, and what containers get with their devices (CDI).

It knows the allocator by the ports of `allocator.ports` only. The protocols and the servers under it are in `kubelet.grpc`.
"""
