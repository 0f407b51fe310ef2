"""
The kubelet's protocols over gRPC on unix sockets: the generated types, a client, and a server for untrusted callers.

The only package that imports grpclib and betterproto2. The answers come from other packages: the allocator's device
plugin, and the fake kubelet.
"""
