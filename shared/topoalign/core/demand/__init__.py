"""
Validates a pod when it arrives, and converts it once to the demand that the decision uses.

`pod_demand.read_pod` validates a PodRequest and converts it to a PodDemand. Hints, policy, placement and explanation
use only the demand of a container or of the whole pod. They never read requests, limits or annotations again.
"""
