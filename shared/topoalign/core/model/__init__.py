"""
The types of the domain: ids, errors, requests, decisions, hints, facts and the hardware, with what is derived from one
of them.

These types are published on the bus and stored in the journal. `state` derives data from several facts. `admission` decides.
"""
