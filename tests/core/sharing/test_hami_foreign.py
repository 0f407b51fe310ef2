"""What HAMi's annotations tell of a node that it runs: cards, who holds them, and whether it still gives them out."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.sharing.hami.node_annotations import (
    LONGEST,
    MOST_CONTAINERS,
    MOST_HOLDERS,
    MOST_REGISTERED_GPUS,
    MOST_SHARES,
    REQUESTING,
    AnnotatedShare,
    ForeignPod,
    HamiLiveness,
    PodGpu,
    foreign_gpus,
    liveness_of,
    read_registered_gpus,
    read_shares,
)
from topoalign.core.sharing.hami.registration import InvalidAnnotation, RegisteredGpu
from topoalign.tools.conformance.hami_texts import encode_pod

NOW = datetime(2026, 3, 4, 5, 6, 7)
H100 = RegisteredGpu(id="GPU-1", index=1, slots=10, memory=81559, cores=100, type="NVIDIA H100", numa=1, healthy=True)
FIRST = msgspec.structs.replace(H100, id="GPU-0", index=0, numa=0)

shares = st.builds(
    AnnotatedShare,
    gpu=st.sampled_from(["GPU-0", "GPU-1", "GPU-other"]),
    container=st.sampled_from(["a", "b", ""]),
    is_init=st.booleans(),
    memory=st.integers(0, 1000),
    cores=st.integers(0, 100),
)
pods = st.lists(st.lists(shares, max_size=5).map(tuple), max_size=4).map(
    lambda held: [ForeignPod(namespace="ml", name=f"p{n}", uid=str(n), shares=each) for n, each in enumerate(held)]
)


def share(container: str, memory: int, *, init: bool = False, cores: int = 0, card: str = "GPU-0") -> AnnotatedShare:
    return AnnotatedShare(gpu=card, container=container, is_init=init, memory=memory, cores=cores)


def test_cards_are_read_from_json_by_index() -> None:
    assert (FIRST, H100) == read_registered_gpus(msgspec.json.encode([H100, FIRST]).decode())


def test_cards_are_read_from_the_oldest_text() -> None:
    (card,) = read_registered_gpus("GPU-9,10,16384,100,NVIDIA-V100,1,true:")

    assert ("GPU-9", 10, 16384, 1, True, "hami-core") == (
        card.id, card.slots, card.memory, card.numa, card.healthy, card.mode,
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[1]",
        "x" * (LONGEST + 1),
        "[" + " " * 2_000_000 + "]",
        msgspec.json.encode(
            [msgspec.structs.replace(H100, id=f"GPU-{n}") for n in range(MOST_REGISTERED_GPUS + 1)]
        ).decode(),
        msgspec.json.encode([H100, H100]).decode(),
        msgspec.json.encode([msgspec.structs.replace(H100, slots=10**9)]).decode(),
        msgspec.json.encode([msgspec.structs.replace(H100, slots=-1)]).decode(),
        msgspec.json.encode([msgspec.structs.replace(H100, memory=10**9)]).decode(),
        msgspec.json.encode([msgspec.structs.replace(H100, cores=10**9)]).decode(),
        msgspec.json.encode([msgspec.structs.replace(H100, index=10**9)]).decode(),
        msgspec.json.encode([msgspec.structs.replace(H100, numa=-2)]).decode(),
        msgspec.json.encode([msgspec.structs.replace(H100, type="\x1b[31m")]).decode(),
        msgspec.json.encode([msgspec.structs.replace(H100, id="x" * 1000)]).decode(),
        msgspec.json.encode([msgspec.structs.replace(H100, id="")]).decode(),
        "GPU-9,1000000000,1,1,V100,0,true:",
    ],
    ids=lambda text: text[:20],
)
def test_what_no_node_has_is_refused(text: str) -> None:
    with pytest.raises(InvalidAnnotation) as raised:
        read_registered_gpus(text)

    assert len(raised.value.finding) < 400


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_cards_or_an_invalid_annotation(text: str) -> None:
    for read in (lambda: read_registered_gpus(text), lambda: read_shares(text, ["i"], ["a"])):
        try:
            assert isinstance(read(), tuple)
        except InvalidAnnotation:
            continue


def test_shares_have_the_names_of_their_containers() -> None:
    card = PodGpu(uuid="GPU-0", type="NVIDIA", memory=1000, cores=20)
    text = encode_pod([[], [card], [card]])

    found = read_shares(text, ["setup"], ["a", "b"])

    assert (share("a", 1000, cores=20), share("b", 1000, cores=20)) == found


def test_an_older_text_has_no_init_containers() -> None:
    card = PodGpu(uuid="GPU-0", type="NVIDIA", memory=7, cores=0)

    assert (share("a", 7),) == read_shares(encode_pod([[card]]), ["setup"], ["a"])
    assert (share("", 7),) == read_shares(encode_pod([[card], [], []]), ["setup"], ["a"])


@pytest.mark.parametrize("init", [[], ["i"]], ids=["app", "init"])
def test_an_instance_of_an_older_mig_node_counts_for_its_card(init: list[str]) -> None:
    """Its id has the number of the template and of the instance behind the card's. An init container has two as well."""
    text = "GPU-0[1-0],NVIDIA,9856,14:GPU-0[1-3],NVIDIA,9856,14:;" + ";" * len(init)
    pod = ForeignPod(namespace="ml", name="p", uid="u", shares=read_shares(text, init, ["a"]))

    (card, other) = foreign_gpus([FIRST, H100], None, [pod])

    assert (("p",), 2, 19712, 28) == (
        tuple(each.pod for each in card.holders), card.used_slots, card.used_memory, card.used_cores,
    )  # fmt: skip
    assert () == other.holders


