"""
The kubelet's device plugins, one per resource.

It uses the allocator only through `allocator.ports`. The protocols and servers are in `kubelet.grpc`.
"""
