"""
The types of the domain: ids, errors, requests, decisions, hints, facts and the hardware, with what is derived from one
of them.

These types travel on the bus and are kept in the journal. What follows from several facts is in `state`, what is
decided in `admission`.
"""
