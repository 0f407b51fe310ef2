"""
Shares as HAMi decides on them: which GPUs of which node a pod gets, by count, memory and cores of each GPU.

A container's resources become a `CardRequest` (`core.demand.shares`), a pod's annotations `PodRules`
(`selection`), a GPU a `CardUsage` (`usage`). `choice` finds the GPUs of one container: `scores` and `order` say in which
order the GPUs are tried, `fit` which of them are taken, `topology` which set of them is connected best, `mig` which
instances they become. `place` goes over the containers of a pod. `registration`, `pod_devices` and `handshake` read the
annotations by which HAMi's parts talk to one another. topoalign itself writes none of them: what encodes a pod's GPUs is
for the suite `hami/pod_annotation_codec` and for tests.

Amounts are HAMi's: memory in MiB, cores in hundredths of a GPU, both of each GPU. Every order ends with NUMA node,
index and uuid, so that no tie is left to chance. Source of all rules: HAMi 4707fb02.
"""
