"""
The kubelet's protocols over gRPC on unix sockets: the generated types, a client, and a server that bears any caller.

The only door to grpclib and betterproto2. What is answered is decided elsewhere: in the allocator's device plugin, and in
the fake kubelet.
"""
