"""
The types of the domain: ids, errors, requests, decisions, hints, facts and the hardware. Data that is derived from a
single object of these types is also here.

They are published on the bus and stored in the journal. `state` derives data from several facts. `admission` decides.
"""
