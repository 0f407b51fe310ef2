"""
Encodes and decodes journals, and finds the valid part of a damaged one.

A journal is a header, followed by one line per entry: the CRC-32 of its JSON, a space, and the JSON. A last line
without a line feed is dropped, because no call was answered for it. Any other invalid line is damage.

The state starts at the newest snapshot, so damage before it loses nothing. Damage after it, or in the header, means
that allocations may be missing, and the record is unconfirmed. Then the lines around the newest snapshot are used, up
to the nearest gaps in the sequence numbers. A journal of another node, or of a later version of this format, is not
used. A fact of an unknown kind may have changed the allocations, so it counts as damage; unknown fields are ignored.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar
from zlib import crc32

import msgspec

from topoalign.core.model.errors import Undecodable, clean, quoted
from topoalign.core.model.events import AllocationsSnapshot, LedgerEvent
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import JournalEntry

VERSION = 1

Position = tuple[int, int]
"""Epoch and seq of a fact."""


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="topoalign.journal"):
    """The first line: the node of the journal, and the version of the format."""

    version: int
    node: NodeName
    unconfirmed: str = ""
    """Why entries may be missing; empty: none are missing."""


class JournalLine(NamedTuple):
    """A valid line."""

    entry: JournalEntry
    encoded: bytes
    """The line as stored on disk."""


class JournalContent(msgspec.Struct, frozen=True, kw_only=True):
    """What `read_journal` finds in a journal."""

    lines: Sequence[JournalLine] = ()
    """The valid lines: all of them, the newest gapless run with a snapshot, or none."""
    unfinished: int = 0
    """Bytes of an unfinished last line."""
    damage: str | None = None
    """What is damaged."""
    unconfirmed: str | None = None
    """Why the record is unconfirmed: allocations may be missing in `lines`. None: it is confirmed."""


T = TypeVar("T")

_headers = msgspec.json.Decoder(JournalHeader)
_entries = msgspec.json.Decoder(JournalEntry)


def encode_line(record: JournalEntry | JournalHeader) -> bytes:
    """The line for a header or an entry: CRC-32 in hexadecimal, a space, JSON, a line feed."""
    payload = msgspec.json.encode(record)
    return b"%08x %s\n" % (crc32(payload), payload)


def read_journal(content: bytes, node: NodeName, published: Position | None) -> JournalContent:
    """Reads the bytes of a journal. `published`: the newest fact that the bus has; None: unknown. Never raises."""
    whole, _, unfinished = content.rpartition(b"\n")
    if not whole:
        return lost_journal("it has no header" if content else "it is empty")
    first, *others = whole.split(b"\n")
    damages: list[str] = []
    try:
        header = decode_line("the header", first, _headers)
    except Undecodable as error:
        damages.append(error.finding)
        header = JournalHeader(version=VERSION, node=node, unconfirmed=error.finding)
    if header.version > VERSION:
        return lost_journal(f"it is of version {header.version}, and this program reads up to version {VERSION}")
    if header.node != node:
        return lost_journal(f"it is the journal of node {quoted([header.node])}, and this is node {quoted([node])}")
    runs, found = runs_of(others, node)
    damages += found
    if unfinished and is_whole(unfinished[:-1]):
        damages.append("the last line is incomplete")
        runs.append([])
    if not header.unconfirmed:
        damages += missing_at_end(runs[-1], published)
    if not damages:
        return JournalContent(lines=runs[-1], unfinished=len(unfinished), unconfirmed=header.unconfirmed or None)
    damage = damages[0] if len(damages) == 1 else f"{damages[0]}, and {len(damages) - 1} more"
    trusted = next((run for run in reversed(runs) if has_snapshot(run)), [])
    is_all = trusted is runs[-1] and has_snapshot(trusted) and not missing_at_end(trusted, published)
    return JournalContent(lines=trusted, damage=damage, unconfirmed=header.unconfirmed or (None if is_all else damage))


def lost_journal(damage: str) -> JournalContent:
    """The content of a journal that cannot be used, for this reason."""
    return JournalContent(damage=damage, unconfirmed=damage)


def runs_of(lines: Sequence[bytes], node: NodeName) -> tuple[list[list[JournalLine]], list[str]]:
    """The valid lines, as one list for each run without gaps, and the damage between the runs."""
    runs: list[list[JournalLine]] = [[]]
    damages: list[str] = []
    for number, line in enumerate(lines, 2):
        try:
            entry = decode_line(f"line {number}", line, _entries)
            if others := [event.node for event in entry.events if event.node != node]:
                raise Undecodable(f"line {number}", f"it is about node {quoted(others[:1])}")
        except Undecodable as error:
            damages.append(error.finding)
            runs.append([])
            continue
        if not all(follows(*pair) for pair in pairwise([*facts_of_lines(runs[-1][-1:]), *entry.events])):
            damages.append(f"facts before line {number} are missing")
            runs.append([])
        runs[-1].append(JournalLine(entry, line + b"\n"))
    return runs, damages


def missing_at_end(run: Sequence[JournalLine], published: Position | None) -> list[str]:
    """Returns what is missing after the last run of a journal; empty: nothing is known to be missing."""
    facts = facts_of_lines(run)
    if facts and not has_snapshot(run) and facts[0].seq != 1:
        return ["the snapshot at its end is missing"]
    if published is not None and published > ((facts[-1].epoch, facts[-1].seq) if facts else (0, 0)):
        return ["published facts are missing at its end"]
    return []


def decode_line(what: str, line: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Checks a line against its checksum and decodes its JSON. `what` names it in the error. Raises Undecodable."""
    if not is_whole(line):
        raise Undecodable(what, "it does not match its checksum")
    try:
        return decoder.decode(line.partition(b" ")[2])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(what, clean(str(error), 200)) from error


def is_whole(line: bytes) -> bool:
    """Whether a line (without its line feed) matches its checksum."""
    checksum, _, payload = line.partition(b" ")
    return checksum == b"%08x" % crc32(payload)


def facts_of_lines(lines: Sequence[JournalLine]) -> list[LedgerEvent]:
    """The facts of these lines, in order."""
    return [event for line in lines for event in line.entry.events]


def has_snapshot(lines: Sequence[JournalLine]) -> bool:
    """Whether the facts of these lines include a snapshot of all allocations."""
    return any(isinstance(event, AllocationsSnapshot) for event in facts_of_lines(lines))


def follows(before: LedgerEvent, event: LedgerEvent) -> bool:
    """Whether no fact is missing between these two: seq increases by one, and an epoch begins with a snapshot."""
    if event.epoch == before.epoch:
        return event.seq == before.seq + 1
    return event.epoch > before.epoch and isinstance(event, AllocationsSnapshot)


def unpublished(
    events: Sequence[tuple[LedgerEvent, float]], published: Position | None, newest: int
) -> Sequence[tuple[LedgerEvent, float]]:
    """
    Returns the facts after the newest published one, or all if the journal no longer has that one. If it is unknown
    what the bus has, returns the facts starting with the newest snapshot (index `newest`), because subscribers must not
    get old facts after newer ones.
    """
    if published is None:
        return events[newest:]
    positions = [at for at, (event, _) in enumerate(events) if (event.epoch, event.seq) == published]
    return events[positions[0] + 1 :] if positions else events
