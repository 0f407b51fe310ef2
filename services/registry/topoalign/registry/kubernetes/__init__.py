"""
Adapters of the port to Kubernetes' API server: over HTTP, and in memory over the stand-in's objects.

`objects` reads what the API server shows. Nothing else in the product imports lightkube and aiohttp, and this package only
where `TOPOALIGN_KUBERNETES` asks for it.
"""
