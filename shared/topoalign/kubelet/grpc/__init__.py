"""
The kubelet's protocols over gRPC on unix sockets: the generated types, a client, and a server for untrusted callers.

This is the only package that imports grpclib and betterproto2. Other packages implement the services: the
allocator's device plugin, and the fake kubelet.
"""
