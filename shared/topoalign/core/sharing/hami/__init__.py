"""
Shares as HAMi decides on them: which cards of which node a pod gets, by count, memory and cores of each card.

A container's resources become a `CardRequest` (`core.demand.shares`), a pod's annotations `PodRules`
(`selection`), a card a `CardUsage` (`usage`). `choice` finds the cards of one container: `scores` and `order` say in which
order the cards are tried, `fit` which of them are taken, `topology` which set of them is connected best, `mig` which
instances they become. `place` goes over the containers of a pod. `registration`, `pod_devices` and `handshake` read the
annotations by which HAMi's parts talk to one another. topoalign itself writes none of them: what encodes a pod's cards is
for the suite `hami/pod_annotation_codec` and for tests.

Amounts are HAMi's: memory in MiB, cores in hundredths of a card, both of each card. Every order ends with NUMA node,
index and uuid, so that no tie is left to chance. Source of all rules: HAMi 4707fb02.
"""