@pytest.mark.parametrize(
    "text",
    [
        "GPU-0,NVIDIA,1:;",
        "GPU-0,NVIDIA,-1,0:;",
        "GPU-0,NVIDIA,1000000000,0:;",
        "GPU-0,NVIDIA,1,1000000000:;",
        "\x1b,NVIDIA,1,1:;",
        "GPU-0,NVIDIA,1,1:" * (MOST_SHARES + 1) + ";",
        ";" * (MOST_SHARES + 1),
        ":" * (MOST_SHARES + 1) + ";",
        "x" * (LONGEST + 1),
    ],
    ids=lambda text: text[:20],
)
def test_what_no_pod_has_is_refused(text: str) -> None:
    with pytest.raises(InvalidAnnotation):
        read_shares(text, [], ["a"])


def test_a_pod_holds_the_greater_of_init_and_sum() -> None:
    """An init container of 500 before two of 200 each, on the same card."""
    pod = ForeignPod(
        namespace="ml", name="p", uid="u", shares=(share("i", 500, init=True), share("a", 200), share("b", 200))
    )

    (card, other) = foreign_gpus([FIRST, H100], None, [pod])

    assert (2, 500) == (card.used_slots, card.used_memory)
    assert (("i", "a", "b"), 0, ()) == (card.holders[0].containers, other.used_slots, other.holders)


@given(pods)
def test_use_equals_a_count_over_all_shares(held: list[ForeignPod]) -> None:
    """Written anew from the rule: for each pod and card the sum over one init container, or over all others."""
    slots, memory, cores = Counter[str](), Counter[str](), Counter[str]()
    for pod in held:
        for uuid in ("GPU-0", "GPU-1"):
            own = [each for each in pod.shares if each.gpu == uuid]
            runs = [[each for each in own if not each.is_init]]
            runs += [[e for e in own if e.is_init and e.container == name] for name in {e.container for e in own}]
            slots[uuid] += max(len(run) for run in runs)
            memory[uuid] += max(sum(each.memory for each in run) for run in runs)
            cores[uuid] += max(sum(each.cores for each in run) for run in runs)

    for card in foreign_gpus([FIRST, H100], None, reversed(held)):
        assert (slots[card.uuid], memory[card.uuid], cores[card.uuid]) == (
            card.used_slots, card.used_memory, card.used_cores,
        )  # fmt: skip
        assert sorted(each.pod for each in card.holders) == [each.pod for each in card.holders]


class CountedShares(tuple[AnnotatedShare, ...]):
    """Shares that count how often somebody goes through all of them."""

    passes = 0

    def __iter__(self) -> Iterator[AnnotatedShare]:
        self.passes += 1
        return super().__iter__()


def test_the_shares_of_a_pod_are_looked_at_once() -> None:
    """Shares of a thousand cards, as any user may annotate a pod: the time grows with their number, not its square."""
    held = CountedShares(share("a", 1, card=f"GPU-{n}") for n in range(MOST_SHARES))

    cards = foreign_gpus([FIRST, H100], None, [ForeignPod(namespace="ml", name="p", uid="u", shares=held)])

    assert (1, [1, 1]) == (held.passes, [card.used_memory for card in cards])


def test_what_is_shown_of_a_card_is_bounded_and_its_use_is_not() -> None:
    held = tuple(share(f"c{n}", 1) for n in range(MOST_CONTAINERS + 1))
    many = [ForeignPod(namespace="ml", name=f"p{n}", uid=str(n), shares=held) for n in range(MOST_HOLDERS + 1)]

    (card,) = foreign_gpus([FIRST], None, many)

    assert (MOST_HOLDERS, {MOST_CONTAINERS}) == (len(card.holders), {len(each.containers) for each in card.holders})
    assert (MOST_HOLDERS + 1) * (MOST_CONTAINERS + 1) == card.used_slots == card.used_memory


def test_a_cordoned_card_is_told() -> None:
    assert [False, True] == [card.cordoned for card in foreign_gpus([FIRST, H100], "GPU-1,, GPU-7,", [])]
    assert [False, False] == [card.cordoned for card in foreign_gpus([FIRST, H100], "  ", [])]


@given(
    st.sampled_from([None, "", "Reported x", "Deleted_2026.03.04 05:06:07", "Requesting_x", "Requesting_"])
    | st.integers(-1000, 1000).map(lambda ago: f"{REQUESTING}_{NOW - timedelta(seconds=ago):%Y-%m-%d %H:%M:%S}"),
    st.integers(0, 3),
)
def test_liveness_is_that_of_the_kubelet_and_the_last_minute(handshake: str | None, allocatable: int) -> None:
    if handshake is not None and handshake.startswith("Deleted"):
        expected = HamiLiveness.DELETED
    else:
        _, _, asked = (handshake or "").partition("_")
        has_waited = len(asked) == 19 and NOW - datetime.fromisoformat(asked) >= timedelta(minutes=1)
        expected = HamiLiveness.TIMED_OUT if has_waited and not allocatable else HamiLiveness.LIVE

    assert expected is liveness_of(handshake, allocatable, NOW)
