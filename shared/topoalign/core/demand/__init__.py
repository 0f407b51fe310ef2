"""
Reads and validates a pod once, when it arrives, into what the decision uses.

`pod_demand.read_pod` validates a PodRequest and turns it into a PodDemand. Hints, policy, placement and explanation use only
the demand, of one container or of the whole pod, and never read requests, limits or annotations again.
"""
