"""
The adapter of the port to Kubernetes' API server over HTTP.

`objects` decodes the objects of the API server. Only this package imports lightkube, and it is imported only if
`TOPOALIGN_KUBERNETES` is not `off`.
"""
