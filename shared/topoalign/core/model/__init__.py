"""
What is said: ids, errors, requests, decisions, hints, facts and the hardware as types, with what can be read off them.

These types travel on the bus and stand in the journal. What is concluded from several facts is in `state`, what is
decided in `admission`.
"""
